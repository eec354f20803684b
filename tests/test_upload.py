"""Packing tensors into one buffer."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from minispec.upload import OnDemand, Packing, tensor_of, upload

TENSORS = [
    torch.tensor([1, 2, 3]),
    torch.tensor([True, False, True]),
    torch.empty(0, dtype=torch.int32),
    torch.arange(6, dtype=torch.int32).view(2, 3),
    torch.tensor([0.5]),
]


def test_what_is_packed_comes_out():
    packing = Packing(TENSORS)
    buffer = packing.pack(TENSORS, pin=False)
    assert buffer.shape == (packing.nbytes,)
    for view, tensor in zip(packing.views(buffer), TENSORS, strict=True):
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor)
        assert (view.data_ptr() - buffer.data_ptr()) % 16 == 0 or not view.numel()


def test_smaller_tensors_leave_zeros():
    packing = Packing([torch.empty(4, dtype=torch.int64), torch.empty(2, 3, dtype=torch.int32)])
    first, second = packing.views(packing.pack([torch.tensor([7]), torch.tensor([[5, 6]])], pin=False))
    assert first.tolist() == [7, 0, 0, 0]
    assert second.tolist() == [[5, 6, 0], [0, 0, 0]]


def test_upload_to_a_cpu():
    assert all(torch.equal(a, b) for a, b in zip(upload(TENSORS, "cpu"), TENSORS, strict=True))


@pytest.mark.parametrize(
    ("code", "values", "dtype"),
    [
        ("q", [2**63 - 1, -(2**63)], torch.int64),
        ("i", [1, -2], torch.int32),
        ("f", [0.5, -1.0], torch.float32),
        ("b", [True, False], torch.bool),
    ],
)
def test_tensor_of_an_array(code, values, dtype):
    for some in (values, []):
        assert torch.equal(tensor_of(array(code, some)), torch.tensor(some, dtype=dtype))


@dataclass(frozen=True)
class Pair(OnDemand):
    arrays: dict[str, array]
    device: str

    def shape(self, name):
        return (2, 1) if name == "column" else super().shape(name)


def test_tensors_are_made_on_demand():
    """On a CPU each by itself, in the array's memory; elsewhere all of them by one copy."""
    arrays = {"row": array("q", [1, 2]), "column": array("i", [3, 4])}
    pair = Pair(arrays, "cpu")
    assert pair.column.tolist() == [[3], [4]] and pair.column is pair.column and "row" not in vars(pair)
    arrays["column"][0] = 5
    assert pair.column.tolist() == [[5], [4]]
    away = Pair(arrays, "meta")
    assert away.row.shape == (2,) and isinstance(vars(away)["column"], Tensor)
    with pytest.raises(AttributeError, match="a Pair has no diagonal"):
        pair.diagonal  # noqa: B018

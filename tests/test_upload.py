"""Packing tensors into one buffer."""

from __future__ import annotations

import torch

from minispec.upload import Packing, upload

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

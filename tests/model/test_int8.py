"""Weights of 8 bits: what rounding costs, and that the layers compute what they say."""

import pytest
import torch
import torch.nn.functional as F

from minispec.kernels import quantize_int8
from minispec.model.int8 import GROUP, BlockInt8Linear, Blocks, OutputInt8Linear, from_blocks, round_rows, to_blocks
from minispec.model.linear import Rows
from minispec.model.linears import Linears


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [1, 31, 32, 70, 160])
def test_a_weight_is_off_by_half_a_step(inputs: int, dtype: torch.dtype) -> None:
    weight = randn(50, inputs, dtype=dtype)
    weight[3] = 0
    weight[4, 0] = 1000
    before = weight.clone()
    blocks = to_blocks(weight)
    assert blocks.values.shape == (50, inputs) and blocks.scales.shape == (50, -(-inputs // GROUP))
    step = blocks.scales.float().repeat_interleave(GROUP, 1)[:, :inputs]
    # where the scale was rounded down, the greatest is cut off at 127 steps
    assert ((from_blocks(blocks) - weight.float()).abs() <= step * 0.76).all()
    assert torch.equal(from_blocks(blocks)[3], torch.zeros(inputs))
    assert torch.equal(weight, before)


def test_a_large_weight_is_rounded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = randn(50, 70), randn(3, 70, seed=1)
    whole, out = to_blocks(weight), BlockInt8Linear(weight)(x)
    monkeypatch.setattr("minispec.model.int8._PIECE", 70 * 12)  # of 12 outputs; the last one reaches back
    for got, expected in zip(to_blocks(weight), whole, strict=True):
        assert torch.equal(got, expected)
    torch.testing.assert_close(BlockInt8Linear(weight)(x), out)


def test_rows_are_rounded_by_themselves() -> None:
    x = randn(6, 70, seed=1)
    x[1, 7], x[2] = 25_000, 0
    rounded = round_rows(x)
    top = F.pad(x, (0, 26)).view(6, 3, 32).abs().amax(-1).repeat_interleave(32, 1)[:, :70]
    assert ((rounded - x).abs() <= top / 253).all()
    assert torch.equal(rounded[2], x[2])
    for i in range(6):
        assert torch.equal(round_rows(x[i : i + 1])[0], rounded[i])
    assert ((rounded[1] - x[1])[32:].abs() < 0.05).all()  # an outlier spoils its own block only


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    x = randn(3, 70)
    x[1, 40] = bad
    out = BlockInt8Linear(randn(20, 70, seed=1))(x)
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("rows", [0, 1, 7, 33])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_linear(rows: int, biased: bool, dtype: torch.dtype) -> None:
    weight, x = randn(96, 150, dtype=dtype), randn(rows, 150, seed=1, dtype=dtype)
    bias = randn(96, seed=2, dtype=dtype) if biased else None
    linear = BlockInt8Linear(weight, bias)
    out = linear(x)
    assert out.dtype == dtype and out.shape == (rows, 96)
    offset = 0 if bias is None else bias.double()
    exact = round_rows(x).double() @ from_blocks(linear.blocks).double().T + offset
    torch.testing.assert_close(out.double(), exact, rtol=2**-7 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T + offset, rtol=0.02, atol=0.5)
    assert torch.equal(BlockInt8Linear(Blocks(*linear.blocks), bias)(x), out)


@pytest.mark.parametrize("shape", [(52, 70), (300, 1100)])
def test_deterministic_rows(shape: tuple[int, int]) -> None:
    linear = Linears(deterministic=True, quantize="int8")(randn(*shape, dtype=torch.bfloat16))
    assert linear.rows != Rows()
    x = randn(40, shape[1], seed=1, dtype=torch.bfloat16)
    whole = linear(x)
    for n in range(1, 41):
        assert torch.equal(linear(x[:n]), whole[:n])


def test_memory() -> None:
    """8.5 bits a weight."""
    linear = Linears(quantize="int8")(randn(256, 512, dtype=torch.bfloat16))
    assert isinstance(linear, BlockInt8Linear)
    assert sum(part.nbytes for part in linear.blocks) == 256 * 512 * 17 // 16


@pytest.mark.parametrize("biased", [False, True])
def test_output_linear(biased: bool) -> None:
    weight, x = randn(32, 64), randn(5, 64, seed=1)
    bias = randn(32, seed=2) if biased else None
    q, scale = quantize_int8(weight)
    expected = F.linear(x, q.float() * scale[:, None], bias)
    torch.testing.assert_close(OutputInt8Linear(weight, bias)(x), expected)

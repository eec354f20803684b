"""Packed and plain linear layers give the same, and the head's leading logits are exact."""

import pytest
import torch
import torch.nn.functional as F

from minispec.model.linear import (
    RESCORED,
    Head,
    Linear,
    Rows,
    by_rows,
    can_pack,
    steady_rows,
)
from minispec.model.linears import Linears

CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(dtype: torch.dtype, rows: int, biased: bool) -> None:
    weight, x = randn(96, 64, dtype=dtype), randn(rows, 64, seed=1, dtype=dtype)
    bias = randn(96, seed=2, dtype=dtype) if biased else None
    out = Linear(weight, bias)(x)
    assert out.dtype == dtype
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(out.double(), exact, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(CPU, torch.float16)
    assert not can_pack(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("vocab", [5, 1000])
def test_head_ranks_its_leading_candidates_exactly(vocab: int) -> None:
    weight, x = randn(vocab, 64, dtype=torch.bfloat16), randn(20, 64, seed=1, dtype=torch.bfloat16)
    logits = Head(weight)(x)
    exact = F.linear(x.float(), weight.float())
    assert logits.dtype == torch.float32
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))
    count = min(4, RESCORED, vocab)
    torch.testing.assert_close(logits.topk(count).values, exact.topk(count).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, exact, rtol=2**-7, atol=0.02)


def test_head_of_no_rows() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits = Head(randn(10, 8, dtype=dtype))(randn(0, 8, dtype=dtype))
        assert logits.shape == (0, 10)
        assert logits.dtype == torch.float32


@pytest.mark.parametrize(
    "rows", [Rows(), Rows(least=2), Rows(least=16), Rows(least=16, tile=16), Rows(least=4, tile=4)]
)
@pytest.mark.parametrize("count", [1, 3, 4, 16, 17, 33])
def test_rows_at_a_time(rows: Rows, count: int) -> None:
    weight, x = randn(24, 32), randn(count, 32, seed=1)
    given: list[int] = []

    def product(part: torch.Tensor) -> torch.Tensor:
        given.append(part.shape[0])
        return F.linear(part, weight)

    torch.testing.assert_close(by_rows(product, x, rows), F.linear(x, weight))
    assert all(n == rows.tile for n in given) if rows.tile else given == [max(count, rows.least)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (64, 1536), (40, 129)])
def test_steady_rows(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """A row is the same in any company, also where rounding shows as much as it can: sums near zero of large terms."""
    linears = Linears(deterministic=True)
    half = randn(outputs, inputs // 2, dtype=dtype)
    weight = F.pad(torch.cat([half, -half.flip(1)], dim=1), (0, inputs % 2))
    wide = randn(70, inputs // 2, seed=1, dtype=dtype)
    x = F.pad(torch.cat([wide, wide.flip(1)], dim=1), (0, inputs % 2))
    linear = linears(weight)
    assert linear.rows == steady_rows(outputs, inputs, dtype)
    whole = linear(x)
    for n in range(1, 70):
        assert torch.equal(linear(x[:n]), whole[:n])
        assert torch.equal(linear(x[n:]), whole[n:])

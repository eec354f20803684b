"""Packed and plain linear layers give the same, and the head's leading logits are exact."""

import pytest
import torch
import torch.nn.functional as F

from minispec.kernels import quantize_int8
from minispec.model.linear import (
    RESCORED,
    Head,
    Int8Linear,
    Linear,
    Linears,
    Rows,
    by_rows,
    can_multiply_int8,
    can_pack,
    steady_rows,
)

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


@pytest.mark.parametrize("rows", [0, 1, 7, 33])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8(rows: int, biased: bool, dtype: torch.dtype) -> None:
    weight, x = randn(96, 160, dtype=dtype), randn(rows, 160, seed=1, dtype=dtype)
    bias = randn(96, seed=2, dtype=dtype) if biased else None
    linear = Int8Linear(weight, bias)
    out = linear(x)
    assert out.dtype == dtype and out.shape == (rows, 96)
    q, scale = quantize_int8(weight)
    if can_multiply_int8(CPU) and rows:
        step = x.float().abs().amax(-1, keepdim=True) * (1 / 127)
        x = ((x.float() / step + 128.5).floor() - 128) * step
    exact = x.double() @ q.double().T * scale.double()
    exact = exact if bias is None else exact + bias.double()
    torch.testing.assert_close(out.double(), exact, rtol=2**-7 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
    torch.testing.assert_close(
        out.double(),
        F.linear(x.double(), weight.double(), None if bias is None else bias.double()),
        rtol=0.05,
        atol=0.5,
    )


def test_int8_of_a_row_of_zeros_and_of_an_outlier() -> None:
    weight, x = randn(32, 64), randn(5, 64, seed=1)
    x[2] = 0
    x[3, 7] = 25_000
    out = Int8Linear(weight)(x)
    assert torch.equal(out[2], torch.zeros(32)) or out[2].abs().max() < 1e-6
    torch.testing.assert_close(out[3], F.linear(x[3], weight), rtol=0.02, atol=800)
    # who shares the step does not matter: not even the outlier's neighbour
    assert torch.equal(out[4], Int8Linear(weight)(x[4:])[0])


def test_int8_without_8_bit_dot_products_rounds_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minispec.model.linear.can_multiply_int8", lambda device: False)
    weight, x = randn(32, 64), randn(5, 64, seed=1)
    q, scale = quantize_int8(weight)
    torch.testing.assert_close(Int8Linear(weight)(x), x @ (q.float() * scale[:, None]).T)


def test_int8_takes_half_the_memory() -> None:
    linear = Int8Linear(randn(256, 512, dtype=torch.bfloat16))
    assert linear.weight.numel() * linear.weight.element_size() <= 256 * 512 * 1.1

"""Packed and plain linear layers give the same, and the head's leading logits are exact."""

import pytest
import torch
import torch.nn.functional as F

from minispec.model.linear import RESCORED, Head, Linear, can_pack

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

"""The operations between a layer's linears: kernels under the interpreter against the torch references."""

import pytest
import torch

from minispec.kernels.kv_commit import (
    MAX_MOVES,
    kv_commit_path_ref,
    kv_commit_path_triton,
    kv_commit_ref,
    kv_commit_triton,
)
from minispec.kernels.qk_norm import qk_norm_ref, qk_norm_triton
from minispec.kernels.rms_norm import rms_norm_ref, rms_norm_triton
from minispec.kernels.rope import rope_ref, rope_triton
from minispec.kernels.rope_kv_write import rope_kv_write_ref, rope_kv_write_triton
from minispec.kernels.silu_mul import silu_mul_ref, silu_mul_triton
from paged_steps import random_step

DTYPES = [torch.float32, torch.float16]  # the interpreter truncates where it should round to bfloat16


def angles(rows, head_dim):
    angle = torch.rand(rows, head_dim // 2) * 100
    return angle.cos(), angle.sin()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 80), (5, 1, 96), (32, 8, 128), (1, 1, 256)]
)
def test_rope_kv_write(heads, kv_heads, head_dim):
    batch, pages = random_step([("tree", 5, 17), ("chunk", 0, 4), ("chunk", 2, 15)], 16)
    rows = len(batch.tokens)
    # q, k, v are views of one projection
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim)
    q, k, v = (t.view(rows, -1, head_dim) for t in qkv.split([n * head_dim for n in (heads, kv_heads, kv_heads)], -1))
    cos, sin = angles(rows, head_dim)
    caches = [torch.full((2, kv_heads, pages * 16, head_dim), -7.0) for _ in range(2)]
    expected = rope_kv_write_ref(q, k, v, cos, sin, *caches[0], batch)
    actual = rope_kv_write_triton(q, k, v, cos, sin, *caches[1], batch)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(caches[1], caches[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(dtype):
    x = torch.randn(3, 10, 80).to(dtype)[:, 2:5]
    cos, sin = angles(3, 80)
    torch.testing.assert_close(rope_triton(x, cos, sin), rope_ref(x, cos, sin))
    assert rope_triton(x[:0], cos[:0], sin[:0]).shape == (0, 3, 80)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(1, 576), (3, 4096), (2, 3, 63), (0, 64)])
def test_rms_norm(shape, residual, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype) + 0.5
    other = torch.randn(shape).to(dtype) if residual else None
    actual = rms_norm_triton(x, weight, 1e-5, other)
    expected = rms_norm_ref(x, weight, 1e-5, other)
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (16, 8, 128), (3, 1, 80)])
def test_qk_norm(heads, kv_heads, head_dim, dtype):
    both = torch.randn(4, heads + kv_heads, head_dim).to(dtype)
    weights = torch.rand(2, head_dim).to(dtype) + 0.5
    q, k = both.split([heads, kv_heads], 1)
    for actual, expected in zip(qk_norm_triton(q, k, *weights, 1e-6), qk_norm_ref(q, k, *weights, 1e-6), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 576, 1024, 1537])
def test_silu_mul(dim, dtype):
    x = (torch.randn(3, 2 * dim + 5) * 3).to(dtype)[:, : 2 * dim]
    torch.testing.assert_close(silu_mul_triton(x), silu_mul_ref(x))
    assert silu_mul_triton(x[:0]).shape == (0, dim)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(
    ("source", "target"),
    [([], []), ([5], [2]), ([3, 4, 9], [2, 3, 4]), ([1, 2, 3, 0], [0, 1, 2, 3]), ([*range(1, 48), 0], [*range(48)])],
)
def test_kv_commit(source, target, head_dim):
    k, v = torch.randn(2, 2, 3, 48, head_dim)
    expected = k.clone(), v.clone()
    if source:
        kv_commit_ref(*expected, source, target)
    kv_commit_triton(k, v, source, target)
    torch.testing.assert_close((k, v), expected, rtol=0, atol=0)


def test_kv_commit_of_more_moves_than_a_program_holds():
    k, v = torch.randn(2, 1, 1, 2 * MAX_MOVES, 16)
    expected = k.clone(), v.clone()
    source, target = list(range(1, MAX_MOVES + 2)), list(range(MAX_MOVES + 1))
    kv_commit_ref(*expected, source, target)
    kv_commit_triton(k, v, source, target)
    torch.testing.assert_close((k, v), expected, rtol=0, atol=0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_kv_commit_path(page_size):
    path = torch.tensor([[0, 1, 4, 9], [0, -1, -1, -1], [0, 2, 3, -1]], dtype=torch.int32)
    num_cached = torch.tensor([15, 3, 16], dtype=torch.int32)
    pages = -(-32 // page_size)
    page_table = torch.randperm(3 * pages).view(3, pages).to(torch.int32)
    k, v = torch.randn(2, 2, 3, 3 * pages * page_size, 64)
    expected = k.clone(), v.clone()
    kv_commit_path_ref(*expected, path, num_cached, page_table, page_size)
    kv_commit_path_triton(k, v, path, num_cached, page_table, page_size)
    assert not torch.equal(k, torch.zeros_like(k))
    torch.testing.assert_close((k, v), expected, rtol=0, atol=0)

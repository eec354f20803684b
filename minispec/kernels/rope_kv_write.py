"""Rotate queries and keys (RoPE: Su et al. 2021, arXiv 2104.09864) and write keys and values into the paged cache.

rotate(x) = x * cos + (-x[half:], x[:half]) * sin        cos, sin at the row's position: committed length + depth

Roofline for n rows, H query heads, G KV heads, D = head_dim, b bytes per element: 2 n (H + 2 G) D b + 4 n D bytes,
3 n (H + G) D FLOPs; bound by memory, at few rows by the launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.batch import StepBatch
from minispec.kernels._triton import cdiv, jit, power_of_2
from minispec.kernels.rope import rotated

if TYPE_CHECKING:
    import triton.language as tl


def rope_kv_write_ref(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch
) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        q: [rows, heads, head_dim].
        k, v: [rows, kv_heads, head_dim].
        cos, sin: [rows, head_dim / 2] float32.
        k_cache, v_cache: [kv_heads, positions, head_dim], one layer's cache; written at ``batch.kv_index``.

    Returns:
        The rotated queries, [rows, heads, head_dim], in q's dtype.
    """
    # rotated together: at few rows the cost is the number of operations
    q, k = _rotate(torch.cat([q, k], dim=1), cos, sin).split([q.shape[1], k.shape[1]], dim=1)
    k_cache.index_copy_(1, batch.kv_index, k.transpose(0, 1).to(k_cache.dtype))
    v_cache.index_copy_(1, batch.kv_index, v.transpose(0, 1).to(v_cache.dtype))
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def rope_kv_write_triton(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch
) -> Tensor:
    """Triton launcher; arguments as in the reference. q, k, v may be views with any row and head strides."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    half = power_of_2(head_dim // 2)
    block = max(1, min(power_of_2(heads), 512 // half))
    _rope_kv_write_kernel[(rows, cdiv(heads, block) + cdiv(kv_heads, block))](
        q, k, v, cos, sin, out, k_cache, v_cache, batch.kv_index, heads, kv_heads,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_cache.stride(0), k_cache.stride(1),
        HALF=head_dim // 2, BLOCK_HALF=half, BLOCK_HEADS=block, num_warps=2,
    )  # fmt: skip
    return out


@jit
def _rope_kv_write_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    kv_index: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    cache_head: tl.tensor,
    cache_position: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    """One program: BLOCK_HEADS heads of one row. The query heads come first, then those of keys and values.

    q, out [rows, heads, 2 * HALF]; k, v [rows, kv_heads, 2 * HALF]; cos, sin [rows, HALF] float32;
    caches [kv_heads, positions, 2 * HALF]; kv_index [rows] int64.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    lane = tl.arange(0, BLOCK_HALF)
    cos += row * HALF
    sin += row * HALF
    query_blocks = tl.cdiv(heads, BLOCK_HEADS)
    if block < query_blocks:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        inside = (head < heads)[:, None] & (lane < HALF)[None, :]
        first, second = rotated(q + row * q_row, cos, sin, head, q_head, lane, inside, HALF)
        target = out + ((row * heads + head) * 2 * HALF)[:, None] + lane[None, :]
        tl.store(target, first.to(out.dtype.element_ty), mask=inside)
        tl.store(target + HALF, second.to(out.dtype.element_ty), mask=inside)
    else:
        head = (block - query_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        inside = (head < kv_heads)[:, None] & (lane < HALF)[None, :]
        first, second = rotated(k + row * k_row, cos, sin, head, k_head, lane, inside, HALF)
        position = tl.load(kv_index + row) * cache_position
        entry = (position + head.to(tl.int64) * cache_head)[:, None] + lane[None, :]
        # rounded to the keys' dtype first: a narrower cache then holds the same values whoever writes it
        tl.store(k_cache + entry, first.to(k.dtype.element_ty).to(k_cache.dtype.element_ty), mask=inside)
        tl.store(k_cache + entry + HALF, second.to(k.dtype.element_ty).to(k_cache.dtype.element_ty), mask=inside)
        source = v + row * v_row + (head * v_head)[:, None] + lane[None, :]
        value = tl.load(source, mask=inside, other=0.0)
        rest = tl.load(source + HALF, mask=inside, other=0.0)
        tl.store(v_cache + entry, value.to(v_cache.dtype.element_ty), mask=inside)
        tl.store(v_cache + entry + HALF, rest.to(v_cache.dtype.element_ty), mask=inside)

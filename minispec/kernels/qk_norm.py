"""RMSNorm of each query and key head (QK-norm: Henry et al. 2020, arXiv 2010.04245; as in Qwen3), in one launch.

    y = x / sqrt(mean(x^2) + eps) * weight        over head_dim

Roofline for n rows, H + G heads and b bytes per element: 2 n (H + G) head_dim b bytes, 4 n (H + G) head_dim FLOPs;
bound by memory, at few rows by the launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.kernels._triton import cdiv, jit, power_of_2
from minispec.kernels.rms_norm import rms_norm_ref

if TYPE_CHECKING:
    import triton.language as tl


def qk_norm_ref(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Torch reference, and the path of a CPU.

    Args:
        q: [rows, heads, head_dim].
        k: [rows, kv_heads, head_dim].
        q_weight, k_weight: [head_dim].
        eps: added to the mean square.

    Returns:
        Normalised q and k, in their dtypes.
    """
    return rms_norm_ref(q, q_weight, eps)[0], rms_norm_ref(k, k_weight, eps)[0]


def qk_norm_triton(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Triton launcher; arguments as in the reference. q and k may be views with any row and head strides."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    q_out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    k_out = torch.empty((rows, kv_heads, head_dim), dtype=k.dtype, device=k.device)
    if rows:
        block_d = power_of_2(head_dim)
        block = max(1, min(power_of_2(heads), 1024 // block_d))
        _qk_norm_kernel[(rows, cdiv(heads, block) + cdiv(kv_heads, block))](
            q, k, q_weight, k_weight, q_out, k_out, heads, kv_heads,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), eps,
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_HEADS=block, num_warps=2,
        )  # fmt: skip
    return q_out, k_out


@jit
def _qk_norm_kernel(
    q: tl.tensor,
    k: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    """One program: BLOCK_HEADS heads of one row; the query heads come first. Shapes as in the reference."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks = tl.cdiv(heads, BLOCK_HEADS)
    if block < query_blocks:
        _norm_heads(
            q + row * q_row, q_weight, q_out + row * heads * HEAD_DIM, block, heads, q_head, eps,
            HEAD_DIM, BLOCK_D, BLOCK_HEADS,
        )  # fmt: skip
    else:
        _norm_heads(
            k + row * k_row, k_weight, k_out + row * kv_heads * HEAD_DIM, block - query_blocks, kv_heads, k_head, eps,
            HEAD_DIM, BLOCK_D, BLOCK_HEADS,
        )  # fmt: skip


@jit
def _norm_heads(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    block: tl.tensor,
    heads: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    """Normalise one block of heads; x and out point to the row's first entries."""
    head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_D)
    inside = (head < heads)[:, None] & (d < HEAD_DIM)[None, :]
    wide = tl.load(x + (head * head_stride)[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)[:, None]
    w = tl.load(weight + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    scaled = normed.to(out.dtype.element_ty).to(tl.float32) * w[None, :]
    tl.store(out + (head * HEAD_DIM)[:, None] + d[None, :], scaled.to(out.dtype.element_ty), mask=inside)

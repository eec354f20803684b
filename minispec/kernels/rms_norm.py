"""RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) with the residual addition before it.

    h = x + residual
    y = h / sqrt(mean(h^2) + eps) * weight

Roofline for n rows and b bytes per element: (2 n + 1) dim b bytes, with a residual (4 n + 1) dim b; about 5 n dim
FLOPs; bound by memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.kernels._triton import jit, power_of_2

if TYPE_CHECKING:
    import triton.language as tl


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Torch reference, and the path of a CPU.

    Args:
        x: [..., dim].
        weight: [dim].
        eps: added to the mean square.
        residual: [..., dim] or None for no addition.

    Returns:
        (y, h), both in x's dtype. The norm is computed in float32 and rounded before the weight is applied, as in
        transformers' Llama.
    """
    if residual is not None:
        x = x + residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight, x


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Triton launcher; arguments as in the reference."""
    dim = x.shape[-1]
    # a view of all rows where strides allow it, else a copy (q and k cut out of one projection: use qk_norm)
    flat = x.reshape(-1, dim)
    rows = flat.shape[0]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = x if residual is None else torch.empty_like(y)
    if rows:
        block = power_of_2(dim)
        _rms_norm_kernel[(rows,)](
            flat, flat if residual is None else residual.contiguous(), weight, y, h, flat.stride(0), eps,
            DIM=dim, BLOCK=block, ADD=residual is not None, num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return y, h


@jit
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    h: tl.tensor,
    x_row: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """One program: one row. x [rows, DIM] with row stride x_row; residual, y, h [rows, DIM]; weight [DIM]."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < DIM
    wide = tl.load(x + row * x_row + lane, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + row * DIM + lane, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(h.dtype.element_ty)
        tl.store(h + row * DIM + lane, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
    scaled = normed.to(y.dtype.element_ty).to(tl.float32) * tl.load(weight + lane, mask=inside, other=0.0).to(
        tl.float32
    )
    tl.store(y + row * DIM + lane, scaled.to(y.dtype.element_ty), mask=inside)

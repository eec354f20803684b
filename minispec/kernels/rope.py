"""Rotary position embedding (RoPE: Su et al. 2021, arXiv 2104.09864), halves paired as in Llama.

    rotate(x) = (x[:half] * cos - x[half:] * sin,  x[half:] * cos + x[:half] * sin)

Roofline for n rows, H heads, D = head_dim, b bytes per element: 2 n H D b + 4 n D bytes, 3 n H D FLOPs; bound by
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.kernels._triton import cdiv, jit, power_of_2

if TYPE_CHECKING:
    import triton.language as tl


def rope_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        x: [rows, heads, head_dim].
        cos, sin: [rows, head_dim / 2] float32, at each row's position.

    Returns:
        [rows, heads, head_dim] in x's dtype; computed in float32.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rope_triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Triton launcher; arguments as in the reference. x may be a view with any row and head strides."""
    rows, heads, head_dim = x.shape
    out = torch.empty((rows, heads, head_dim), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    half = power_of_2(head_dim // 2)
    block = max(1, min(power_of_2(heads), 512 // half))
    _rope_kernel[(rows, cdiv(heads, block))](
        x, cos, sin, out, heads, x.stride(0), x.stride(1),
        HALF=head_dim // 2, BLOCK_HALF=half, BLOCK_HEADS=block, num_warps=2,
    )  # fmt: skip
    return out


@jit
def _rope_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    x_row: tl.tensor,
    x_head: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    """One program: BLOCK_HEADS heads of one row. x, out [rows, heads, 2 * HALF]; cos, sin [rows, HALF] float32."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    lane = tl.arange(0, BLOCK_HALF)
    inside = (head < heads)[:, None] & (lane < HALF)[None, :]
    first, second = rotated(x + row * x_row, cos + row * HALF, sin + row * HALF, head, x_head, lane, inside, HALF)
    target = out + ((row * heads + head) * 2 * HALF)[:, None] + lane[None, :]
    tl.store(target, first.to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, second.to(out.dtype.element_ty), mask=inside)


@jit
def rotated(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    head: tl.tensor,
    head_stride: tl.tensor,
    lane: tl.tensor,
    inside: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves, [heads, half] float32, of some heads of one row: x, cos and sin point to the row's first entries."""
    c = tl.load(cos + lane, mask=lane < HALF, other=0.0)[None, :]
    s = tl.load(sin + lane, mask=lane < HALF, other=0.0)[None, :]
    source = x + (head * head_stride)[:, None] + lane[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    return first * c - second * s, second * c + first * s

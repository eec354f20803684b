"""The SwiGLU activation (Shazeer 2020, arXiv 2002.05202): ``silu(gate) * up``.

Roofline for n rows and b bytes per element: 3 n dim b bytes, about 5 n dim FLOPs; bound by memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.kernels._triton import cdiv, jit

if TYPE_CHECKING:
    import triton.language as tl


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        gate_up: [rows, 2 * dim], gate in the first half.

    Returns:
        [rows, dim].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


_BLOCK = 1024


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """Triton launcher; arguments as in the reference. Rows may be strided."""
    rows, width = gate_up.shape
    dim = width // 2
    out = torch.empty((rows, dim), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _silu_mul_kernel[(rows, cdiv(dim, _BLOCK))](gate_up, out, dim, gate_up.stride(0), BLOCK=_BLOCK, num_warps=4)
    return out


@jit
def _silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, dim: tl.tensor, stride: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program: BLOCK entries of one row. gate_up [rows, 2 * dim], out [rows, dim]."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < dim
    gate = tl.load(gate_up + row * stride + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + dim + lane, mask=inside, other=0.0).to(tl.float32)
    # rounded where torch rounds, so that both give the same bits in 16-bit types
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * dim + lane, (activated * up).to(out.dtype.element_ty), mask=inside)

"""A linear layer with int8 weights, one scale per output: halves the bytes a small step reads.

    y[r, o] = scale[o] * sum_i x[r, i] * q[o, i]          q = round(w / scale), scale[o] = max_i |w[o, i]| / 127

Round-to-nearest per output channel, weights only (LLM.int8(): Dettmers et al. 2022, arXiv 2208.07339, section 2.1). An
int8 is exact in fp16 and bf16, so the products are those of the 16-bit layer and only the weights are rounded.

Roofline for n rows: inputs * outputs bytes of weights + 2 n (inputs + outputs); 2 n inputs outputs FLOPs. Up to about
100 rows it is bound by reading the weights. Up to 16 rows share one tile, so a row's result does not depend on
its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.kernels._triton import cdiv, jit, power_of_2

if TYPE_CHECKING:
    import triton.language as tl


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a linear layer's weight.

    Args:
        weight: [outputs, inputs].

    Returns:
        (q [outputs, inputs] int8, scale [outputs] float32).
    """
    wide = weight.float()
    scale = wide.abs().amax(-1) / 127
    # a row of zeros has no scale; any would do
    q = (wide / torch.where(scale > 0, scale, 1.0)[:, None]).round().to(torch.int8)
    return q, scale


def linear_int8_ref(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        x: [rows, inputs].
        weight: [outputs, inputs] int8.
        scale: [outputs] float32.
        bias: [outputs] or None.

    Returns:
        [rows, outputs] in x's dtype; accumulated in float32.
    """
    y = x.float() @ weight.float().T * scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


def linear_int8_triton(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Triton launcher; arguments as in the reference."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    wide = x.element_size() == 4
    block_m = min(16 if wide else 64, max(16, power_of_2(rows)))
    # narrow blocks of outputs: several programs per multiprocessor keep enough reads in flight
    block_n = 16 if wide or block_m == 16 else 32
    _linear_int8_kernel[(cdiv(outputs, block_n), cdiv(rows, block_m))](
        x, weight, scale, scale if bias is None else bias, out, rows, outputs, inputs, x.stride(0),
        BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=32 if wide else 128,
        PRECISION="ieee" if wide else "tf32", num_warps=4, num_stages=2 if wide else 4 if block_m == 16 else 3,
    )  # fmt: skip
    return out


@jit
def _linear_int8_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    stride: tl.tensor,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program: a tile [BLOCK_M, BLOCK_N] of out. Shapes as in the reference."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    x_rows = x + (row.to(tl.int64) * stride)[:, None]
    w_rows = weight + (output.to(tl.int64) * inputs)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + lane
        a = tl.load(x_rows + k[None, :], mask=(row < rows)[:, None] & (k < inputs)[None, :], other=0.0)
        w = tl.load(w_rows + k[None, :], mask=(output < outputs)[:, None] & (k < inputs)[None, :], other=0)
        acc = tl.dot(a, tl.trans(w.to(a.dtype)), acc, input_precision=PRECISION)
    y = acc * tl.load(scale + output, mask=output < outputs, other=0.0)[None, :]
    if BIAS:
        y += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    target = out + (row.to(tl.int64) * outputs)[:, None] + output[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (output < outputs)[None, :])

"""RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) with the residual addition before it.

h = x + residual
y = h / sqrt(mean(h^2) + eps) * weight
"""

from __future__ import annotations

import torch
from torch import Tensor


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

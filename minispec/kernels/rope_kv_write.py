"""Rotate queries and keys (RoPE: Su et al. 2021, arXiv 2104.09864) and write keys and values into the paged cache.

rotate(x) = x * cos + (-x[half:], x[:half]) * sin        cos, sin at the row's position: committed length + depth
"""

from __future__ import annotations

import torch
from torch import Tensor

from minispec.batch import StepBatch


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

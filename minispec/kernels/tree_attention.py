"""Attention of a step's rows over the paged KV cache: prefill chunks, trees and single tokens in one call.

    out[r] = softmax(scale * q[r] K[visible(r)]^T) V[visible(r)]

where ``visible(r)`` is the committed prefix of r's span and, past it, the keys of a causal chunk up to r or r's own
ancestors in the tree (SpecInfer: arXiv 2305.09781, section 4.2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.batch import Span, StepBatch


def tree_attention_ref(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch, scale: float) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        q: [rows, heads, head_dim], rotated.
        k_cache, v_cache: [kv_heads, positions, head_dim], one layer's cache; this step's rows are written already.
        batch: the step.
        scale: factor on the scores, usually ``head_dim ** -0.5``.

    Returns:
        [rows, heads, head_dim].
    """
    heads, head_dim = q.shape[1:]
    kv_heads = k_cache.shape[0]
    group = heads // kv_heads
    out = torch.empty_like(q)
    start = 0
    for span, visible in zip(batch.spans, batch.visible, strict=True):
        n = len(span.tokens)
        if n == 0:
            continue
        k, v = context(k_cache, span, batch.page_size), context(v_cache, span, batch.page_size)
        # Fold the query heads that share a KV head into the rows: one call serves GQA without repeating K and V.
        folded = q[start : start + n].view(n, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        folded = folded.reshape(1, kv_heads, group * n, head_dim)
        mask = None if visible is None else visible.repeat(group, 1)
        if mask is not None:
            # an additive mask in the queries' dtype is faster on a CPU than a boolean one
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
        attended = F.scaled_dot_product_attention(folded, k[None], v[None], attn_mask=mask, scale=scale)
        out[start : start + n] = attended.view(kv_heads, group, n, head_dim).permute(2, 0, 1, 3).reshape(n, heads, -1)
        start += n
    return out


def context(cache: Tensor, span: Span, page_size: int) -> Tensor:
    """What a span sees: [kv_heads, num_cached + tree_size, head_dim]; in place where pages are consecutive."""
    length = span.num_cached + span.tree_size
    pages = span.pages[: -(-length // page_size)]
    first = pages[0]
    if all(page == first + i for i, page in enumerate(pages)):
        return cache[:, first * page_size : first * page_size + length]
    index = torch.tensor(pages, device=cache.device)[:, None] * page_size + torch.arange(page_size, device=cache.device)
    return cache[:, index.flatten()[:length]]

"""A drafter's children of each node: its top-k of ``log q + g``, with the noise the target will draw with.

    s = log_softmax(logits / temperature over the row's support) + g[seed, position]
    s = log_softmax(logits) in greedy rows
    tokens = top-k of s,  values = log_softmax(s) at them

Sharing the noise is Gumbel coupling (Daliri, Musco & Suresh 2024, arXiv 2408.07978): the children are the k likeliest
to be the target's own draw, and ``values`` ranks nodes across a tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minispec.kernels.support import support_floor_ref
from minispec.sampling import Noise, SamplingBatch


def top_children_ref(logits: Tensor, sampling: SamplingBatch, noise: Noise, k: int) -> tuple[Tensor, Tensor]:
    """Torch reference, and the path of a CPU.

    Args:
        logits: [n, vocab], the drafter's.
        sampling: how the target draws each row's token; ``sampling.keys`` are the positions of the children.
        noise: source of the keyed noise.
        k: children per node, at most vocab.

    Returns:
        (tokens [n, k] int64, values [n, k] float32), best first. A value of -inf marks a token that the support leaves
        out: the target cannot draw it, there were fewer than k.
    """
    scores = logits.float()
    if not sampling.greedy:
        sampled = sampling.temperature > 0
        scale = torch.where(sampled, sampling.temperature, 1.0)[:, None]
        noisy = (scores - scores.amax(-1, keepdim=True)) / scale
        if sampling.truncated:
            noisy = noisy.masked_fill(scores < support_floor_ref(scores, sampling)[:, None], float("-inf"))
        noisy = noisy.log_softmax(-1) + noise.rows(sampling.keys)[:, : scores.shape[-1]] * sampled[:, None]
        scores = noisy
    top = scores.topk(k, dim=-1)
    return top.indices, top.values - scores.logsumexp(-1, keepdim=True)

"""Draw the target's token for each sampled row: transforms, then keyed Gumbel argmax, without sorting the vocabulary.

    s = (logits - max) / temperature
    support = top-k of s, then the smallest set of its likeliest tokens with mass >= top_p, and s >= log(min_p)
    token = argmax over the support of s + g[seed, position]

Ties are kept or dropped together, so the support does not depend on an order among equals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minispec.sampling import Noise, SamplingBatch


def sample_ref(logits: Tensor, sampling: SamplingBatch, noise: Noise) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        logits: [samples, vocab] float32.
        sampling: how each row is drawn.
        noise: source of the keyed noise.

    Returns:
        [samples] int64 token ids.
    """
    if sampling.greedy:
        return logits.argmax(-1)
    sampled = sampling.temperature > 0
    scale = torch.where(sampled, sampling.temperature, 1.0)[:, None]
    scores = (logits - logits.amax(-1, keepdim=True)) / scale  # the best is 0, so no temperature overflows
    noisy = scores + noise.rows(sampling.keys)[:, : scores.shape[-1]] * sampled[:, None]
    if not sampling.truncated:
        return noisy.argmax(-1)
    return _draw_within_support(scores, noisy, sampling, sampled)


def _draw_within_support(scores: Tensor, noisy: Tensor, sampling: SamplingBatch, sampled: Tensor) -> Tensor:
    """Argmax of ``noisy`` over each row's support, by trying the best candidate first.

    A candidate belongs to the top-p set iff the tokens strictly above it have mass below top_p: one masked sum instead
    of a sort. One that does not rules out everything at or below its score.
    """
    vocab = scores.shape[-1]
    floor = torch.log(sampling.min_p)[:, None]  # log 0 = -inf: off
    top_k = torch.where((sampling.top_k <= 0) | (sampling.top_k > vocab), vocab, sampling.top_k)
    if int(smallest := top_k.min()) < vocab:
        widest = int(top_k[top_k < vocab].max()) if smallest < vocab else 0
        ranked = scores.topk(widest, dim=-1).values
        kth = ranked.gather(-1, (top_k.clamp(max=widest) - 1)[:, None])
        floor = torch.maximum(floor, torch.where(top_k[:, None] < vocab, kth, float("-inf")))
    outside = scores < floor
    noisy = noisy.masked_fill(outside, float("-inf"))
    weights = scores.exp().masked_fill(outside, 0.0)
    limit = sampling.top_p * weights.sum(-1)
    while True:
        token = noisy.argmax(-1)
        value = scores.gather(-1, token[:, None])
        above = torch.where(scores > value, weights, 0.0).sum(-1)
        done = (above < limit) | (value[:, 0] >= 0) | (sampling.top_p >= 1) | ~sampled
        if bool(done.all()):
            return token
        noisy = noisy.masked_fill((scores <= value) & ~done[:, None], float("-inf"))

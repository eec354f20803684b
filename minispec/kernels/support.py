"""The support of a truncated distribution as one threshold per row: the least logit that may be drawn.

    s = (logits - max) / temperature
    floor of s = max(k-th largest s,  log(min_p),  smallest s whose strictly larger tokens have mass < top_p)

the mass relative to the tokens that the first two leave. Top-p: Holtzman et al. 2020, arXiv 1904.09751; min-p: Nguyen
et al. 2024, arXiv 2407.01082. Ties stand or fall together, so the support does not depend on an order among equals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minispec.sampling import SamplingBatch

_RANKED = 256  # tokens looked at before whole rows are sorted; a support is rarely wider


def support_floor_ref(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        logits: [n, vocab] float32.
        sampling: how each row is drawn.

    Returns:
        [n] float32: the smallest logit in each row's support; -inf where nothing is left out (greedy rows too).
    """
    vocab = logits.shape[-1]
    ranked = logits.topk(min(_RANKED, vocab), dim=-1).values
    floor, found = _floor(logits, ranked, sampling)
    if not bool(found.all()):
        floor, _ = _floor(logits, logits.sort(dim=-1, descending=True).values, sampling)
    return floor


def _floor(logits: Tensor, ranked: Tensor, sampling: SamplingBatch) -> tuple[Tensor, Tensor]:
    """The floor of each row, given its largest logits in falling order, and whether those were enough to tell."""
    vocab, width = logits.shape[-1], ranked.shape[-1]
    sampled = sampling.temperature > 0
    scale = torch.where(sampled, sampling.temperature, 1.0)[:, None]
    best = ranked[:, :1]
    scores, all_scores = (ranked - best) / scale, (logits - best) / scale
    top_k = torch.where((sampling.top_k <= 0) | (sampling.top_k > vocab), vocab, sampling.top_k)[:, None]
    kth = scores.gather(-1, (top_k - 1).clamp(max=width - 1))
    # off must let even -inf through, as it counts as nothing anyway
    least = torch.maximum(torch.where(top_k < vocab, kth, float("-inf")), torch.log(sampling.min_p)[:, None])
    total = torch.where(all_scores >= least, all_scores.exp(), 0.0).sum(-1, keepdim=True)
    weights = scores.exp()
    above = weights.cumsum(-1) - weights
    # of equals the first has the mass that is strictly above them all
    above = above.gather(-1, torch.searchsorted(-scores.contiguous(), -scores.contiguous()))
    inside = (above < sampling.top_p[:, None] * total) | (scores >= 0) | (sampling.top_p[:, None] >= 1)
    inside &= scores >= least
    count = inside.sum(-1, keepdim=True)
    floor = ranked.gather(-1, count - 1)[:, 0]
    limited = (top_k < vocab) | (sampling.top_p[:, None] < 1) | (sampling.min_p[:, None] > 0)
    found = (count < width) | (width == vocab)
    off = ~(limited[:, 0] & sampled)
    return floor.masked_fill(off, float("-inf")), found[:, 0] | off

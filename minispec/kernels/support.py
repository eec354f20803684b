"""The support of a truncated distribution as one threshold per row: the least logit that may be drawn.

    s = (logits - max) / temperature
    floor of s = max(k-th largest s,  log(min_p),  smallest s whose strictly larger tokens have mass < top_p)

the mass relative to the tokens that the first two leave. Top-p: Holtzman et al. 2020, arXiv 1904.09751; min-p: Nguyen
et al. 2024, arXiv 2407.01082. Ties stand or fall together, so the support does not depend on an order among equals.

The kernel bisects between logits that occur in the row, counting or weighing what lies above; no sort. One program per
row: a probe reads 4 vocab bytes at one multiprocessor's share of the L2 cache (about 5 us for 128k tokens), and a bound
takes about ten of them. Bound by that latency, not by the device's memory; rows run side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.kernels._triton import jit
from minispec.sampling import SamplingBatch

if TYPE_CHECKING:
    import triton.language as tl

_RANKED = 256  # tokens looked at before whole rows are sorted; a support is rarely wider


def support_floor_ref(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        logits: [n, vocab] float32.
        sampling: how each row is drawn.

    Returns:
        [n] float32: a logit is in its row's support iff it is not below this; -inf in greedy and unlimited rows.
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


def support_floor_triton(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """Triton launcher; arguments as in the reference."""
    rows, vocab = logits.shape
    floor = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _support_floor_kernel[(rows,)](
            logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, floor, vocab,
            logits.stride(0), BLOCK=4096, num_warps=16,
        )  # fmt: skip
    return floor


@jit
def _support_floor_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    floor: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one row. logits [rows, vocab]; the others [rows]."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    share = tl.load(min_p + row)
    least = tl.full((), float("-inf"), tl.float32)
    if t > 0:
        logits += row * stride
        lane = tl.arange(0, BLOCK)
        highs = tl.full((BLOCK,), float("-inf"), tl.float32)
        lows = tl.full((BLOCK,), float("inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            x = tl.load(logits + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
            highs = tl.maximum(highs, x)
            lows = tl.minimum(lows, tl.where(x > float("-inf"), x, float("inf")))
        high = tl.max(highs, 0)
        low = tl.min(lows, 0)
        if share > 0:
            least = tl.maximum(low, high + t * tl.log(share))
        if (k > 0) & (k < vocab):
            least = tl.maximum(least, _bisect(logits, vocab, low, high, high, t, k.to(tl.float32), True, BLOCK))
        if p < 1:
            masses = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, vocab, BLOCK):
                x = tl.load(logits + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
                masses += tl.where(x >= least, tl.exp((x - high) / t), 0.0)
            limit = p * tl.sum(masses, 0)
            least = _bisect(logits, vocab, tl.maximum(least, low), high, high, t, limit, False, BLOCK)
    tl.store(floor + row, least)


@jit
def _bisect(
    logits: tl.tensor,
    vocab: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The smallest logit from low on whose strictly larger ones number, or weigh, less than limit.

    low and high move to logits that occur, so that they meet at the answer even where many are equal.
    """
    lane = tl.arange(0, BLOCK)
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle < high, middle, low)
        measures = tl.zeros((BLOCK,), tl.float32)
        aboves = tl.full((BLOCK,), float("inf"), tl.float32)
        belows = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            x = tl.load(logits + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
            above = x > middle
            weight = tl.full((BLOCK,), 1.0, tl.float32) if COUNT else tl.exp((x - best) / temperature)
            measures += tl.where(above, weight, 0.0)
            aboves = tl.minimum(aboves, tl.where(above, x, float("inf")))
            belows = tl.maximum(belows, tl.where(above, float("-inf"), x))
        enough = tl.sum(measures, 0) >= limit
        low = tl.where(enough, tl.min(aboves, 0), low)
        high = tl.where(enough, high, tl.max(belows, 0))
    return low

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.kernels._triton import jit
from minispec.kernels.blocks import topk
from minispec.sampling import SamplingBatch

if TYPE_CHECKING:
    import triton.language as tl

_WIDTHS = 64, 512
"""How many of the likeliest tokens are looked at first, and then; most supports are narrower."""


@dataclass(frozen=True)
class Candidates:
    """The likeliest tokens of some rows, all of their support among them.

    Attributes:
        tokens: [n, width] int64, likeliest first.
        logits: [n, width] float32.
        scores: [n, width] float32: s of a token in the support, -inf of the others.
    """

    tokens: Tensor
    logits: Tensor
    scores: Tensor


def narrow_supports(logits: Tensor, sampling: SamplingBatch) -> Iterator[tuple[Tensor, Candidates | None]]:
    """``supports`` without the rows whose support is wide: those come last, with None."""
    return _supports(logits, sampling, _WIDTHS)


def supports(logits: Tensor, sampling: SamplingBatch, at_least: int = 1) -> Iterator[tuple[Tensor, Candidates]]:
    """The supports of rows with a temperature, as the CPU finds them: among the likeliest tokens, without a sort.

    Which width a row is looked at with depends on the row alone, so that what comes out does.

    Args:
        logits: [n, vocab] float32.
        sampling: how each row is drawn.
        at_least: candidates wanted, in the support or not.

    Yields:
        (rows [m] int64, their candidates), until every row has come.
    """
    widths = [width for width in _WIDTHS if width >= at_least]
    for rows, candidates in _supports(logits, sampling, [*widths, logits.shape[-1]]):
        assert candidates is not None
        yield rows, candidates


def _supports(
    logits: Tensor, sampling: SamplingBatch, widths: Sequence[int]
) -> Iterator[tuple[Tensor, Candidates | None]]:
    vocab, device = logits.shape[-1], logits.device
    pending = torch.arange(logits.shape[0], device=device)
    for width in dict.fromkeys(min(width, vocab) for width in widths):
        # with as many as top-k keeps, equals of the last could lie beyond
        at_hand = pending if width == vocab else pending[sampling.top_k[pending] < width]
        if not len(at_hand):
            continue
        whole = len(at_hand) == logits.shape[0]
        own, part = (logits, sampling) if whole else (logits[at_hand], sampling.select(at_hand))
        candidates, found = _candidates(own, part, width)
        if bool(found.all()):
            yield at_hand, candidates
        elif bool(found.any()):
            yield (
                at_hand[found],
                Candidates(candidates.tokens[found], candidates.logits[found], candidates.scores[found]),
            )
        failed = torch.zeros(logits.shape[0], dtype=torch.bool, device=device)
        failed[pending] = True
        failed[at_hand[found]] = False
        pending = failed.nonzero()[:, 0]
        if not len(pending):
            return
    yield pending, None


def _candidates(logits: Tensor, sampling: SamplingBatch, width: int) -> tuple[Candidates, Tensor]:
    """The ``width`` likeliest tokens of each row, and whether those are sure to hold its support, [n] bool."""
    vocab = logits.shape[-1]
    ranked, tokens = topk(logits, width)
    scale = sampling.temperature[:, None]
    best = ranked[:, :1]
    scores = (ranked - best) / scale
    least = torch.log(sampling.min_p)[:, None]  # log 0 = -inf: off
    top_k = torch.where((sampling.top_k <= 0) | (sampling.top_k > vocab), vocab, sampling.top_k)[:, None]
    kth = scores.gather(-1, (top_k - 1).clamp(max=width - 1))
    least = torch.maximum(least, torch.where(top_k < vocab, kth, float("-inf")))
    inside = (scores >= least) & (scores > float("-inf"))
    if bool((sampling.top_p < 1).any()):
        weights = scores.exp()
        # what top-k and min-p leave: it lies among the candidates, unless both are off
        total = torch.where(inside, weights, 0.0).sum(-1, keepdim=True)
        if width < vocab and bool((open_ := inside[:, -1]).any()):
            rows = open_.nonzero()[:, 0]
            everything = (logits[rows] - best[rows]) / scale[rows]
            total[rows] = torch.where(everything >= least[rows], everything.exp(), 0.0).sum(-1, keepdim=True)
        above = weights.cumsum(-1) - weights
        # of equals the first has the mass that is strictly above them all
        above = above.gather(-1, torch.searchsorted(-scores, -scores))
        top_p = sampling.top_p[:, None]
        inside &= (above < top_p * total) | (scores >= 0) | (top_p >= 1)
    found = ~inside[:, -1] if width < vocab else torch.ones_like(inside[:, 0])
    return Candidates(tokens, ranked, scores.masked_fill(~inside, float("-inf"))), found


def support_floor_ref(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """Torch reference.

    Args:
        logits: [n, vocab] float32.
        sampling: how each row is drawn.

    Returns:
        [n] float32: a logit is in its row's support iff it is not below this; -inf in greedy and unlimited rows.
    """
    floor = torch.full(logits.shape[:1], float("-inf"), device=logits.device)
    limited = (sampling.top_k > 0) & (sampling.top_k < logits.shape[-1]) | (sampling.top_p < 1) | (sampling.min_p > 0)
    rows = (limited & (sampling.temperature > 0)).nonzero()[:, 0]
    if len(rows):
        for own, candidates in supports(logits[rows], sampling.select(rows)):
            kept = torch.where(candidates.scores > float("-inf"), candidates.logits, float("inf"))
            floor[rows[own]] = kept.amin(-1)
    return floor


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

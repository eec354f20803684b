"""Draw the target's token for each sampled row: transforms, then keyed Gumbel argmax, without sorting the vocabulary.

    s = (logits - max) / temperature
    support = top-k of s, then the smallest set of its likeliest tokens with mass >= top_p, and s >= log(min_p)
    token = argmax over the support of s + g[seed, position]

Ties are kept or dropped together, so the support does not depend on an order among equals.

Roofline for n rows: 4 n vocab bytes (float32 logits), read once, about 25 n vocab operations for the noise; bound by
memory. Truncated rows are read once more per probe of support_floor, edited ones written and read once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.kernels._perturb import BLOCK, perturbed, shifted
from minispec.kernels._triton import cdiv, jit, power_of_2
from minispec.kernels.blocks import argmax, topk
from minispec.kernels.edit_logits import LogitEdits, edit_logits_ref, edit_logits_triton
from minispec.kernels.support import narrow_supports, support_floor_triton
from minispec.sampling import Noise, SamplingBatch

if TYPE_CHECKING:
    import triton.language as tl


def sample_ref(logits: Tensor, sampling: SamplingBatch, noise: Noise, edits: LogitEdits | None = None) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        logits: [samples, vocab] float32; not changed.
        sampling: how each row is drawn.
        noise: source of the keyed noise.
        edits: penalties, bias and grammar, applied before anything else.

    Returns:
        [samples] int64 token ids.
    """
    if edits is None:
        return _draw(logits, sampling, noise)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    tokens[edits.rows] = _draw(edit_logits_ref(logits, edits), sampling.select(edits.rows), noise)
    plain = torch.ones_like(tokens, dtype=torch.bool)
    plain[edits.rows] = False
    if rest := plain.nonzero()[:, 0].tolist():
        others = torch.tensor(rest, device=logits.device)
        tokens[others] = _draw(logits[others], sampling.select(others), noise)
    return tokens


def _draw(logits: Tensor, sampling: SamplingBatch, noise: Noise) -> Tensor:
    """Each kind of row the cheapest way: greedy ones need no noise, truncated ones noise for their support only."""
    if noise.native is not None:
        return noise.native.sample(logits, sampling, noise)
    if sampling.greedy:
        return argmax(logits)
    sampled = sampling.temperature > 0
    limited = sampled & ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for kind, draw in ((~sampled, _draw_greedy), (sampled & ~limited, _draw_from_all), (limited, _draw_from_support)):
        rows = kind.nonzero()[:, 0]
        if len(rows) == len(tokens):
            return draw(logits, sampling, noise)
        if len(rows):
            tokens[rows] = draw(logits[rows], sampling.select(rows), noise)
    return tokens


def _draw_greedy(logits: Tensor, sampling: SamplingBatch, noise: Noise) -> Tensor:
    return argmax(logits)


def _draw_from_all(logits: Tensor, sampling: SamplingBatch, noise: Noise) -> Tensor:
    scores = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature[:, None]  # at most 0: nothing overflows
    return argmax(scores.add_(noise.rows(sampling.keys)[:, : scores.shape[-1]]))


def _draw_from_support(logits: Tensor, sampling: SamplingBatch, noise: Noise) -> Tensor:
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for rows, candidates in narrow_supports(logits, sampling):
        if candidates is None:
            tokens[rows] = _draw_from_wide_support(logits[rows], sampling.select(rows), noise)
            continue
        keys = [sampling.keys[i] for i in rows.tolist()]
        drawn = (candidates.scores + noise.at(keys, candidates.tokens)).argmax(-1, keepdim=True)
        tokens[rows] = candidates.tokens.gather(-1, drawn)[:, 0]
    return tokens


def _draw_from_wide_support(logits: Tensor, sampling: SamplingBatch, noise: Noise) -> Tensor:
    """Argmax of the noisy scores over each row's support, by trying the best candidate first.

    A candidate belongs to the top-p set iff the tokens strictly above it have mass below top_p: one masked sum instead
    of a sort. One that does not rules out everything at or below its score.
    """
    vocab = logits.shape[-1]
    scores = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature[:, None]
    noisy = scores + noise.rows(sampling.keys)[:, :vocab]
    floor = torch.log(sampling.min_p)[:, None]  # log 0 = -inf: off
    limited = (sampling.top_k > 0) & (sampling.top_k < vocab)
    if widest := int(torch.where(limited, sampling.top_k, 0).max()):
        ranked = topk(scores, widest)[0].gather(-1, (sampling.top_k - 1).clamp(0, widest - 1)[:, None])
        floor = torch.maximum(floor, torch.where(limited[:, None], ranked, float("-inf")))
    outside = scores < floor
    noisy.masked_fill_(outside, float("-inf"))
    weights = scores.exp().masked_fill_(outside, 0.0)
    limit = sampling.top_p * weights.sum(-1)
    while True:
        token = argmax(noisy)
        value = scores.gather(-1, token[:, None])
        too_low = (
            (torch.where(scores > value, weights, 0.0).sum(-1) >= limit) & (value[:, 0] < 0) & (sampling.top_p < 1)
        )
        if not bool(too_low.any()):
            return token
        noisy.masked_fill_((scores <= value) & too_low[:, None], float("-inf"))


def sample_triton(logits: Tensor, sampling: SamplingBatch, noise: Noise, edits: LogitEdits | None = None) -> Tensor:
    """Triton launcher; arguments as in the reference. The noise is computed in the kernel."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    if edits is not None:
        logits = logits.index_copy(0, edits.rows, edit_logits_triton(logits, edits))
    chunks = cdiv(vocab, BLOCK)
    value = torch.empty((2, rows, chunks), dtype=torch.float32, device=logits.device)
    token = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    # a batch without a temperature or a floor gets `value` in their place; the kernels do not read it
    keys = value if sampling.greedy else sampling.key_tensor
    floor = support_floor_triton(logits, sampling) if sampling.truncated else value
    _score_kernel[(rows, chunks)](
        logits, sampling.temperature, floor, keys, value[0], value[1], token, vocab, logits.stride(0), chunks,
        GREEDY=sampling.greedy, TRUNCATED=sampling.truncated, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    _pick_kernel[(rows,)](
        value[0], value[1], token, sampling.temperature, out, chunks,
        GREEDY=sampling.greedy, BLOCK=power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return out


@jit
def _score_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    keys: tl.tensor,
    value: tl.tensor,
    top: tl.tensor,
    token: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    chunks: tl.tensor,
    GREEDY: tl.constexpr,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK tokens of one row. logits [rows, vocab]; value, top, token [rows, chunks]: its best."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    z, block_top = perturbed(
        logits + row * stride, chunk * BLOCK, vocab, row, temperature, floor, keys, GREEDY, TRUNCATED, BLOCK
    )
    best, index = tl.max(z, 0, return_indices=True)
    at = row * chunks + chunk
    tl.store(value + at, best)
    tl.store(top + at, block_top)
    tl.store(token + at, chunk * BLOCK + index)


@jit
def _pick_kernel(
    value: tl.tensor,
    top: tl.tensor,
    token: tl.tensor,
    temperature: tl.tensor,
    out: tl.tensor,
    chunks: tl.tensor,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: the best of one row's chunks. value, top, token [rows, chunks]; out [rows] int64."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < chunks
    at = row * chunks + chunk
    tops = tl.load(top + at, mask=inside, other=float("-inf"))
    score = tl.load(value + at, mask=inside, other=float("-inf")) + shifted(tops, row, temperature, GREEDY)
    best = tl.argmax(score, 0)
    tl.store(out + row, tl.load(token + row * chunks + best).to(tl.int64))

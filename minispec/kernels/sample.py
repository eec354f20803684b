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

from minispec.kernels._perturb import BLOCK, keys_on, perturbed, shifted
from minispec.kernels._triton import cdiv, jit, power_of_2
from minispec.kernels.edit_logits import LogitEdits, edit_logits_ref, edit_logits_triton
from minispec.kernels.support import support_floor_triton
from minispec.sampling import Noise, SamplingBatch

if TYPE_CHECKING:
    import triton.language as tl


def sample_ref(logits: Tensor, sampling: SamplingBatch, noise: Noise, edits: LogitEdits | None = None) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        logits: [samples, vocab] float32.
        sampling: how each row is drawn.
        noise: source of the keyed noise.
        edits: penalties, bias and grammar, applied before anything else.

    Returns:
        [samples] int64 token ids.
    """
    if edits is not None:
        logits = edit_logits_ref(logits, edits)
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


def sample_triton(logits: Tensor, sampling: SamplingBatch, noise: Noise, edits: LogitEdits | None = None) -> Tensor:
    """Triton launcher; arguments as in the reference. The noise is computed in the kernel."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    if edits is not None:
        logits = edit_logits_triton(logits, edits)
    chunks = cdiv(vocab, BLOCK)
    value = torch.empty((2, rows, chunks), dtype=torch.float32, device=logits.device)
    token = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    # a batch without a temperature or a floor gets `value` in their place; the kernels do not read it
    keys = value if sampling.greedy else keys_on(sampling, logits.device)
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

"""A drafter's children of each node: its top-k of ``log q + g``, with the noise the target will draw with.

    s = log_softmax(logits / temperature over the row's support) + g[seed, position]
    s = log_softmax(logits) in greedy rows
    tokens = top-k of s,  values = log_softmax(s) at them

Sharing the noise is Gumbel coupling (Daliri, Musco & Suresh 2024, arXiv 2408.07978): the children are the k likeliest
to be the target's own draw, and ``values`` ranks nodes across a tree.

Roofline for n rows: n vocab b bytes (b per logit), read once, about 25 n vocab operations for the noise and k
comparisons per token; bound by memory at small k. Truncated rows are read once more per probe of support_floor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.kernels._perturb import BLOCK, perturbed, shifted
from minispec.kernels._triton import cdiv, jit, power_of_2
from minispec.kernels.blocks import topk
from minispec.kernels.support import support_floor_triton, supports
from minispec.sampling import Noise, SamplingBatch

if TYPE_CHECKING:
    import triton.language as tl


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
    logits = logits.float()
    if sampling.greedy:
        return top_logprobs_ref(logits, k)
    if noise.native is not None:
        return noise.native.top_children(logits, sampling, noise, k)
    tokens = torch.empty((logits.shape[0], k), dtype=torch.int64, device=logits.device)
    values = torch.empty((logits.shape[0], k), device=logits.device)
    sampled = sampling.temperature > 0
    limited = sampled & ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))
    if len(rows := (~sampled).nonzero()[:, 0]):
        tokens[rows], values[rows] = top_logprobs_ref(logits[rows], k)
    if len(rows := (sampled & ~limited).nonzero()[:, 0]):
        own = sampling.select(rows)
        noisy = (logits[rows] / own.temperature[:, None]).log_softmax(-1)
        tokens[rows], values[rows] = top_logprobs_ref(noisy.add_(noise.rows(own.keys)[:, : logits.shape[-1]]), k)
    if len(rows := limited.nonzero()[:, 0]):
        own = sampling.select(rows)
        for at, candidates in supports(logits[rows], own, at_least=k):
            keys = [own.keys[i] for i in at.tolist()]
            noisy = candidates.scores.log_softmax(-1) + noise.at(keys, candidates.tokens)
            top, values[rows[at]] = top_logprobs_ref(noisy, k)
            tokens[rows[at]] = candidates.tokens.gather(-1, top)
    return tokens, values


def top_children_triton(logits: Tensor, sampling: SamplingBatch, noise: Noise, k: int) -> tuple[Tensor, Tensor]:
    """Triton launcher; arguments as in the reference. The noise is computed in the kernel."""
    # without edits or a floor the rows keep their dtype; the reference widens them first, with the same result
    return _top(logits, sampling.temperature, sampling, k)


def top_logprobs_ref(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row and their log-probabilities. Torch reference, and the path of a CPU.

    Args:
        logits: [n, vocab].
        k: at most vocab.

    Returns:
        (tokens [n, k] int64, log-probabilities [n, k] float32), best first.
    """
    logits = logits.float()
    values, tokens = topk(logits, k)
    return tokens, values - logits.logsumexp(-1, keepdim=True)


def top_logprobs_triton(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Triton launcher; arguments as in the reference: greedy children are just that."""
    return _top(logits, logits, None, k)


def token_logprobs(logits: Tensor, tokens: Tensor, top_tokens: Tensor, top_values: Tensor) -> Tensor:
    """Log-probability of one token per row, [n] float32, from what top_logprobs found: both share the row's sum.

    Args:
        logits: [n, vocab].
        tokens: [n] int64.
        top_tokens, top_values: [n, k], k >= 1.
    """
    pair = logits.gather(1, torch.stack([tokens, top_tokens[:, 0]], 1)).float()
    return pair[:, 0] - pair[:, 1] + top_values[:, 0]


def _top(logits: Tensor, temperature: Tensor, sampling: SamplingBatch | None, k: int) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    greedy = sampling is None or sampling.greedy
    truncated = sampling is not None and sampling.truncated
    tokens = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    values = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    if rows == 0:
        return tokens, values
    chunks = cdiv(vocab, BLOCK)
    best = torch.empty((rows, chunks, k), dtype=torch.float32, device=logits.device)
    token = torch.empty((rows, chunks, k), dtype=torch.int32, device=logits.device)
    sums = torch.empty((2, rows, chunks), dtype=torch.float32, device=logits.device)
    # a batch without noise or a floor gets `sums` in their place; the kernels do not read it
    keys = sums if sampling is None or greedy else sampling.key_tensor
    floor = sums if sampling is None or not truncated else support_floor_triton(logits, sampling)
    _top_of_chunk_kernel[(rows, chunks)](
        logits, temperature, floor, keys, best, token, sums[0], sums[1], vocab, logits.stride(0), chunks,
        K=k, GREEDY=greedy, TRUNCATED=truncated, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    _merge_tops_kernel[(rows,)](
        best, token, sums[0], sums[1], temperature, tokens, values, chunks,
        K=k, GREEDY=greedy, BLOCK=power_of_2(chunks * k), BLOCK_C=power_of_2(chunks), num_warps=4,
    )  # fmt: skip
    return tokens, values


@jit
def _top_of_chunk_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    keys: tl.tensor,
    best: tl.tensor,
    token: tl.tensor,
    top: tl.tensor,
    lse: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    chunks: tl.tensor,
    K: tl.constexpr,
    GREEDY: tl.constexpr,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK tokens of one row; k maxima, one after the other.

    logits [rows, vocab]; best, token [rows, chunks, K], best first; top, lse [rows, chunks]: largest logit, and log of
    the sum of exp(score), both relative as perturbed has it.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    z, block_top = perturbed(
        logits + row * stride, chunk * BLOCK, vocab, row, temperature, floor, keys, GREEDY, TRUNCATED, BLOCK
    )
    at = row * chunks + chunk
    highest = tl.max(z, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(lse + at, base + tl.log(tl.sum(tl.exp(z - base), 0)))
    tl.store(top + at, block_top)
    lane = tl.arange(0, BLOCK)
    # what the support leaves out ranks behind the rest but before what has been taken, so that no token comes twice
    z = tl.where(chunk * BLOCK + lane < vocab, tl.maximum(z, -1e38), float("-inf"))
    for i in tl.static_range(K):
        value, index = tl.max(z, 0, return_indices=True)
        tl.store(best + at * K + i, value)
        tl.store(token + at * K + i, chunk * BLOCK + index)
        z = tl.where(lane == index, float("-inf"), z)


@jit
def _merge_tops_kernel(
    best: tl.tensor,
    token: tl.tensor,
    top: tl.tensor,
    lse: tl.tensor,
    temperature: tl.tensor,
    tokens: tl.tensor,
    values: tl.tensor,
    chunks: tl.tensor,
    K: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """One program: the best K of one row's chunks. tokens [rows, K] int64, values [rows, K]; the rest as above."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_C)
    tops = tl.load(top + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    sums = tl.load(lse + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    sums += shifted(tops, row, temperature, GREEDY)
    highest = tl.max(sums, 0)
    total = highest + tl.log(tl.sum(tl.exp(sums - highest), 0))

    lane = tl.arange(0, BLOCK)
    inside = lane < chunks * K
    z = tl.load(best + row * chunks * K + lane, mask=inside, other=float("-inf"))
    lane_tops = tl.load(top + row * chunks + lane // K, mask=inside, other=float("-inf"))
    shift = shifted(lane_tops, row, temperature, GREEDY)
    z = tl.where(z > -1e37, z + shift, z)
    for i in tl.static_range(K):
        value, index = tl.max(z, 0, return_indices=True)
        tl.store(values + row * K + i, tl.where(value > -1e37, value - total, float("-inf")))
        tl.store(tokens + row * K + i, tl.load(token + row * chunks * K + index).to(tl.int64))
        z = tl.where(lane == index, float("-inf"), z)

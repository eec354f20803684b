"""Device functions that sample and top_children share: keyed Gumbel noise, and scores with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minispec.kernels._triton import jit

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096
"""Tokens one program scores; a row is shared out over vocab / BLOCK programs."""


@jit
def gumbel(seed: tl.tensor, position: tl.tensor, first: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """[BLOCK] float32 noise of tokens first, first + 1, …: minispec.sampling.gumbel to within 1e-5.

    ``first`` is a multiple of 4: one Philox counter gives the words of four tokens.
    """
    counter = first // 4 + tl.arange(0, BLOCK // 4)
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position.to(tl.int32), zero, zero, 7)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    # -log(1 - u) without log1p: a series where u is small, as there 1 - u has lost u's digits; elsewhere 1 - u from the
    # complement of the word, exact to the last bit
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7 + u * (1 / 8))))))))
    complement = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponential = tl.where(u < 0.0625, series, -tl.log(complement))
    return -tl.log(exponential)


@jit
def perturbed(
    logits: tl.tensor,
    first: tl.tensor,
    vocab: tl.tensor,
    row: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    keys: tl.tensor,
    GREEDY: tl.constexpr,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Scores of BLOCK tokens of one row, and the largest logit ``top`` among them, to which they are relative.

    z = logit - top in a greedy row, else (logit - top) / temperature + noise, and -inf below the row's floor.
    ``logits`` points to the row's first entry.
    """
    token = first + tl.arange(0, BLOCK)
    x = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    z = x - tl.where(top == float("-inf"), 0.0, top)  # a block may be masked throughout: -inf - -inf would be NaN
    if not GREEDY:
        t = tl.load(temperature + row)
        if t > 0:
            if TRUNCATED:
                z = tl.where(x < tl.load(floor + row), float("-inf"), z)
            z = z / t + gumbel(tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1), first, BLOCK)
    return z, top


@jit
def shifted(tops: tl.tensor, row: tl.tensor, temperature: tl.tensor, GREEDY: tl.constexpr) -> tl.tensor:
    """Added to each block's scores it makes them relative to the row's largest logit; ``tops`` as in perturbed."""
    best = tl.max(tops, 0)
    shift = tops - tl.where(best == float("-inf"), 0.0, best)
    if not GREEDY:
        t = tl.load(temperature + row)
        shift = shift / tl.where(t > 0, t, 1.0)
    return shift

"""Sampling: kernels under the interpreter against the torch references."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from minispec.kernels._perturb import gumbel
from minispec.kernels._triton import jit
from minispec.kernels.edit_logits import LogitEdits, edit_logits_ref, edit_logits_triton
from minispec.kernels.sample import sample_ref, sample_triton
from minispec.kernels.support import support_floor_ref, support_floor_triton
from minispec.kernels.top_children import (
    token_logprobs,
    top_children_ref,
    top_children_triton,
    top_logprobs_ref,
    top_logprobs_triton,
)
from minispec.sampling import Noise, SamplingBatch
from minispec.sampling import gumbel as gumbel_ref

if TYPE_CHECKING:
    import triton.language as tl


@jit
def _gumbel_kernel(keys, out, first, BLOCK: tl.constexpr):
    noise = gumbel(tl.load(keys), tl.load(keys + 1), first, BLOCK)
    tl.store(out + tl.arange(0, BLOCK), noise)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 7), (-1, 3), (2**63 - 1, 131071), (-(2**63), 12)])
@pytest.mark.parametrize("first", [0, 4096, 253952])
def test_noise_is_the_engine_s(seed, position, first):
    keys = torch.tensor([seed, position])
    out = torch.empty(4096)
    _gumbel_kernel[(1,)](keys, out, first, BLOCK=4096)
    expected = gumbel_ref(keys[:1], keys[1:], first + 4096)[0, first:]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-6)


def batch(temperature, top_k, top_p, min_p, seed=0):
    rows = len(temperature)
    keys = [(seed + i, 100 + i) for i in range(rows)]
    return SamplingBatch.of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, keys=keys)


MIXED = batch(
    [0.0, 1.0, 0.7, 1.3, 0.9, 1.0, 0.5, 2.0],
    [0, 0, 5, 0, 40, 1, 300, 7],
    [1.0, 1.0, 1.0, 0.9, 0.8, 1.0, 0.0, 0.5],
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.02],
)
GREEDY = batch([0.0] * 8, [0] * 8, [1.0] * 8, [0.0] * 8)
PLAIN = batch([0.0, 1.0, 0.3, 1e-4, 2.0, 1.0, 1.0, 0.8], [0] * 8, [1.0] * 8, [0.0] * 8)


def logits_of(kind, vocab):
    x = torch.randn(8, vocab) * 4
    if kind == "ties":  # what a bfloat16 head gives
        x = (x * 2).round() / 2
    if kind == "masked":
        x[:, torch.rand(vocab) < 0.7] = float("-inf")
        x[:, 0] = 0.0
    return x


@pytest.mark.parametrize("kind", ["smooth", "ties", "masked"])
@pytest.mark.parametrize("vocab", [333, 4096, 9001])
def test_support(vocab, kind):
    logits = logits_of(kind, vocab)
    expected, actual = support_floor_ref(logits, MIXED), support_floor_triton(logits, MIXED)
    torch.testing.assert_close((logits >= actual[:, None]).sum(-1), (logits >= expected[:, None]).sum(-1))


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, MIXED], ids=["greedy", "plain", "truncated"])
@pytest.mark.parametrize("kind", ["smooth", "ties", "masked"])
@pytest.mark.parametrize("vocab", [333, 4097, 9001])
def test_sample(vocab, kind, sampling):
    logits = logits_of(kind, vocab)
    expected = sample_ref(logits, sampling, Noise(vocab))
    actual = sample_triton(logits, sampling, Noise(vocab))
    greedy = sampling.temperature == 0  # equal logits may be told apart either way
    assert torch.equal(actual[~greedy], expected[~greedy])
    torch.testing.assert_close(logits.gather(1, actual[:, None]), logits.gather(1, expected[:, None]))


def test_sample_the_largest_vocabulary():
    logits = torch.randn(1, 262144) * 3
    sampling = batch([1.0], [50], [0.95], [0.0])
    noise = Noise(262144)
    assert torch.equal(sample_triton(logits, sampling, noise), sample_ref(logits, sampling, noise))


def edits(vocab, *, touched=True, grammar=True):
    """Edits of rows 4, 0, 1, 3 of five; the first two have a grammar, the last is another slot's."""
    tokens = torch.stack([torch.randperm(vocab)[:40] for _ in range(2)])
    tokens[1, 7:] = tokens[1, 0]
    tokens[0, :3] = torch.tensor([3, 5, 250])
    tokens[0, 3:] = torch.tensor([t for t in torch.randperm(vocab).tolist() if t not in (3, 5, 250)][:37])
    counts = torch.randint(0, 3, (2, 40), dtype=torch.int32)
    prompt, bias = torch.rand(2, 40) < 0.2, torch.randn(2, 40)
    for table in (counts, prompt, bias):
        table[1, 7:] = table[1, 0]
    width = 40 if touched else 0
    return LogitEdits(
        rows=torch.tensor([4, 0, 1, 3]),
        slot=torch.tensor([0, 0, 0, 1]),
        path=torch.tensor([[-1, -1], [3, -1], [3, 3], [5, 250]]),
        tokens=tokens[:, :width],
        counts=counts[:, :width],
        prompt=prompt[:, :width],
        bias=bias[:, :width],
        repetition=torch.tensor([1.3, 1.0]),
        frequency=torch.tensor([0.5, 0.0]),
        presence=torch.tensor([0.2, 1.0]),
        banned=torch.tensor([[2, 17], [3, 0]]),
        allowed=torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), dtype=torch.int32) if grammar else None,
    )


def edited_by_definition(logits, edits):
    """The formula, token by token."""
    out = []
    for i, row in enumerate(edits.rows.tolist()):
        x, slot = logits[row].tolist(), int(edits.slot[i])
        r, f, p = (float(t[slot]) for t in (edits.repetition, edits.frequency, edits.presence))
        columns = zip(*(t[slot].tolist() for t in (edits.tokens, edits.counts, edits.prompt, edits.bias)), strict=True)
        for token, count, in_prompt, bias in dict.fromkeys(columns):
            count += edits.path[i].tolist().count(token)
            if count or in_prompt:
                x[token] = x[token] / r if x[token] > 0 else x[token] * r
            x[token] += bias - f * count - p * (count > 0)
        if edits.allowed is not None and i < len(edits.allowed):
            words = edits.allowed[i].tolist()
            x = [value if words[t // 32] >> t % 32 & 1 else float("-inf") for t, value in enumerate(x)]
        for j, token in edits.banned.tolist():
            if j == i:
                x[token] = float("-inf")
        out.append(x)
    return torch.tensor(out)


@pytest.mark.parametrize("vocab", [333, 1024, 2050])
@pytest.mark.parametrize("on", [{}, {"touched": False}, {"grammar": False}], ids=str)
def test_edit_logits(vocab, on):
    logits = torch.randn(5, vocab)
    before, changes = logits.clone(), edits(vocab, **on)
    expected = edited_by_definition(logits, changes)
    torch.testing.assert_close(edit_logits_ref(logits, changes), expected)
    torch.testing.assert_close(edit_logits_triton(logits, changes), expected)
    assert torch.equal(logits, before)


def test_sample_with_edits():
    logits, changes = torch.randn(5, 700), edits(700)
    sampling = batch([0.0, 0.7, 1.0, 1.0, 1.0], [0, 0, 9, 0, 0], [1.0, 1.0, 1.0, 0.9, 1.0], [0.0] * 5)
    noise = Noise(700)
    assert torch.equal(sample_triton(logits, sampling, noise, changes), sample_ref(logits, sampling, noise, changes))


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, MIXED], ids=["greedy", "plain", "truncated"])
@pytest.mark.parametrize(("vocab", "k"), [(333, 1), (4097, 8), (9001, 5)])
def test_top_children(vocab, k, sampling):
    logits = logits_of("smooth", vocab)
    tokens, values = top_children_triton(logits, sampling, Noise(vocab), k)
    expected_tokens, expected_values = top_children_ref(logits, sampling, Noise(vocab), k)
    torch.testing.assert_close(values, expected_values, atol=2e-4, rtol=1e-4)
    possible = expected_values > float("-inf")
    assert torch.equal(tokens[possible], expected_tokens[possible])
    assert all(len(set(row)) == k for row in tokens.tolist())


@pytest.mark.parametrize("vocab", [333, 5000])
def test_log_probabilities(vocab):
    logits = torch.randn(4, vocab) * 5
    tokens, values = top_logprobs_triton(logits, 3)
    expected = top_logprobs_ref(logits, 3)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(values, expected[1], atol=2e-5, rtol=1e-5)
    chosen = torch.randint(0, vocab, (4,))
    actual = token_logprobs(logits, chosen, tokens, values)
    torch.testing.assert_close(actual, logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0], atol=2e-5, rtol=1e-5)

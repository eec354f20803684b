"""Noise, draws and children by the compiled library: those of torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minispec import kernels
from minispec.containment import NO_TOKEN
from minispec.native.library import Team
from minispec.native.sampling import NativeSampling
from minispec.request import Request, SamplingParams
from minispec.sampler import Sampler
from minispec.sampling import Noise, NoiseOf, SamplingBatch, gumbel, gumbel_at
from minispec.tree import DraftTree
from native_library import needs_machine

pytestmark = needs_machine

KEYS = [(0, 0), (3, 7), (-5, 7), (2**63 - 1, 2**32 - 1), (-(2**63), 131071), (0x9E3779B97F4A7C15 - 2**64, 12)]


@pytest.fixture(scope="module")
def native(library_path) -> NativeSampling:
    from minispec.native.library import Library

    return NativeSampling(Team(Library(library_path), 2))


def assert_same_noise(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit but for a last place now and then, or, around 0, for what is one in double precision."""
    last = torch.maximum(expected.abs().nextafter(torch.tensor(math.inf)) - expected.abs(), torch.tensor(2e-15))
    assert got.shape == expected.shape and bool(((got - expected).abs() <= last).all())
    assert (got != expected).float().mean() <= 1e-6 + 1.5 / got.numel()


def batch(params: list[dict[str, float]], start: int = 40) -> SamplingBatch:
    return SamplingBatch.build(
        [
            (Request("r", (0,), SamplingParams(seed=n % 3, **own)), start + n // 2)  # type: ignore[arg-type]
            for n, own in enumerate(params)
        ]
    )


def with_native(noise: Noise, native: NativeSampling) -> Noise:
    noise.native = native
    return noise


@pytest.mark.parametrize("vocab", [1, 3, 31, 32, 33, 4095, 4097, 49152])
def test_noise_is_torchs(vocab: int, native: NativeSampling) -> None:
    pairs = torch.tensor(KEYS)
    assert_same_noise(native.gumbel(KEYS, vocab), gumbel(pairs[:, 0], pairs[:, 1], vocab))


def test_noise_over_many_words(native: NativeSampling) -> None:
    """Five million of them."""
    keys = [(seed * 7919 - 50, position) for seed in range(10) for position in (1, 77, 4001, 2**20)]
    pairs = torch.tensor(keys)
    assert_same_noise(native.gumbel(keys, 131_072), gumbel(pairs[:, 0], pairs[:, 1], 131_072))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1023, 1030])
def test_noise_of_some_tokens_is_theirs(count: int, native: NativeSampling) -> None:
    pairs = torch.tensor(KEYS)
    tokens = torch.randint(0, 200_000, (len(KEYS), count), generator=torch.Generator().manual_seed(count))
    whole = native.gumbel(KEYS, 200_000)
    assert torch.equal(native.gumbel_at(KEYS, tokens), whole.gather(1, tokens))
    assert torch.equal(native.gumbel_at(KEYS, tokens[0]), whole[:, tokens[0]])
    assert torch.equal(native.gumbel_at(KEYS, tokens.t().contiguous().t()), whole.gather(1, tokens))
    assert_same_noise(native.gumbel_at(KEYS, tokens), gumbel_at(pairs[:, 0], pairs[:, 1], tokens))


def test_noise_objects_use_it(native: NativeSampling) -> None:
    """The switch may come while rows are kept, and what was kept stays."""
    noise, plain = Noise(1003), Noise(1003)
    kept = noise.rows(KEYS[:2])
    with_native(noise, native)
    assert torch.equal(noise.rows([*KEYS, KEYS[1]])[:2], kept)
    assert_same_noise(noise.rows([*KEYS, KEYS[1]]), plain.rows([*KEYS, KEYS[1]]))
    ids = torch.tensor([5, 1002, 3, 77, 0])
    assert_same_noise(NoiseOf(noise, ids).rows([*KEYS, KEYS[1]]), NoiseOf(plain, ids).rows([*KEYS, KEYS[1]]))
    picked = torch.tensor([[4, 1]] * len(KEYS))
    assert_same_noise(NoiseOf(noise, ids).at(KEYS, picked), NoiseOf(plain, ids).at(KEYS, picked))


LIMITS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 300},
    {"top_k": 2**40},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 700, "top_p": 0.99},
]


@pytest.mark.parametrize("vocab", [10, 500, 3001])
@pytest.mark.parametrize("spread", [0.3, 2.0, 12.0])
def test_children_and_draws_are_the_references(vocab: int, spread: float, native: NativeSampling) -> None:
    """All limits at several temperatures, and greedy rows, side by side."""
    params = [{"temperature": t, **own} for t in (0.05, 0.8, 2.0) for own in LIMITS] + [{"temperature": 0.0}]
    params = [own | {"top_p": own.get("top_p", 1.0)} for own in params]
    logits = torch.randn((len(params), vocab), generator=torch.Generator().manual_seed(vocab)) * spread
    logits[3, : vocab // 2] = float("-inf")  # a grammar's
    sampling = batch(params)
    plain, fast = Noise(vocab), with_native(Noise(vocab), native)
    k = min(10, vocab)
    expected, expected_values = kernels.top_children(logits, sampling, plain, k)
    got, values = kernels.top_children(logits, sampling, fast, k)
    torch.testing.assert_close(values, expected_values, atol=2e-4, rtol=1e-4)
    some = values > float("-inf")
    # equals within rounding may change places
    near = torch.zeros_like(some)
    near[:, 1:] |= (values[:, 1:] - values[:, :-1]).abs() < 1e-3
    near[:, :-1] |= (values[:, 1:] - values[:, :-1]).abs() < 1e-3
    assert ((got == expected) | ~some | near).all() and some.any(-1).all()
    assert kernels.sample(logits, sampling, fast).tolist() == kernels.sample(logits, sampling, plain).tolist()


@settings(max_examples=150, deadline=None)
@given(
    levels=st.lists(st.integers(-6, 6), min_size=2, max_size=70),
    top_k=st.integers(0, 80),
    top_p=st.sampled_from([0.0, 0.3, 0.61, 0.87, 0.98, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)
def test_the_support_is_the_references_among_equals(
    native: NativeSampling, levels: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    """Equals stand or fall together: of few levels, all tokens that may be drawn are found."""
    logits = torch.tensor([levels], dtype=torch.float32) * 0.7
    sampling = batch([{"temperature": 0.9, "top_k": top_k, "top_p": top_p, "min_p": min_p}])
    expected = kernels.top_children(logits, sampling, Noise(len(levels)), len(levels))
    got = kernels.top_children(logits, sampling, with_native(Noise(len(levels)), native), len(levels))
    supports = [sorted(tokens[0, values[0] > float("-inf")].tolist()) for tokens, values in (expected, got)]
    assert supports[1] == supports[0]


def test_children_of_a_part_of_the_vocabulary(native: NativeSampling) -> None:
    """The noise is that of the tokens the logits are for, in limited rows as in others."""
    ids = torch.randperm(5000, generator=torch.Generator().manual_seed(3))[:700]
    params = [{"temperature": 0.8, **own} for own in LIMITS]
    logits = torch.randn((len(params), len(ids)), generator=torch.Generator().manual_seed(4)) * 2
    sampling = batch(params)
    expected, expected_values = kernels.top_children(logits, sampling, NoiseOf(Noise(5000), ids), 6)
    got, values = kernels.top_children(logits, sampling, NoiseOf(with_native(Noise(5000), native), ids), 6)
    torch.testing.assert_close(values, expected_values, atol=1e-4, rtol=1e-4)
    assert torch.equal(got[values > float("-inf")], expected[values > float("-inf")])


@pytest.mark.parametrize("part", [False, True])
def test_children_as_lists(part: bool, native: NativeSampling) -> None:
    """Of rows of every kind, two of which share their noise."""
    ids = torch.randperm(3000, generator=torch.Generator().manual_seed(5))[:700] if part else None
    sampling = batch([{"temperature": 0.8, **own} for own in (*LIMITS, {}, {}, {"temperature": 0.0})])
    size = 700 if part else 3000
    logits = torch.randn((len(sampling.keys), size), generator=torch.Generator().manual_seed(6)) * 3
    logits[1, 4] = float("nan")
    noise = with_native(Noise(3000), native)
    tokens, values = native.children(logits, sampling, noise, 6, ids)
    wanted, worth = native.top_children(logits, sampling, noise if ids is None else NoiseOf(noise, ids), 6)
    assert tokens == (wanted if ids is None else ids[wanted]).tolist()
    torch.testing.assert_close(torch.tensor(values), worth, rtol=0, atol=0, equal_nan=True)
    assert native.children(logits[:0], batch([]), noise, 6, ids) == ([], [])


def test_a_row_depends_on_itself_alone(native: NativeSampling) -> None:
    params = [{"temperature": 0.8, **own} for own in LIMITS]
    logits = torch.randn((len(params), 1500), generator=torch.Generator().manual_seed(1))
    sampling = batch(params)
    tokens, values = native.top_children(logits, sampling, Noise(1500), 8)
    for i in range(len(params)):
        row = torch.tensor([i])
        own_tokens, own_values = native.top_children(logits[row], sampling.select(row), Noise(1500), 8)
        assert torch.equal(own_tokens[0], tokens[i]) and torch.equal(own_values[0], values[i])


@pytest.mark.parametrize("limits", [{}, {"temperature": 0.0}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_rows_that_are_not_finite(limits: dict[str, float], native: NativeSampling) -> None:
    """They have no values, and harm nobody."""
    logits = torch.randn((6, 200), generator=torch.Generator().manual_seed(2))
    logits[0] = float("nan")
    logits[1, 5] = float("nan")
    logits[2, 9] = float("inf")
    logits[3] = float("-inf")
    sampling = batch([{"temperature": 0.8} | limits] * 6)
    tokens, values = native.top_children(logits, sampling, Noise(200), 4)
    assert values[:4].isnan().all() and values[4:].isfinite().all()
    drawn = native.sample(logits, sampling, Noise(200))
    assert ((tokens >= 0) & (tokens < 200)).all() and ((drawn[4:] >= 0) & (drawn[4:] < 200)).all()
    rest = torch.arange(4, 6)
    assert (drawn[:4] == NO_TOKEN).all()
    assert torch.equal(drawn[4:], native.sample(logits[4:], sampling.select(rest), Noise(200)))


def test_the_likeliest_want_no_settings(native: NativeSampling) -> None:
    logits = torch.randn((5, 200), generator=torch.Generator().manual_seed(3))
    logits[1, 7] = float("nan")
    drawn = native.draw(logits, None, Noise(200)).tolist()
    assert drawn == native.sample(logits, batch([{"temperature": 0.0}] * 5), Noise(200)).tolist()
    assert drawn[1] == NO_TOKEN and drawn[2:] == logits[2:].argmax(-1).tolist()


@pytest.mark.parametrize(
    "settings",
    [[{"temperature": 0.0}] * 2, [{"temperature": 0.8}, {"temperature": 0.0}], [{"logit_bias": {3: 9.0}}, {}]],
)
def test_a_step_is_drawn_as_without_the_library(settings: list[dict[str, Any]], native: NativeSampling) -> None:
    requests = [Request("r", (5, 6), SamplingParams(seed=n, **own)) for n, own in enumerate(settings)]
    trees = [(requests[1], DraftTree((6, 8, 9, 7), (-1, 0, 0, 1), (0.0, -1.0, -2.0, -2.0)))]
    logits = torch.randn((5, 200), generator=torch.Generator().manual_seed(4))
    expected = Sampler(Noise(200))(logits, requests[:1], trees)
    drawn = Sampler(with_native(Noise(200), native)).natively(native, logits, requests[:1], trees)
    assert drawn.tolist() == expected.tolist()
    assert not len(Sampler(Noise(200)).natively(native, logits[:0], [], []))

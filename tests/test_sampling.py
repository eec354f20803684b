from __future__ import annotations

import numpy as np
import pytest
import torch

from minispec import kernels
from minispec.errors import RequestError
from minispec.request import Request, SamplingParams
from minispec.sampling import Noise, NoiseOf, SamplingBatch, gumbel, philox


def sampling(rows: list[dict], seeds: list[int] | None = None, position: int = 0) -> SamplingBatch:
    requests = [
        Request("r", (0,), SamplingParams(**{"seed": i if seeds is None else seeds[i], **params}))
        for i, params in enumerate(rows)
    ]
    return SamplingBatch.build([(request, position) for request in requests])


def test_philox_matches_an_independent_implementation():
    """numpy has no 4x32 variant, so this is the definition written out with Python integers."""

    def reference(key, c):
        k = [key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF]
        for _ in range(7):
            p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [
                (p1 >> 32) ^ c[1] ^ k[0],
                p1 & 0xFFFFFFFF,
                (p0 >> 32) ^ c[3] ^ k[1],
                p0 & 0xFFFFFFFF,
            ]
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
        return c

    rng = np.random.default_rng(0)
    for _ in range(50):
        key, a, b = int(rng.integers(-(2**63), 2**63)), int(rng.integers(2**32)), int(rng.integers(2**32))
        got = philox(torch.tensor([key]), torch.tensor([a]), torch.tensor([b]))
        assert [int(w) for w in got] == reference(key & (2**64 - 1), [a, b, 0, 0])


def test_noise_is_gumbel_and_independent_across_keys():
    noise = gumbel(torch.arange(8).repeat_interleave(8), torch.arange(8).repeat(8), 20_000)
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, rel=0.01)
    correlation = np.corrcoef(noise.numpy())
    assert np.abs(correlation - np.eye(64)).max() < 0.04


def test_noise_of_some_tokens_is_theirs():
    whole, ids = Noise(100), torch.tensor([3, 99, 41, 0])
    some, keys = NoiseOf(whole, ids), [(5, 7), (6, 7), (5, 7)]
    assert torch.equal(some.rows(keys), whole.rows(keys)[:, ids])
    tokens = torch.tensor([[2, 0], [1, 1], [3, 2]])
    torch.testing.assert_close(some.at(keys, tokens), whole.rows(keys).gather(1, ids[tokens]))


def test_noise_depends_on_its_key_alone():
    whole = gumbel(torch.tensor([3, -5, 3]), torch.tensor([7, 7, 8]), 1003)
    assert torch.equal(gumbel(torch.tensor([-5]), torch.tensor([7]), 10)[0], whole[1, :10])
    assert not torch.equal(whole[0], whole[1]) and not torch.equal(whole[0], whole[2])
    cached = Noise(1003, max_bytes=1)
    assert torch.equal(cached.rows([(3, 7), (-5, 7), (3, 8)]), whole)
    assert torch.equal(cached.rows([(3, 8), (3, 8), (3, 7)]), whole[[2, 2, 0]])
    for i in range(500):
        cached.rows([(1, i)])
    assert torch.equal(cached.rows([(3, 7)])[0], whole[0])


def draw_frequencies(logits: list[float], trials: int = 40_000, **params) -> np.ndarray:
    request = Request("r", (0,), SamplingParams(seed=11, **params))
    batch = SamplingBatch.build([(request, position) for position in range(trials)])
    noise = gumbel(torch.full((trials,), 11), torch.arange(trials), len(logits))

    class Fixed(Noise):
        def rows(self, keys):
            return noise

    tokens = kernels.sample(torch.tensor([logits]).expand(trials, -1), batch, Fixed(len(logits)))
    return np.bincount(tokens.numpy(), minlength=len(logits)) / trials


P = np.array([0.4, 0.3, 0.2, 0.1])
LOGITS = np.log(P).tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, P),
        ({"temperature": 0.5}, P**2 / (P**2).sum()),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 100}, P),
        ({"top_p": 0.0}, [1, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_p": 0.39}, [1, 0, 0, 0]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 1.0}, P),
        ({"min_p": 0.45}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        # top-p is taken over what top-k leaves: 4/7 < 0.6 keeps two
        ({"top_k": 2, "top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),
        ({"temperature": 0.5, "min_p": 0.3}, [16 / 25, 9 / 25, 0, 0]),
        ({"temperature": 2.0, "top_p": 0.5}, [2 / (2 + 3**0.5), 3**0.5 / (2 + 3**0.5), 0, 0]),
    ],
)
def test_draws_follow_the_transformed_distribution(params, expected):
    assert draw_frequencies(LOGITS, **params) == pytest.approx(np.asarray(expected), abs=0.008)


def test_order_of_the_vocabulary_does_not_matter():
    order = [2, 0, 3, 1]
    frequencies = draw_frequencies([LOGITS[i] for i in order], top_p=0.71)
    assert frequencies == pytest.approx(np.array([4 / 9, 3 / 9, 2 / 9, 0])[order], abs=0.008)


def test_ties_are_kept_together():
    assert draw_frequencies([0.0, 0.0, 0.0, -9.0], top_k=1) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0], abs=0.01)


def test_rows_do_not_disturb_each_other():
    logits = torch.randn(6, 300) * 3
    rows = [
        {"temperature": 0.0},
        {"top_p": 0.3},
        {"top_k": 5, "temperature": 0.7},
        {"min_p": 0.2},
        {},
        {"top_k": 300, "top_p": 0.9, "min_p": 0.001},
    ]
    noise = Noise(300)
    together = kernels.sample(logits, sampling(rows), noise)
    alone = [int(kernels.sample(logits[i : i + 1], sampling([row], seeds=[i]), noise)) for i, row in enumerate(rows)]
    assert together.tolist() == alone
    assert together[0] == logits[0].argmax()


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(temperature):
    logits = torch.randn(1, 1000) * 20
    assert int(kernels.sample(logits, sampling([{"temperature": temperature}]), Noise(1000))) == logits.argmax()


def test_a_seed_gives_the_same_draws_and_another_seed_others():
    logits = torch.zeros(64, 500)

    def draw(seed):
        request = Request("r", (0,), SamplingParams(seed=seed))
        batch = SamplingBatch.build([(request, position) for position in range(64)])
        return kernels.sample(logits, batch, Noise(500)).tolist()

    assert draw(1) == draw(1) != draw(2)
    assert len({tuple(draw(None)) for _ in range(20)}) == 20  # without a seed every request has its own


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 2.1, float("nan"), float("inf"), True, "0.7"]),
        ("top_p", [-0.1, 1.1, float("nan"), "1"]),
        ("min_p", [-0.1, 1.1, float("nan"), None]),
        ("top_k", [-2, 1.0, "3", True]),
        ("max_tokens", [0, -1, 1.5, "8", True]),
        ("seed", [2**63, -(2**63) - 1, 1.0]),
        ("stop", [[""], ["a", ""], ["x"] * 17, [3], ""]),
    ],
)
def test_bad_parameters_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field, value


def test_edge_parameters_are_accepted():
    SamplingParams(temperature=0, top_p=0, top_k=-1, min_p=0, max_tokens=1, seed=-(2**63), stop=None)
    assert SamplingParams(stop="a").stop == ("a",)

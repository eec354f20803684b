"""Whatever tree is proposed, the text is distributed as the target's (200,000 seeded draws on a scripted target)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minispec import kernels
from minispec.request import Request, SamplingParams
from minispec.sampling import Noise, SamplingBatch, gumbel
from minispec.tree import DraftTree
from minispec.verify import verify
from scripted import NoDrafter, ScriptedDrafter, run, scripted_engine

P = np.array([0.2, 0.3, 0.5])
TRIALS = 200_000


@pytest.mark.parametrize("children", [(), (0,), (1,), (2,), (0, 1), (2, 0), (0, 1, 2)])
def test_draws_after_any_proposal(children):
    logits = torch.tensor(np.log(P), dtype=torch.float32).expand(TRIALS, -1)
    seeds = torch.arange(TRIALS) * 7919 - 1_000_000
    noise = gumbel(seeds, torch.full((TRIALS,), 12), 3)

    class Fixed(Noise):
        def rows(self, keys):
            return noise

    requests = [(Request("r", (0,), SamplingParams(seed=int(seed))), 12) for seed in seeds]
    samples = kernels.sample(logits, SamplingBatch.build(requests), Fixed(3)).tolist()
    tree = DraftTree((9, *children), (-1, *[0] * len(children)), tuple(-0.1 * i for i in range(len(children) + 1)))
    first = [verify(tree, [sample] * len(tree)).tokens[0] for sample in samples]
    assert np.bincount(first, minlength=3) / TRIALS == pytest.approx(P, abs=0.005)


@pytest.mark.parametrize("draft", [None, [0, 0, 0], [1, 0, 2], [2, 2, 2]])
def test_text_through_the_engine(draft):
    """2,000 seeded requests of six tokens through whole steps: every position and every pair keeps its frequency."""
    drafter = NoDrafter() if draft is None else ScriptedDrafter(lambda text: (draft, range(3)))
    engine = scripted_engine(lambda prefix: np.log(P).tolist(), 3, drafter, max_slots=64, pages=512)
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in range(2000)]
    outputs = np.array([request.output for request in run(engine, [[0]] * len(params), params)])
    for position in range(6):
        assert np.bincount(outputs[:, position], minlength=3) / 2000 == pytest.approx(P, abs=0.035)
    pairs = np.bincount(outputs[:, 2] * 3 + outputs[:, 3], minlength=9) / 2000
    assert pairs == pytest.approx(np.outer(P, P).flatten(), abs=0.03)
    alone = [run(engine, [[0]], [params[i]])[0].output for i in (0, 77, 1999)]
    assert [outputs[i].tolist() for i in (0, 77, 1999)] == alone

"""The engine over the Triton kernels, interpreted on the CPU: the same token ids as over the torch references.

    MINISPEC_KERNELS=triton TRITON_INTERPRET=1 pytest tests/test_engine_on_triton.py

The implementation is chosen once per process, so without these variables the tests run in a process that has them.
What the references give is computed here, with the kernels exchanged.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest
import torch

import minispec.engine
from minispec import kernels
from minispec.drafters.base import NoDrafter
from minispec.drafters.draft_model import DraftModelDrafter
from minispec.drafters.ngram import NgramDrafter
from minispec.engine import Engine
from minispec.graphs import CapturedRunner
from minispec.kv_cache import PagePool
from minispec.model.config import ModelConfig
from minispec.model.llama import Llama
from minispec.request import SamplingParams
from minispec.runner import ModelRunner
from minispec.sampling import Noise
from minispec.settle import settle_on_device
from scripted import run

ENVIRONMENT = {"MINISPEC_KERNELS": "triton", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
INSIDE = all(os.environ.get(name) == value for name, value in list(ENVIRONMENT.items())[:2])
OPERATIONS = [name for name in kernels.__all__ if hasattr(sys.modules.get(f"minispec.kernels.{name}"), f"{name}_ref")]
PAGES, PAGE_SIZE, VOCAB = 24, 16, 96

inside = pytest.mark.skipif(not INSIDE, reason="run by test_in_a_process_of_its_own")


@pytest.mark.skipif(INSIDE, reason="this is that process")
def test_in_a_process_of_its_own():
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(CASES) + 2} passed" in result.stdout


@cache
def model() -> Llama:
    """One layer, with three query heads for each KV head."""
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=64, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=16,
        max_position=256,
    )  # fmt: skip
    return Llama.random(config, device="cpu", dtype=torch.float32, seed=2, std=0.25)


def runner(captured: bool) -> ModelRunner:
    if captured:
        made: ModelRunner = CapturedRunner(
            model(), pages=PAGES, page_size=PAGE_SIZE, max_context=100, max_rows=32, capture=lambda launch: launch
        )
    else:
        made = ModelRunner(model(), pages=PAGES, page_size=PAGE_SIZE)
    made.kv.k.fill_(float("nan"))
    made.kv.v.fill_(float("nan"))
    return made


def outputs(draft: str, sampled: bool, captured: bool = False) -> list[list[int]]:
    """Two requests of different lengths in one batch; prompts are read in pieces."""
    noise = Noise(VOCAB)
    if draft == "itself":
        drafter = DraftModelDrafter(draft, runner(captured), PagePool(PAGES), noise, depth=2, width=2, children=2)
    else:
        drafter = {"none": NoDrafter, "ngram": NgramDrafter}[draft]()
    engine = Engine(
        runner(captured),
        PagePool(PAGES),
        drafter,
        noise,
        max_slots=2,
        max_context=100,
        max_step_tokens=24,
        tree_budget=12,
    )
    mode = {"temperature": 0.9, "top_p": 0.9} if sampled else {"temperature": 0.0}
    prompts = [[5, 6, 7, 8] * 5 + [5], [11, 60, 3]]
    params = [SamplingParams(**mode, max_tokens=8 - 2 * i, seed=i) for i in range(2)]
    return [request.output for request in run(engine, prompts, params)]


@cache
def expected(sampled: bool) -> list[list[int]]:
    """What the torch references give without speculation."""
    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(kernels, name, getattr(sys.modules[f"minispec.kernels.{name}"], f"{name}_ref"))
        return outputs("none", sampled)


CASES = [
    (draft, sampled, captured)
    for draft in ("none", "ngram", "itself")
    for sampled in (False, True)
    for captured in (False, True)
]


@inside
@pytest.mark.parametrize(("draft", "sampled", "captured"), CASES)
def test_the_same_tokens(draft, sampled, captured, monkeypatch):
    if captured:  # replayed over static buffers, verified and committed on the device
        monkeypatch.setattr(minispec.engine, "settle", settle_on_device)
    assert outputs(draft, sampled, captured) == expected(sampled)


@inside
def test_these_are_the_triton_kernels():
    assert kernels.BACKEND == "triton"
    assert kernels.tree_attention.__name__ == "tree_attention_triton"
    assert len(OPERATIONS) >= 10


@inside
def test_the_texts_tell():
    """Tokens vary, and sampled ones differ from greedy ones: agreement is no accident."""
    greedy, sampled = expected(False), expected(True)
    assert greedy != sampled
    assert all(len(set(tokens)) > 2 for tokens in greedy + sampled)

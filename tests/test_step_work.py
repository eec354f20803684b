"""What a step costs beside the model does not depend on how many slots or how much context there could be."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minispec.batch import StepBatch
from minispec.request import SamplingParams
from tiny_engine import VOCAB, tiny_engine

FETCHES = (
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.nonzero,
)
"""What makes the host wait for a device."""


class Fetches(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in FETCHES:
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def fetches_per_step(slots: int, **sampling) -> set[int]:
    engine = tiny_engine("ngram", max_slots=slots, pages=16 * slots, max_step_tokens=1024)
    for i in range(slots):
        prompt = [(i + j) % VOCAB for j in range(8)]
        engine.add(engine.make_request(prompt, SamplingParams(max_tokens=12, ignore_eos=True, seed=i, **sampling)))
    engine.step()  # the prompts
    seen = set()
    while len(engine.scheduler.running) == slots and all(
        slot.request.remaining > 2 for slot in engine.scheduler.running
    ):
        with Fetches() as fetches:
            engine.step()
        seen.add(fetches.counts.total())
    return seen


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}])
def test_the_host_fetches_as_often_for_many_slots_as_for_one(sampling):
    """Failure case j5: one fetch for the tokens of all. The CPU's sampler looks at a tensor now and then, where there
    is nothing to wait for, but not once per row."""
    alone, together = fetches_per_step(1, **sampling), fetches_per_step(16, **sampling)
    assert max(together) < max(alone) + 8
    if not sampling["temperature"]:
        assert alone == together == {1}


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do: on a device, launches."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_per_step(draft: str, width: int) -> int:
    """Of a step that drafts and verifies ``6 * width`` nodes, ``width`` a layer."""
    engine = tiny_engine(draft, depth=6, width=width, tree_budget=1 + 6 * width)
    if draft == "eagle3":
        engine.drafter._width = engine.drafter._children = width
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    engine.add(engine.make_request([1, 2, 3, 4, 5] * 3, params))
    for _ in range(3):
        engine.step()
    drafted = engine.stats.drafted
    with Operations() as operations:
        engine.step()
    assert engine.stats.drafted - drafted == 6 * width
    return operations.count


@pytest.mark.parametrize("draft", ["other", "layers", "eagle3"])
def test_a_tree_of_sixty_nodes_takes_no_more_operations_than_one_of_twelve(draft):
    """The same number of layers: nothing is computed node by node."""
    assert operations_per_step(draft, 10) <= operations_per_step(draft, 2)


def test_a_step_is_laid_out_by_what_is_alive_not_by_what_could_be(monkeypatch):
    """Failure case j7: the same bytes for a limit of 200 tokens and one of 100,000, and no growth but the text's."""
    build = StepBatch.build
    sizes: list[int] = []

    def measured(*args, **more):
        batch = build(*args, **more)
        tensors = [value for f in fields(batch) if isinstance(value := getattr(batch, f.name), torch.Tensor)]
        sizes.append(sum(tensor.nbytes for tensor in tensors))
        return batch

    monkeypatch.setattr(StepBatch, "build", staticmethod(measured))
    runs = []
    for limit in (200, 100_000):
        engine = tiny_engine(max_context=limit, pages=8000)
        params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
        for i in range(3):
            engine.add(engine.make_request([i + 1, 5], params))
        while engine.has_work:
            engine.step()
        runs.append(list(sizes))
        sizes.clear()
    short, long = runs
    assert short == long
    pages = -(-152 // 16)
    assert max(long[1:]) - long[1] <= 3 * 4 * pages  # an entry of the page table per page

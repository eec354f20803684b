"""Layer skip: the target's first layers draft in its own cache, within the pages reserved for the tree."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minispec.batch import Span
from minispec.drafters.layer_skip import LayerSkipDrafter, check_layers
from minispec.engine import Engine
from minispec.errors import ConfigError
from minispec.kv_cache import PagePool
from minispec.model.linear import Linear
from minispec.request import SamplingParams
from minispec.runner import ModelRunner
from minispec.sampling import Noise
from scripted import run
from test_speculation_is_invisible import alone
from tiny_engine import VOCAB, tiny_engine, tiny_model

PROMPT = tuple(range(3, 20))
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


class Watched(ModelRunner):
    """Notes the forwards of some layers only: the highest position each span writes, and its pages' room."""

    def __init__(self, model, **sizes):
        super().__init__(model, **sizes)
        self.partial: list[list[tuple[int, int]]] = []

    def forward(self, spans, *, layers=None, taps=None):
        if layers is not None:
            self.partial.append(
                [(s.num_cached + s.first_key + len(s.tokens), len(s.pages) * self.kv.page_size) for s in spans]
            )
        return super().forward(spans, layers=layers, taps=taps)


def watched_engine(**settings):
    engine = tiny_engine("layers", **settings)
    engine.runner.__class__ = Watched
    engine.runner.partial = []
    return engine


@pytest.mark.parametrize("budget", [2, 3, 5, 8, 13, 64])
def test_drafting_stays_within_the_reserved_pages(budget):
    """With the smallest pages the reservation is exact, and a row past it would have no page."""
    engine = watched_engine(page_size=1, pages=600, tree_budget=budget, depth=7, width=4)
    [request] = run(engine, [PROMPT], [GREEDY])
    assert request.output == alone(PROMPT, GREEDY)
    assert engine.runner.partial and all(end <= room for spans in engine.runner.partial for end, room in spans)


@pytest.mark.parametrize("budget", [4, 8, 64])
def test_a_small_budget_still_drafts_deep(budget):
    engine = watched_engine(tree_budget=budget, depth=4, width=4)
    run(engine, [PROMPT], [GREEDY])
    verified = engine.stats.verifications
    # with room for 4 nodes, 3 layers are of use; with plenty, all 4 are run but the last, which is only added. A small
    # tree may keep nothing of the last layers
    layers = min(budget - 1, 4)
    at_least = layers if budget == 64 else 2
    assert (verified - 4) * at_least <= len(engine.runner.partial) <= verified * layers


def test_the_draft_is_what_the_first_layer_says():
    """Chains against a forward over the whole text with one layer, its argmax appended each time."""
    engine = tiny_engine("layers", depth=3, width=1)
    proposed = []
    propose = engine.drafter.propose

    def noting(slots, max_nodes):
        trees = propose(slots, max_nodes)
        proposed.extend((list(slot.request.tokens), tree) for slot, tree in zip(slots, trees, strict=True))
        return trees

    engine.drafter.propose = noting
    run(engine, [PROMPT], [GREEDY])
    assert len(proposed) > 10
    runner = ModelRunner(tiny_model(0), pages=64, page_size=16)
    for text, tree in proposed[:-3]:
        for token in tree.tokens[1:]:
            logits = runner.forward([Span.chunk(text, range(40), 0, sample_last=True)], layers=1)
            assert token == logits.argmax().item()
            text = [*text, token]


@pytest.mark.parametrize("mode", [{"temperature": 0.0}, {"temperature": 0.8}])
def test_with_idle_upper_layers_every_draft_is_right(mode):
    """A target whose second layer adds nothing is its own first layer."""
    model = copy.copy(tiny_model(0))
    last = model.layers[-1]
    nothing = [Linear(torch.zeros(64, n), None) for n in (64, 128)]
    model.layers = [*model.layers[:-1], replace(last, o=nothing[0], down=nothing[1])]
    runner = ModelRunner(model, pages=64, page_size=16)
    noise = Noise(VOCAB)
    drafter = LayerSkipDrafter(runner, 2, 1, noise, depth=4, width=1, children=1)
    engine = Engine(runner, PagePool(64), drafter, noise, max_context=400)
    [request] = run(engine, [PROMPT], [SamplingParams(**mode, max_tokens=101, seed=1)])
    stats = request.speculation
    assert (stats.steps, stats.drafted, stats.accepted) == (20, 80, 80)


@pytest.mark.parametrize("layers", [0, -1, 30, 31])
def test_the_number_of_layers_is_checked(layers):
    with pytest.raises(ConfigError, match=f"layers:{layers} does not fit a target of 30 layers: 1 to 29"):
        check_layers(layers, 30)
    check_layers(1, 30)
    check_layers(29, 30)


def test_a_target_of_one_layer_has_none_to_skip():
    with pytest.raises(ConfigError, match="suffix"):
        check_layers(1, 1)


class Halves:
    """Slots whose first page is 0 know what comes, the others find every token as likely."""

    vocab_size, kv = VOCAB, SimpleNamespace(page_size=16)

    def forward(self, spans, layers=None):
        assert all(span.tokens for span in spans)
        return torch.cat([logits.expand(len(span.tokens), -1) for span in spans for logits in [self.of(span)]])

    def of(self, span):
        logits = torch.zeros(1, VOCAB)
        logits[0, 3] = 20.0 * (span.pages[0] == 0)
        return logits


def sizes_of_trees(children: int, **limits: float) -> list[int]:
    """Of a slot that knows what comes, and of one that does not."""

    def slot(page):
        request = SimpleNamespace(tokens=[1] * 5, params=GREEDY, remaining=100, seed=0)
        return SimpleNamespace(pages=[page, page + 1], num_cached=4, request=request)

    drafter = LayerSkipDrafter(Halves(), 4, 2, Noise(VOCAB), depth=4, width=4, children=children)
    for name, limit in limits.items():
        setattr(drafter, name, limit)
    slots = [Hashed(slot(0)), Hashed(slot(10))]
    for one in slots:
        drafter.begin(one)
    return [len(tree) for tree in drafter.propose(slots, [12, 12])]


@pytest.mark.parametrize(("gain", "value", "sizes"), [(0.3, 0.1, [5, 2]), (0.3, 0.0, [5, 5]), (3.0, 0.0, [2, 2])])
def test_who_is_unsure_leaves_the_layers_to_the_others(gain: float, value: float, sizes: list[int]) -> None:
    assert sizes_of_trees(1, least_gain=gain, least_value=value) == sizes


@pytest.mark.parametrize(("least", "sizes"), [(0.0, [12, 12]), (0.5 / VOCAB, [5, 4]), (0.1, [5, 2])])
def test_what_is_not_worth_a_row_is_not_proposed_but_the_likeliest_is(least: float, sizes: list[int]) -> None:
    """One token of the vocabulary of the slot that does not know has 1 / VOCAB."""
    assert sizes_of_trees(3, least_node=least) == sizes


class Hashed:
    """By identity."""

    def __init__(self, of) -> None:
        self.__dict__ = of.__dict__

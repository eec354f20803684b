"""A draft model: its forwards, its cache, its pages."""

from __future__ import annotations

import copy
import math

import pytest

from minispec.drafters.base import NoDrafter
from minispec.drafters.draft_model import DraftModelDrafter
from minispec.engine import Engine
from minispec.kv_cache import PagePool
from minispec.request import SamplingParams
from minispec.runner import ModelRunner
from minispec.sampling import Noise
from minispec.scheduler import Slot
from scripted import run
from tiny_engine import VOCAB, tiny_model

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
MODES = pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


class CountingRunner(ModelRunner):
    """Notes the rows of every forward."""

    def __init__(self, model, *, pages: int = 64, page_size: int = 16) -> None:
        super().__init__(model, pages=pages, page_size=page_size)
        self.kv.k.fill_(float("nan"))
        self.kv.v.fill_(float("nan"))
        self.rows: list[int] = []

    def forward(self, spans, **more):
        self.rows.append(sum(len(span.tokens) for span in spans))
        return super().forward(spans, **more)


class Drafting:
    """An engine with a draft model, and what the tests look at."""

    def __init__(
        self, model=None, *, pages: int = 64, draft_pages: int | None = None, page_size: int = 16, depth=4, width=4,
        children=None, chunk: int = 256, drafter=DraftModelDrafter, **settings,
    ) -> None:  # fmt: skip
        draft_pages = pages if draft_pages is None else draft_pages
        self.target = CountingRunner(tiny_model(0), pages=pages, page_size=page_size)
        self.runner = CountingRunner(model or tiny_model(1), pages=draft_pages, page_size=page_size)
        self.pool = PagePool(draft_pages)
        noise = Noise(VOCAB)
        shape = {"depth": depth, "width": width, "children": children or width, "chunk": chunk}
        self.drafter = drafter("draft", self.runner, self.pool, noise, **shape)
        self.engine = Engine(self.target, PagePool(pages), self.drafter, noise, max_context=400, **settings)

    def request(self, prompt, **params):
        request = self.engine.make_request(prompt, SamplingParams(**{"seed": 0, **params}))
        self.engine.add(request)
        return request

    def run(self, prompts, params):
        requests = run(self.engine, prompts, params)
        assert self.pool.owned == 0 and self.drafter._states == {}
        return requests


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(31 * i * (seed + 3) + 7 * i * i + seed) % VOCAB for i in range(length)]


def plain(prompts, params) -> list[list[int]]:
    """The same without drafts."""
    noise = Noise(VOCAB)
    runner = CountingRunner(tiny_model(0), pages=256)
    engine = Engine(runner, PagePool(256), NoDrafter(), noise, max_context=400)
    return [request.output for request in run(engine, prompts, params)]


@pytest.mark.parametrize("depth", [1, 2, 4, 6])
@pytest.mark.parametrize("slots", [1, 3])
def test_as_many_forwards_as_the_tree_is_deep(depth, slots):
    """Not as many as it has nodes, nor as there are slots."""
    d = Drafting(depth=depth, width=3)
    for i in range(slots):
        d.request(prompt(5, i), max_tokens=60, **GREEDY)
    d.engine.step()
    assert d.runner.rows == []  # the first token waits for no draft
    for _ in range(4):
        d.runner.rows.clear()
        d.engine.step()
        assert len(d.runner.rows) == depth
        assert d.runner.rows[1:] == [3 * slots] * (depth - 1)


@MODES
def test_one_token_needs_no_draft(mode):
    d = Drafting()
    d.run([prompt(40)], [SamplingParams(max_tokens=1, seed=0, **mode)])
    assert d.runner.rows == [] and len(d.target.rows) == 1


@pytest.mark.parametrize(("max_tokens", "forwards"), [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (6, 4), (7, 4)])
def test_no_layer_is_drafted_that_the_request_has_no_room_for(max_tokens, forwards):
    """One token comes from the prompt and one is the bonus: a tree of depth d serves d + 2 tokens."""
    d = Drafting(depth=4)
    d.request(prompt(5), max_tokens=max_tokens, **GREEDY)
    d.engine.step()
    d.engine.step()
    assert len(d.runner.rows) == forwards


@pytest.mark.parametrize(("budget", "forwards"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (60, 4)])
def test_no_layer_is_drafted_that_the_budget_has_no_room_for(budget, forwards):
    d = Drafting(depth=4, tree_budget=budget)
    d.request(prompt(5), max_tokens=50, **GREEDY)
    d.engine.step()
    d.engine.step()
    # nor a layer of nodes that a small tree would not keep
    assert (forwards if budget == 60 else min(forwards, 1)) <= len(d.runner.rows) <= forwards
    assert d.target.rows[1] == min(budget, 1 + 4 + 16 * 3)


class Compared(DraftModelDrafter):
    """Checks every proposal against one made without any history."""

    def __init__(self, name, runner, pool, noise, **shape) -> None:
        super().__init__(name, runner, pool, noise, **shape)
        self.shape = {**shape, "chunk": 10_000}
        self.compared = 0
        self.grown = 0

    def propose(self, slots, max_nodes):
        trees = super().propose(slots, max_nodes)
        for slot, count, tree in zip(slots, max_nodes, trees, strict=True):
            if self._states[slot].num_cached < len(slot.request.tokens):
                continue  # still reading
            runner = CountingRunner(self._runner.model, pages=self._pool.total, page_size=self._runner.kv.page_size)
            fresh = DraftModelDrafter("fresh", runner, PagePool(self._pool.total), Noise(VOCAB), **self.shape)
            twin = Slot(slot.index, slot.request)
            fresh.begin(twin)
            [expected] = fresh.propose([twin], [count])
            assert tree.tokens == expected.tokens and tree.parents == expected.parents
            assert tree.values == pytest.approx(expected.values, abs=1e-3)
            self.compared += 1
            self.grown += len(tree) > 1
        return trees


@MODES
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("own", [True, False], ids=["itself", "other"])
def test_after_any_acceptance_the_cache_is_as_if_read_afresh(own, page_size, mode):
    d = Drafting(
        tiny_model(0 if own else 1), page_size=page_size, pages=1024 // page_size, depth=3, width=3, drafter=Compared,
        chunk=16, max_slots=2,
    )  # fmt: skip
    texts = [prompt(3), prompt(40, 1), prompt(21, 2)]
    params = [SamplingParams(max_tokens=30, seed=i, **mode) for i in range(3)]
    requests = d.run(texts, params)
    assert d.drafter.compared > 20 and d.drafter.grown > 20
    assert [r.output for r in requests] == plain(texts, params)
    accepted = sum(r.speculation.accepted for r in requests)
    assert accepted > 40 if own else accepted >= 0


def test_a_long_prompt_is_read_in_chunks():
    d = Drafting(chunk=32, depth=1)
    d.request(prompt(100), max_tokens=50, **GREEDY)
    d.engine.step()
    sizes = []
    for _ in range(4):
        d.runner.rows.clear()
        d.engine.step()
        sizes.append(sum(d.runner.rows))
    # 101 tokens are known at the first draft; each step adds one more until drafting begins
    assert sizes == [32, 32, 32, 101 + 3 - 96]
    assert d.engine.stats.drafted == 4  # the first tree that is more than a root


def test_running_drafts_go_on_while_a_long_prompt_is_read():
    """Also when the long one is the older."""
    d = Drafting(tiny_model(0), chunk=16, depth=2, max_step_tokens=512)
    long = d.request(prompt(300), max_tokens=20, **GREEDY)
    short = d.request(prompt(4, 1), max_tokens=20, **GREEDY)
    d.engine.step()
    d.engine.step()
    assert long.speculation.drafted == 0 and short.speculation.drafted > 0
    d.engine.step()
    assert max(d.runner.rows) <= 16


@MODES
def test_what_is_not_drafted_for_is_caught_up_with(mode):
    """Steps without a proposal leave text to read: a chunk a step, and then the drafts are as right as before."""
    d = Drafting(tiny_model(0), chunk=32, depth=4, width=1, max_slots=1)
    request = d.request(prompt(20), max_tokens=200, **mode)
    for _ in range(3):
        d.engine.step()
    own, d.drafter.propose = d.drafter.propose, NoDrafter().propose
    for _ in range(90):
        d.engine.step()
    assert d.engine.stats.drafted == d.engine.stats.accepted == 8
    d.drafter.propose = own
    d.runner.rows.clear()
    for _ in range(3):
        d.engine.step()
    assert d.runner.rows[:2] == [32, 32] and d.engine.stats.drafted == 12
    while request.remaining > 5:
        d.engine.step()
    counts = request.speculation
    assert counts.accepted == counts.drafted > 60 and max(d.runner.rows) <= 32
    while d.engine.has_work:
        d.engine.step()
    assert [request.output] == plain([prompt(20)], [request.params])


@MODES
def test_an_exhausted_draft_pool_means_no_drafts_and_the_same_text(mode):
    texts = [prompt(20, i) for i in range(4)]
    params = [SamplingParams(max_tokens=40, seed=i, **mode) for i in range(4)]
    for draft_pages in (0, 1, 4, 7):
        d = Drafting(tiny_model(0), draft_pages=draft_pages)
        requests = d.run(texts, params)
        assert [r.output for r in requests] == plain(texts, params)
        drafted = [r.speculation.drafted for r in requests]
        if draft_pages < 3:
            assert drafted == [0] * 4
        else:
            assert drafted[0] > 0


def test_pages_come_back_at_the_end_of_a_request_however_it_ends():
    d = Drafting()
    first, second = (d.request(prompt(20, i), max_tokens=100, **GREEDY) for i in range(2))
    for _ in range(3):
        d.engine.step()
    held = d.pool.owned
    assert held >= 4
    d.engine.abort(first)
    assert 0 < d.pool.owned < held
    while d.engine.has_work:
        d.engine.step()
    assert second.finished and d.pool.owned == 0 and d.drafter._states == {}


@MODES
def test_pages_come_back_at_a_preemption(mode):
    d = Drafting(tiny_model(0), pages=10, draft_pages=64, max_slots=3)
    texts = [prompt(30, i) for i in range(3)]
    params = [SamplingParams(max_tokens=60, seed=i, **mode) for i in range(3)]
    requests = [d.request(text, max_tokens=60, **{**mode, "seed": i}) for i, text in enumerate(texts)]
    preempted = 0
    while d.engine.has_work:
        d.engine.step()
        d.engine.check()
        states = d.drafter._states
        d.pool.check([state.pages for state in states.values()])
        assert set(states) == set(d.engine.scheduler.running)
        preempted = d.engine.stats.preemptions
    assert preempted > 0 and d.pool.owned == 0
    assert [r.output for r in requests] == plain(texts, params)


def spoilt(model, row: int | None):
    """A model whose logits are not a number: all of them, or that of one token."""
    spoilt = copy.copy(model)

    def forward(batch, kv, *more, **named):
        logits = model.forward(batch, kv, *more, **named).clone()
        logits[:, slice(None) if row is None else row] = float("nan")
        return logits

    spoilt.forward = forward
    return spoilt


@MODES
@pytest.mark.parametrize("row", [None, 5], ids=["all", "one"])
def test_a_draft_that_gives_no_numbers_is_not_drafted_from(row, mode, caplog):
    d = Drafting(spoilt(tiny_model(1), row))
    texts, params = [prompt(9), prompt(12, 1)], [SamplingParams(max_tokens=20, seed=i, **mode) for i in range(2)]
    requests = d.run(texts, params)
    assert [r.output for r in requests] == plain(texts, params)
    assert d.engine.stats.drafted == 0
    # the last token of all needs no draft
    assert d.drafter.invalid == sum(r.speculation.steps - 1 for r in requests) == 36
    assert caplog.text.count("not finite") == 1


@MODES
def test_a_draft_that_gives_infinity_is_not_drafted_from(mode):
    model = copy.copy(tiny_model(1))
    model.forward = lambda batch, kv, *more, **named: tiny_model(1).forward(batch, kv, *more, **named) + float("inf")
    d = Drafting(model)
    [request] = d.run([prompt(9)], [SamplingParams(max_tokens=10, seed=0, **mode)])
    assert d.engine.stats.drafted == 0 and d.drafter.invalid == 8
    assert [request.output] == plain([prompt(9)], [request.params])


@MODES
@pytest.mark.parametrize("vocab", [VOCAB - 30, VOCAB // 2])
def test_a_draft_that_knows_fewer_tokens(vocab, mode):
    """Prompts and the target's text hold ids past the draft's vocabulary."""
    d = Drafting(tiny_model(1, vocab=vocab))
    texts = [[VOCAB - 1, 3, VOCAB - 2], prompt(50, 1)]
    params = [SamplingParams(max_tokens=40, seed=i, **mode) for i in range(2)]
    requests = d.run(texts, params)
    assert [r.output for r in requests] == plain(texts, params)
    assert any(token >= vocab for r in requests for token in r.output) and d.engine.stats.drafted > 0


class Recording(DraftModelDrafter):
    """Keeps the proposals."""

    def propose(self, slots, max_nodes):
        trees = super().propose(slots, max_nodes)
        self.trees = [*getattr(self, "trees", []), *trees]
        return trees


@pytest.mark.parametrize(
    ("params", "most"), [({"top_k": 2}, 2), ({"top_p": 0.0}, 1), ({"min_p": 1.0}, 1), ({"top_k": 1, "top_p": 0.5}, 1)]
)
def test_only_what_the_target_can_draw_is_proposed(params, most):
    d = Drafting(tiny_model(0), width=4, depth=3, drafter=Recording)
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=1, **params)
    [request] = d.run([prompt(8)], [params])
    assert [request.output] == plain([prompt(8)], [params])
    assert max(len(children) for tree in d.drafter.trees for children in tree.children) == most
    # the target drafts for itself: it always finds its token
    assert request.speculation.acceptance_length == pytest.approx(29 / -(-29 // 4))


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.8, 1.5])
def test_one_child_is_enough_for_the_target_drafting_for_itself(temperature):
    """Drafter and target share the noise, so the first child is the target's own draw."""
    d = Drafting(tiny_model(0), width=1, depth=4)
    params = [SamplingParams(max_tokens=51, temperature=temperature, seed=i) for i in range(3)]
    for request in d.run([prompt(6, i) for i in range(3)], params):
        stats = request.speculation
        assert (stats.steps, stats.drafted, stats.accepted, stats.emitted) == (10, 40, 40, 50)


def test_siblings_share_their_parents_odds():
    d = Drafting(tiny_model(0), width=3, depth=2, drafter=Recording, max_slots=4)
    d.run([prompt(6, i) for i in range(4)], [SamplingParams(max_tokens=80, temperature=1.0, seed=i) for i in range(4)])
    for tree in d.drafter.trees:
        for node, children in enumerate(tree.children):
            assert sum(math.exp(tree.values[child] - tree.values[node]) for child in children.values()) <= 1 + 1e-4

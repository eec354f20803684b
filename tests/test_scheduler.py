"""Who runs and whose pages pay: the scheduler by itself, and under the whole engine in random orders of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minispec.errors import RequestError
from minispec.kv_cache import PagePool
from minispec.request import FinishReason, Request, SamplingParams
from minispec.scheduler import Scheduler, Slot
from scripted import ScriptedDrafter, generate, scripted_engine, table

VOCAB = 32
PAGE = 4


def counting(prefix):
    return (prefix[-1] + 1) % 29


def request(length: int) -> Request:
    return Request(id=f"{length}", prompt=(1,) * length, params=SamplingParams(), limit=100)


def scheduler(pages: int = 64, **settings) -> Scheduler:
    defaults = {"page_size": PAGE, "max_slots": 4, "max_step_tokens": 32, "max_tree_tokens": 8}
    return Scheduler(PagePool(pages), **{**defaults, **settings})


def admitted(s: Scheduler, *lengths: int, decoding: bool = False) -> list[Slot]:
    """Slots for prompts of these lengths; ``decoding``: prompt read and first token out."""
    s.waiting.extend(map(request, lengths))
    slots = s.admit()
    if decoding:
        for slot in slots:
            slot.num_cached = len(slot.request.tokens)
            slot.request.append([1])
    s.check()
    return slots


def test_admission_gives_seats_and_pages_in_order():
    s = scheduler(max_slots=2)
    slots = admitted(s, 5, 4, 3)
    assert [(slot.index, slot.request.id, len(slot.pages)) for slot in slots] == [(0, "5", 2), (1, "4", 1)]
    assert [r.id for r in s.waiting] == ["3"] and s.pool.owned == 3
    s.release(slots[0])
    assert [(slot.index, slot.request.id) for slot in s.admit()] == [(0, "3")]
    assert [slot.index for slot in s.running] == [1, 0]  # oldest first
    s.check()


def test_a_large_request_is_not_overtaken():
    s = scheduler(pages=10)
    [first] = admitted(s, 24)
    assert admitted(s, 20, 1) == []  # five pages wanted, four free: the small one behind waits too
    s.release(first)
    assert [slot.request.id for slot in s.admit()] == ["20", "1"]


def test_prefill_shares_are_equal_and_the_rest_goes_to_the_long():
    s = scheduler(max_step_tokens=30)
    short, *_ = admitted(s, 4, 50, 40)
    plan = s.plan()
    assert {slot.request.id: count for slot, count in plan.chunks} == {"4": 4, "50": 13, "40": 13}
    assert plan.decoding == () and plan.chunks[0][0] is short


def test_streams_keep_half_of_a_step_at_most_while_prompts_are_read():
    s = scheduler(max_step_tokens=20, max_tree_tokens=16)
    [stream] = admitted(s, 3, decoding=True)
    assert (s.plan().decoding, s.plan().tree_budget) == ((stream,), 16)
    admitted(s, 100)
    plan = s.plan()
    assert plan.tree_budget == 10 and [count for _, count in plan.chunks] == [10]


@pytest.mark.parametrize(("slots", "tree", "budget"), [(1, 100, 20), (4, 2, 4), (4, 3, 4), (2, 8, 8)])
def test_trees_fit_the_step_and_every_slot_keeps_a_root(slots, tree, budget):
    s = scheduler(max_step_tokens=20, max_tree_tokens=tree)
    admitted(s, *[1] * slots, decoding=True)
    assert s.plan().tree_budget == budget


def test_a_request_of_one_token_prefills_before_it_decodes():
    s = scheduler()
    [slot] = admitted(s, 1)
    assert slot.num_pending == 1 and not slot.decoding and [c for _, c in s.plan().chunks] == [1]


def test_trees_get_the_budget_that_other_roots_leave():
    s = scheduler(max_tree_tokens=8)
    slots = admitted(s, 4, 4, 4, decoding=True)
    plan, nodes, preempted = s.reserve(s.plan())
    assert plan.decoding == tuple(slots) and preempted == []
    assert nodes == [6, 6, 6]
    assert all(len(slot.pages) * PAGE >= slot.num_cached + 6 for slot in slots)
    s.check()


def test_no_draft_where_the_next_token_is_the_last():
    s = scheduler()
    [slot] = admitted(s, 4, decoding=True)
    slot.request.limit = slot.request.num_output + 1
    assert s.reserve(s.plan())[1] == [1]


def test_trees_are_trimmed_to_the_pages_left():
    s = scheduler(pages=4)
    old, young = admitted(s, 4, 4, decoding=True)
    plan, nodes, preempted = s.reserve(s.plan())
    # both roots need a page, and then none is left: four positions each behind the cached four
    assert preempted == [] and plan.decoding == (old, young)
    assert nodes == [4, 4] and s.pool.free == 0
    s.check()


def test_the_youngest_gives_way():
    s = scheduler(pages=3)
    old, middle, young = admitted(s, 4, 4, 4, decoding=True)
    plan, nodes, preempted = s.reserve(s.plan())
    # the oldest takes the youngest's page, and then the middle one is the youngest
    assert preempted == [young, middle] and plan.decoding == (old,) and nodes == [8]
    assert [r.preemptions for r in (old.request, middle.request, young.request)] == [0, 1, 1]
    # they wait in their old order, before anybody who came later
    s.waiting.append(request(1))
    assert list(s.waiting)[:2] == [middle.request, young.request]
    assert s.admit() == []  # not before somebody ends: the pages would be taken away again
    s.release(old)
    assert [slot.request for slot in s.admit()] == [middle.request]
    s.check()


def test_a_prefilling_slot_may_have_to_give_way_too():
    s = scheduler(pages=3)
    [old] = admitted(s, 4, decoding=True)
    [young] = admitted(s, 8)
    plan, nodes, preempted = s.reserve(s.plan())
    assert preempted == [young] and plan.chunks == () and plan.decoding == (old,) and nodes == [8]


def test_pages_of_past_trees_are_taken_back_before_anybody_gives_way():
    s = scheduler(pages=5)
    old, young = admitted(s, 4, 4, decoding=True)
    assert s.reserve(s.plan())[1] == [7, 4]
    assert (len(old.pages), len(young.pages), s.pool.free) == (3, 2, 0)
    young.num_cached = 8
    young.request.append([1] * 4)
    plan, nodes, preempted = s.reserve(s.plan())
    assert preempted == [] and plan.decoding == (old, young) and nodes == [4, 4]
    assert (len(old.pages), len(young.pages)) == (2, 3)
    s.check()


def test_a_request_that_can_never_fit_is_refused_and_the_largest_that_can_runs_alone():
    engine = scripted_engine(table(counting, VOCAB), VOCAB, pages=10, page_size=PAGE, max_context=200)
    assert engine.room == 40
    with pytest.raises(RequestError, match="holds 40 tokens"):
        engine.make_request([1] * 40, SamplingParams())
    done = generate(engine, [1] * 39, max_tokens=5)
    assert done.num_output == 1 and done.finish_reason is FinishReason.LENGTH
    done = generate(engine, [1], max_tokens=500)
    assert done.num_output == 39 and engine.stats.preemptions == 0


def test_two_long_requests_in_a_pool_for_one_and_a_bit():
    """Each gives way at most once or twice, and little is computed again."""
    engine = scripted_engine(
        table(counting, VOCAB), VOCAB, pages=18, page_size=PAGE, max_context=60, max_slots=2, max_step_tokens=16
    )
    params = SamplingParams(max_tokens=30, temperature=0)
    both = [engine.make_request([first] * 30, params) for first in (3, 7)]
    for r in both:
        engine.add(r)
    while engine.has_work:
        engine.step()
        engine.check()
    for r, first in zip(both, (3, 7), strict=True):
        assert r.output == [(first + 1 + i) % 29 for i in range(30)]
        assert r.preemptions <= 2
    assert engine.stats.preemptions >= 1
    assert sum(engine.runner.rows) <= 1.5 * 2 * (30 + 29)


def test_admission_resumes_after_the_waiting_are_aborted():
    engine = scripted_engine(table(counting, VOCAB), VOCAB, max_slots=2, pages=12, page_size=PAGE, max_context=40)
    params = SamplingParams(max_tokens=3, temperature=0)
    for i in range(50):
        batch = [engine.make_request([i % 29] * 20, params) for _ in range(5)]
        for r in batch:
            engine.add(r)
        engine.step()
        for r in list(engine.scheduler.waiting):
            engine.abort(r)
        while engine.has_work:
            engine.step()
            engine.check()
        assert [r.finish_reason for r in batch] == [FinishReason.LENGTH] * 2 + [FinishReason.ABORT] * 3


shapes = st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=10)


class RandomServing(RuleBasedStateMachine):
    """Adds, steps, aborts in any order, with any drafts, in a pool too small for all."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: list[tuple[int, bool]] = []
        self.drafter = ScriptedDrafter(self.draft)
        self.engine = scripted_engine(
            table(counting, VOCAB),
            VOCAB,
            self.drafter,
            pages=14,
            page_size=PAGE,
            max_context=48,
            max_slots=4,
            max_step_tokens=16,
            tree_budget=12,
        )
        self.streamed: dict[Request, list[int]] = {}
        self.alive: list[Request] = []

    def draft(self, text):
        """A tree of the drawn shape; a node carries what the target says after its parent, or something else."""
        tokens, parents = [text[-1]], [-1]
        for parent, right in self.shape:
            parent %= len(tokens)
            token = (tokens[parent] + 1) % 29 if right else 29 + len(tokens) % 3
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
        return tokens[1:], parents[1:]

    @rule(length=st.integers(1, 30), first=st.integers(0, 28), max_tokens=st.integers(1, 30))
    def add(self, length: int, first: int, max_tokens: int) -> None:
        prompt = [(first + i) % 29 for i in range(length)]
        r = self.engine.make_request(prompt, SamplingParams(max_tokens=max_tokens, temperature=0))
        self.engine.add(r)
        self.alive.append(r)
        self.streamed[r] = []

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        r = self.alive.pop(which % len(self.alive))
        event = self.engine.abort(r)
        assert event is not None and event.finish_reason is FinishReason.ABORT and event.tokens == ()
        assert self.engine.abort(r) is None

    @precondition(lambda self: self.alive)
    @rule(shape=shapes, count=st.integers(1, 6))
    def step(self, shape: list[tuple[int, bool]], count: int) -> None:
        self.shape = shape
        for _ in range(count):
            if self.engine.has_work:
                self.one_step()

    def one_step(self) -> None:
        decoding = [slot for slot in self.engine.scheduler.running if slot.decoding]
        events = self.engine.step()
        self.engine.check()
        advanced = [event.request for event in events]
        assert len(set(advanced)) == len(advanced)
        for slot in decoding:  # nobody is passed over: a stream advances with every step, or has given its seat up
            assert (slot.request in advanced) != (slot in self.drafter.ended and not slot.request.finished)
        for event in events:
            assert event.tokens and event.request in self.alive
            self.streamed[event.request] += event.tokens
            if event.finish_reason is not None:
                assert event.finish_reason is FinishReason.LENGTH
                self.alive.remove(event.request)
        assert max(self.engine.runner.rows, default=0) <= 16

    @invariant()
    def texts_are_as_scripted(self) -> None:
        for r, tokens in self.streamed.items():
            assert tokens == r.output == [(r.prompt[-1] + 1 + i) % 29 for i in range(r.num_output)]

    @invariant()
    def pages_and_seats_belong_to_the_running(self) -> None:
        self.engine.check()
        seated = [slot.request for slot in self.engine.scheduler.running]
        assert sorted(map(id, [*seated, *self.engine.scheduler.waiting])) == sorted(map(id, self.alive))
        assert self.engine.stats.accepted <= self.engine.stats.drafted

    def teardown(self) -> None:
        steps = 0
        while self.engine.has_work:
            self.one_step()
            steps += 1
            assert steps < 2000, "no progress"
        self.texts_are_as_scripted()
        self.pages_and_seats_belong_to_the_running()
        assert self.alive == []
        assert self.engine.pool.owned == 0
        for r in self.streamed:
            assert r.finished
            if r.finish_reason is FinishReason.LENGTH:
                assert r.num_output == min(r.params.max_tokens, 48 - len(r.prompt))
        # seats are first taken in the order of arrival
        order = list(dict.fromkeys(slot.request for slot in self.drafter.begun))
        arrived = list(self.streamed)
        assert order == sorted(order, key=arrived.index)
        assert sorted(map(id, self.drafter.begun)) == sorted(map(id, self.drafter.ended))


TestRandomServing = RandomServing.TestCase
TestRandomServing.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)

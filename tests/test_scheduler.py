"""Who runs and whose pages pay: the scheduler by itself, and under an engine where time matters."""

from __future__ import annotations

import pytest

from minispec.errors import RequestError
from minispec.kv_cache import PagePool
from minispec.request import FinishReason, Request, SamplingParams
from minispec.scheduler import Scheduler, Slot
from scripted import generate, scripted_engine, table

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


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_two_long_requests_in_a_pool_for_one_and_a_bit(prefix_cache):
    """Each gives way at most once or twice, and little is computed again."""
    engine = scripted_engine(
        table(counting, VOCAB),
        VOCAB,
        pages=18,
        page_size=PAGE,
        max_context=60,
        max_slots=2,
        max_step_tokens=16,
        prefix_cache=prefix_cache,
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

"""The budget that follows load and luck: what it drafts, when it rests, when it returns. Time is simulated."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minispec.calibration import Calibration, Outcome, Ratio
from minispec.costs import DraftCost, RunningCost, StepCost, TreeCost
from minispec.drafters import union
from minispec.drafters.base import NoDrafter
from minispec.drafters.union import UnionDrafter
from minispec.request import SamplingParams, SpeculationParams
from minispec.tree import DraftTree
from minispec.verify import Acceptance
from scripted import chain, run
from simulated import Clock, TimedDrafter, simulated_engine
from tiny_engine import tiny_engine

COST = StepCost(20.0, 0.3)


def wrong_chain(text):
    return chain([60, 61, 62, 63])


def wrong_tree(text):
    return [60, 61, 62, 63, 51, 52], [0, 0, 0, 0, 1, 5]


def right(depth=4, share=1.0, seed=0):
    """Drafts what comes next, each token right with this probability."""
    rng = random.Random(seed)

    def draft(text):
        tokens = [(text[-1] + 1 + i) % 50 for i in range(depth)]
        return chain([token if rng.random() < share else 60 for token in tokens])

    return draft


def decode(drafter, clock, cost=COST, tokens=300, slots=1, **settings):
    """Run requests to their end; returns them and the tokens drafted in each step."""
    engine = simulated_engine(drafter, clock, cost, **settings)
    params = SamplingParams(max_tokens=tokens, temperature=0)
    requests = [engine.make_request([i + 1], params) for i in range(slots)]
    for request in requests:
        engine.add(request)
    drafted = []
    while engine.has_work:
        before = engine.stats.drafted
        engine.step()
        drafted.append(engine.stats.drafted - before)
    for request in requests:
        first = request.prompt[0] + 1
        assert request.output == [(first + i) % 50 for i in range(tokens)]
    return engine, requests, drafted


def test_a_drafter_that_never_proposes_anything_is_left_out():
    clock = Clock()
    drafter = TimedDrafter(lambda text: None, clock)
    propose = drafter.propose

    def propose_nothing(slots, max_nodes):
        clock.now += 5.0
        return propose(slots, max_nodes)

    drafter.propose = propose_nothing
    decode(drafter, clock, tokens=1000)
    assert len(drafter.calls) < 100


@pytest.mark.parametrize("script", [wrong_chain, wrong_tree])
@pytest.mark.parametrize("per_row", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("draft_seconds", [0.0, 5.0])
def test_a_drafter_that_is_always_wrong_is_left_out(script, per_row, draft_seconds):
    clock = Clock()
    drafter = TimedDrafter(script, clock, draft_seconds)
    engine, _, drafted = decode(drafter, clock, StepCost(20.0, per_row))
    assert engine.runner.forwards <= 1.1 * 300
    assert sum(drafted[50:]) < 0.5 * len(drafted[50:])
    assert sum(drafted[100:200]) < 0.5 * 100 > sum(drafted[200:])
    # a step without drafts does not even ask
    assert len(drafter.calls) < 0.5 * 300
    if draft_seconds:
        assert len(drafter.calls) < 0.05 * 300
        assert clock.now <= 1.03 * 300 * (20.0 + per_row)


def test_probes_of_many_short_requests_are_few_where_rows_are_dear():
    """16 slots, each with a new request every 40 steps."""
    drafter = TimedDrafter(wrong_tree, clock := Clock())
    engine = simulated_engine(drafter, clock, StepCost(5.0, 2.0), max_slots=16)
    params = SamplingParams(max_tokens=40, temperature=0)
    for i in range(64):
        engine.add(engine.make_request([i % 40 + 1], params))
    drafted = []
    while engine.has_work:
        before = engine.stats.drafted
        engine.step()
        drafted.append(engine.stats.drafted - before)
    assert len(drafted) == 160 and sum(drafted[50:]) < 0.05 * 16 * len(drafted[50:])


def test_probes_that_rows_are_too_dear_for_end():
    """Not even a node that is sure pays where 16 roots have used up the cheap rows."""
    drafter = TimedDrafter(wrong_chain, clock := Clock(), 4.0)
    cost = StepCost(5.0, 0.2, ((12.0, 1.2),))
    decode(drafter, clock, cost, tokens=150, slots=16, max_slots=16)
    assert len(drafter.calls) < 0.1 * 150
    assert clock.now < 1.05 * 150 * cost(16)


def test_what_is_free_may_go_on_for_long_in_a_crowd():
    clock = Clock()
    drafter = TimedDrafter(right(depth=24), clock)
    _, requests, _ = decode(drafter, clock, StepCost(20.0, 0.01), slots=2)
    assert all(request.speculation.acceptance_length > 15 for request in requests)


@pytest.mark.parametrize("slots", [1, 8])
def test_what_could_never_pay_for_its_row_is_not_asked_for(slots):
    """A node brings at most what it is worth, and its row costs what the other rows earn in its time."""
    drafter = TimedDrafter(right(), clock := Clock())
    engine, _, _ = decode(drafter, clock, COST, tokens=20, slots=slots, max_slots=8)
    line = engine.step_cost
    assert 0 < drafter.least_node < slots * line.per_row / line(slots)
    decode(drafter := TimedDrafter(right(), clock := Clock()), clock, auto=False, tokens=20)
    assert drafter.least_node == 0


def test_a_fixed_budget_is_fixed():
    clock = Clock()
    _, [request], _ = decode(TimedDrafter(wrong_chain, clock), clock, auto=False, tokens=100)
    # all but the last tokens, whose trees are cut to what could still be used
    assert request.speculation.drafted >= 4 * 95


@pytest.mark.parametrize("draft_seconds", [0.0, 3.0, 10.0])
def test_it_returns_when_the_text_becomes_predictable(draft_seconds):
    clock = Clock()
    drafter = TimedDrafter(lambda text: right()(text) if len(text) > 200 else wrong_chain(text), clock, draft_seconds)
    _, [request], _ = decode(drafter, clock, tokens=500)
    stats = request.speculation
    # 200 steps for the first half; for the rest a wait of at most 64 more, and then 3 to 5 tokens a step
    assert stats.steps < 200 + 64 + 300 / 3
    assert stats.accepted > 0.6 * 300


def test_one_text_that_cannot_be_drafted_does_not_spoil_the_others():
    for draft_seconds in (0.0, 3.0):
        clock = Clock()
        drafter = TimedDrafter(lambda t: wrong_chain(t) if t[0] == 1 else right()(t), clock, draft_seconds)
        _, (bad, *good), _ = decode(drafter, clock, slots=4, tokens=200)
        assert bad.speculation.drafted < 120
        assert all(request.speculation.acceptance_length > 4.5 for request in good)


@pytest.mark.parametrize(
    ("share", "draft_seconds", "depths"),
    [(0.97, 1.0, (3, 4)), (0.7, 6.0, (0.9, 2.5)), (0.3, 12.0, (0, 0.2))],
)
def test_the_depth_follows_the_costs(share, draft_seconds, depths):
    clock = Clock()
    _, [request], _ = decode(TimedDrafter(right(share=share), clock, draft_seconds), clock, tokens=400)
    low, high = depths
    assert low <= request.speculation.drafted / request.speculation.steps <= high
    assert clock.now < 1.03 * 400 * COST(1), "slower than without"


@pytest.mark.parametrize(
    ("per_row", "draft_seconds", "low", "high"), [(1.5, 6.0, 3, 4), (4.0, 0.0, 3, 4), (3.0, 8.0, 1, 6)]
)
def test_load_that_swings_does_not_thrash(per_row, draft_seconds, low, high):
    """Slots come and go every other step, around the number for which drafting pays."""

    def throughput(auto, drafts):
        clock = Clock()
        drafter = TimedDrafter(right(share=0.6), clock, draft_seconds) if drafts else NoDrafter()
        engine = simulated_engine(drafter, clock, StepCost(20.0, per_row), auto=auto, max_slots=high)

        def add(count):
            requests = [engine.make_request([1], SamplingParams(max_tokens=2000, temperature=0)) for _ in range(count)]
            for request in requests:
                engine.add(request)
            return requests

        stay, guests, tokens, times = add(low), [], 0, []
        for step in range(128):
            if step % 8 == 0:
                guests = add(high - low)
            elif step % 8 == 4:
                for request in guests:
                    engine.abort(request)
            begin = clock.now
            tokens += sum(len(event.tokens) for event in engine.step())
            times.append(clock.now - begin)
        for request in stay:
            assert request.output == [(2 + i) % 50 for i in range(request.num_output)]
        assert max(times) <= 3 * statistics.median(times)
        return tokens / clock.now

    off, always, auto = throughput(True, False), throughput(False, True), throughput(True, True)
    assert auto >= 0.95 * off and auto >= 0.9 * max(off, always)


@pytest.mark.parametrize(
    ("cost", "draft_seconds"),
    [(StepCost(20.0, 20.0), 2.0), (StepCost(20.0, 6.0, ((12.0, 6.0),)), 8.0), (StepCost(20.0, 6.0), 0.0)],
)
def test_drafts_come_back_when_a_crowd_has_left(cost, draft_seconds):
    """Among others rows are dear, and fewer drafts pay; alone again a request is at once drafted for as before."""
    clock = Clock()
    drafter = TimedDrafter(right(share=0.9), clock, draft_seconds)
    engine = simulated_engine(drafter, clock, cost, max_slots=12)

    def add(count):
        requests = [engine.make_request([1], SamplingParams(max_tokens=1500, temperature=0)) for _ in range(count)]
        for request in requests:
            engine.add(request)
        engine.step()
        return requests

    def tokens_per_slot_and_step():
        tokens = seats = 0
        for _ in range(40):
            seats += len(engine.scheduler.running)
            tokens += sum(len(event.tokens) for event in engine.step())
        return tokens / seats

    [request] = add(1)
    before = tokens_per_slot_and_step()
    guests = add(11)
    among = tokens_per_slot_and_step()
    for guest in guests:
        engine.abort(guest)
    after = tokens_per_slot_and_step()
    assert among - 1 < 0.5 * (before - 1), "the crowd was to make drafting dear"
    assert after > 0.85 * before > 2
    assert request.output == [(2 + i) % 50 for i in range(request.num_output)]


@pytest.mark.parametrize("per_row", [6.0, 12.0, 20.0])
def test_a_crowd_loses_little_by_a_drafter_that_hardly_pays(per_row):
    """Twelve slots, where a node that comes true nine times in ten just pays for its row, and drafting for none."""
    clock, cost = Clock(), StepCost(20.0, per_row)
    decode(TimedDrafter(right(share=0.9), clock, 8.0), clock, cost, slots=12, max_slots=12)
    assert clock.now <= 1.06 * 300 * cost(12)


def test_a_member_that_does_not_pay_is_left_out_of_a_union(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(union, "time", SimpleNamespace(perf_counter=clock))
    good, bad = TimedDrafter(right(), clock, 0.0, "good"), TimedDrafter(wrong_chain, clock, 8.0, "bad")
    engine, [request], _ = decode(UnionDrafter([good, bad]), clock, tokens=400)
    assert len(bad.calls) < 0.2 * len(good.calls)
    assert request.speculation.acceptance_length > 4
    counts = engine.stats.drafters
    assert sum(counts["good"].accepted.values()) == request.speculation.accepted
    assert not any(counts["bad"].accepted.values())


def test_requests_that_differ_in_their_wishes_share_a_step():
    clock = Clock()
    engine = simulated_engine(TimedDrafter(right(), clock), clock, COST)
    wishes = [{}, {"enabled": False}, {"max_nodes": 3}, {"drafters": ()}, {"drafters": ("scripted",)}]
    params = [SamplingParams(max_tokens=60, temperature=0, speculation=SpeculationParams(**w)) for w in wishes]
    requests = run(engine, [[3]] * len(params), params)
    assert len({tuple(request.output) for request in requests}) == 1
    plain = [request.speculation.drafted == 0 for request in requests]
    assert plain == [False, True, False, True, False]
    assert requests[2].speculation.acceptance_length <= 3


# ------------------------------------------------------------------------------------------------------------- costs


def test_the_running_cost_finds_the_line():
    rng = random.Random(1)
    cost = RunningCost(StepCost(10.0, 1.0))
    for step in range(600):
        rows = rng.randrange(1, 33)
        base = 20.0 + step / 100  # contexts grow
        hiccup = 10.0 if rng.random() < 0.02 else 1.0
        cost.observe(rows, 1, (base + 0.3 * rows) * rng.uniform(0.9, 1.1) * hiccup)
    assert cost.line.per_row == pytest.approx(0.3, abs=0.12)
    assert cost.line.base == pytest.approx(26.0, rel=0.1)


def test_the_running_cost_keeps_its_bends_while_the_machine_slows_down():
    rng = random.Random(4)
    start = StepCost(10.0, 0.5, ((8.0, 1.0),))
    cost = RunningCost(start)
    for _ in range(600):
        rows = rng.randrange(1, 25)
        cost.observe(rows, 1, 1.5 * start(rows) * rng.uniform(0.95, 1.05))
    assert [cost.line(n) for n in (1, 8, 24)] == pytest.approx([1.5 * start(n) for n in (1, 8, 24)], rel=0.1)


def test_a_machine_that_becomes_faster_does_not_make_rows_free():
    """Steps of many rows take half as long at once, the bends follow by and by: something is left for the rest."""
    start, rng = StepCost(8.0, 0.01, ((4.0, 1.0),)), random.Random(1)
    cost = RunningCost(start)
    for step in range(120):
        rows = rng.choice([1, 8, 40, 56])
        cost.observe(rows, 1, start(rows) * (1.0 if step < 40 else 0.4))
        assert cost.line(1) > 0.05 * start(1)
    assert cost.line(1) == pytest.approx(0.4 * start(1), rel=0.35)


def test_steps_that_are_all_alike_keep_the_slope_of_the_start():
    cost = RunningCost(StepCost(20.0, 0.5))
    for _ in range(300):
        cost.observe(8, 8, 2 * (20.0 + 0.5 * 8))  # a machine that others use: twice as slow
    assert cost.line.per_row == pytest.approx(1.0, rel=0.05) and cost.line.base == pytest.approx(40.0, rel=0.05)


def test_more_slots_are_not_dearer_rows():
    """Every slot brings its own context: 5 seconds each, and 0.1 a row."""
    cost, rng = RunningCost(StepCost(20.0, 0.1)), random.Random(2)
    for step in range(400):
        slots = 1 + step // 20 % 4
        rows = slots * rng.randrange(1, 9)
        cost.observe(rows, slots, 15.0 + 5 * slots + 0.1 * rows)
    assert cost.line.per_row == pytest.approx(0.1, abs=0.05)


@pytest.mark.parametrize("bends", [(), ((4.0, 1.0),)])
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 8), st.floats(1e-6, 1e3)), max_size=40))
def test_whatever_is_observed_a_step_costs_something(bends, steps):
    cost = RunningCost(StepCost(1.0, 0.1, bends))
    for rows, slots, seconds in steps:
        cost.observe(rows, slots, seconds)
        assert cost.line.base >= 0 and cost.line.per_row >= 0 and 0 < cost.line(1) <= cost.line(64) < math.inf


def test_a_tree_costs_what_steps_with_trees_take_more():
    cost = TreeCost()
    before = cost.per_slot
    for _ in range(50):
        cost.observe(8, 8, 30.0)  # nothing to compare it with
    assert cost.per_slot == before
    for step in range(400):
        context = step * 1e-6
        cost.observe(8, 0, context + 1e-3)
        cost.observe(8, 4, context + 1e-3 + 4 * 2e-4 + (0.5 if step % 50 == 49 else 0.0))
        cost.observe(2, 2, 9.0)  # of another crowd
    assert cost.per_slot == pytest.approx(2e-4, rel=0.15)
    for _ in range(1000):
        cost.observe(8, 4, 8.0)  # longer contexts by then
    assert cost.per_slot < 4e-4


def test_what_trees_cost_by_themselves_is_not_the_rows():
    cost, rng = RunningCost(StepCost(10.0, 0.3)), random.Random(0)
    for step in range(600):
        trees = step % 20 >= 10
        rows = 8 + trees * rng.randint(1, 12)
        cost.observe(rows, 8, 10.0 + 0.3 * rows + 1.5 * trees, trees)
    assert cost.line.per_row == pytest.approx(0.3, rel=0.05)


def test_the_cost_of_drafting_forgets_its_first_call():
    cost = DraftCost()
    assert cost(1) == 0 and not cost.settled
    cost.observe(1, 4, 400.0)
    cost.observe(1, 4, 8.0)
    assert cost(1) == 2.0 and cost(1, 4) == 8.0  # as long as one depth was seen, every layer costs the same
    for _ in range(80):
        cost.observe(1, 2, 6.0)
    assert cost(1, 2) == pytest.approx(6.0) and cost(8, 2) == cost(1, 2) and cost.settled
    assert [cost(1, depth) for depth in (1, 3, 6)] == pytest.approx([4.5, 7.0, 10.0])  # the first is dearer
    cost.observe(8, 1, 9.0)
    assert cost(8) == 9.0 and cost(1) == pytest.approx(4.5)


def test_text_that_had_to_be_read_first_does_not_make_drafting_dearer():
    cost = DraftCost()
    for _ in range(3):
        cost.observe(1, 2, 4.0)
    cost.observe(1, 2, 50.0, steady=False)
    assert cost(1, 2) == 4.0
    cost.observe(1, 2, 3.0, steady=False)
    assert cost(1, 2) == 3.0


# ------------------------------------------------------------------------------------------------------- calibration


def tree_of(*probabilities):
    n = len(probabilities)
    values = [0.0]
    for p in probabilities:
        values.append(values[-1] + (math.log(p) if p else -math.inf))
    return DraftTree(tuple(range(n + 1)), tuple(range(-1, n)), tuple(values))


@given(st.lists(st.tuples(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 5)), max_size=30))
def test_corrected_values_fall_along_a_path(steps):
    calibration, slot = Calibration(), Ratio(0.97)
    for probabilities, accepted in steps:
        tree = tree_of(*probabilities)
        sources = [("a",)] * len(tree)
        values = calibration.values(tree, sources, slot)
        assert values[0] == 0 and all(b <= a for a, b in pairwise(values))
        count = min(accepted, len(probabilities))
        tokens = (*range(1, count + 1), 99)
        calibration.learn(tree, sources, Acceptance(tuple(range(count + 1)), tokens), slot)


def test_a_boastful_drafter_is_corrected_and_another_is_not():
    calibration, slot, other = Calibration(), Ratio(0.97), Ratio(0.97)
    rng, tree = random.Random(0), tree_of(0.9)
    for _ in range(400):
        hit = rng.random() < 0.3
        taken = Acceptance((0, 1), (1, 5)) if hit else Acceptance((0,), (7,))
        calibration.learn(tree, [(), ("boast",)], taken, slot)
    assert math.exp(calibration.values(tree, [(), ("boast",)], other)[1]) == pytest.approx(0.3, abs=0.1)
    assert calibration.values(tree, [(), ("other",)], other)[1] == pytest.approx(math.log(0.9))


def test_outcomes_follow_what_proposals_come_to():
    outcome = Outcome()
    assert outcome.totals() == [(0, 0), (0.6, 1), (pytest.approx(0.96), 2)]
    for _ in range(200):
        outcome.learn([(0.9, 2), (0.5, 1)], 2, others=0.25, beside=3)
    assert outcome.others == pytest.approx(0.25, rel=1e-3) and outcome.beside == pytest.approx(3, rel=1e-3)
    tokens, nodes = zip(*outcome.totals(), strict=True)
    assert tokens == pytest.approx((0, 0.9, 1.4, 1.7), abs=0.01) and nodes == pytest.approx((0, 2, 3, 4), abs=0.01)
    for _ in range(200):  # where it is asked for two layers and brings one, the second is worth nothing
        outcome.learn([(0.9, 2)], 2, others=0.25, beside=3)
    assert outcome.totals()[2] == pytest.approx((0.9, 2), abs=0.01)
    for _ in range(200):  # where it is not asked for a second, that is tried again some day
        outcome.learn([(0.9, 2)], 1, others=0.25, beside=3)
    assert outcome.totals()[2][0] == pytest.approx(0.9 + 0.81, abs=0.03)


@pytest.mark.parametrize("draft", ["ngram", "itself", "other", "wrong"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_the_same_whatever_the_budget_does(draft, temperature):
    """On real numerics; the clock is erratic, so that the decisions are."""
    rng = random.Random(7)
    now = 0.0

    def clock():
        nonlocal now
        now += rng.choice([0.001, 0.02, 0.3])
        return now

    params = [SamplingParams(max_tokens=40, temperature=temperature, seed=i) for i in range(3)]
    prompts = [[5, 6, 7, 5, 6, 7, 5], [9], [100, 101, 102] * 5]
    plain = [r.output for r in run(tiny_engine(), prompts, params)]
    assert [r.output for r in run(tiny_engine(draft, step_cost=COST, clock=clock), prompts, params)] == plain

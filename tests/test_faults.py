"""A fault in one request ends that request and nobody else's (failure cases e15, i4, i5, i6)."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minispec.containment import STAGES, EngineFailed
from minispec.costs import StepCost
from minispec.drafting import MAX_FAILURES
from minispec.engine import Engine
from minispec.faults import Faults
from minispec.request import FinishReason, Request, SamplingParams
from scripted import ScriptedDrafter, pools, scripted_engine, table
from tiny_engine import VOCAB as TINY_VOCAB
from tiny_engine import tiny_engine

VOCAB = 32
ENDING = ("prefill", "forward", "sample", "commit", "detokenise")
"""Stages whose faults end a request; a draft is not needed."""


def counting(prefix):
    return (prefix[-1] + len(prefix) % 3 + 1) % 29


def solo(prompt, count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(counting(text))
    return text[len(prompt) :]


def draft(prefix):
    """A branch that comes true for three tokens, and a wrong one."""
    right = solo(prefix, 3)
    return [*right, 30], [0, 1, 2, 0]


def make(**more) -> tuple[Engine, Faults]:
    engine = scripted_engine(table(counting, VOCAB), VOCAB, ScriptedDrafter(draft), max_slots=4, **more)
    engine.on_stage = faults = Faults()
    return engine, faults


def add(engine: Engine, prompts, **params) -> list[Request]:
    requests = [
        engine.make_request(prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **params}))
        for prompt in prompts
    ]
    for request in requests:
        engine.add(request)
    return requests


def finish(engine: Engine) -> dict[Request, list]:
    """Step to the end with the invariants checked; the steps' events by request."""
    events: dict[Request, list] = {}
    for _ in range(2000):
        if not engine.has_work:
            break
        for event in engine.step():
            events.setdefault(event.request, []).append(event)
        engine.check()
    assert not engine.has_work
    for request, own in events.items():
        last = [] if request.finish_reason is FinishReason.ABORT else [True]  # that one is abort's to return
        assert [event.finish_reason is not None for event in own] == [False] * (len(own) - len(last)) + last
    assert all(pool.free + getattr(pool, "cached", 0) == pool.total for pool in pools(engine))
    return events


def alive(engine: Engine) -> None:
    """The next ordinary request is served as ever."""
    [request] = add(engine, [[9, 8, 7]])
    finish(engine)
    assert request.output == solo([9, 8, 7], 20) and request.finish_reason is FinishReason.LENGTH


PROMPTS = [[1, 2, 3], [4, 5], [6] * 9, [7]]


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("stage", ENDING)
@pytest.mark.parametrize("culprit", range(4))
def test_a_fault_ends_its_request_alone(stage, after, culprit):
    engine, faults = make(max_step_tokens=12)
    requests = add(engine, PROMPTS)
    faults.plan(stage, RuntimeError("boom"), requests[culprit], after=0 if stage == "prefill" else after)
    events = finish(engine)
    for i, request in enumerate(requests):
        expected = solo(PROMPTS[i], 20)
        if i == culprit:
            assert request.finish_reason is FinishReason.ERROR
            assert request.output == expected[: request.num_output] and request.num_output < 20
            assert events[request][-1].finish_reason is FinishReason.ERROR
            assert stage in request.error and "boom" not in request.error
        else:
            assert request.output == expected and request.finish_reason is FinishReason.LENGTH
            assert [token for event in events[request] for token in event.tokens] == expected
    assert engine.stats.errors == {**dict.fromkeys(STAGES, 0), stage: 1}
    assert engine.stats.finished == {**dict.fromkeys(map(str, FinishReason), 0), "length": 3, "error": 1}
    assert sorted(map(id, engine.drafter.begun)) == sorted(map(id, engine.drafter.ended))
    faults.plan(stage, RuntimeError("again"), requests[culprit])  # it is gone: nothing comes of it
    alive(engine)


@pytest.mark.parametrize("stage", ["prefill", "forward", "sample", "commit"])
def test_what_passes_is_tried_again_and_nobody_notices(stage):
    engine, faults = make()
    requests = add(engine, PROMPTS)
    faults.plan(stage, RuntimeError("boom"), times=1)
    finish(engine)
    assert [request.output for request in requests] == [solo(prompt, 20) for prompt in PROMPTS]
    assert not any(engine.stats.errors.values())


@pytest.mark.parametrize("culprits", [{0, 3}, {1, 2}, {0, 1, 2}])
def test_several_culprits(culprits):
    engine, faults = make()
    requests = add(engine, PROMPTS)
    for i in culprits:
        faults.plan("sample", ValueError("boom"), requests[i], after=3)
    finish(engine)
    failed = {i for i, request in enumerate(requests) if request.finish_reason is FinishReason.ERROR}
    assert failed == culprits and engine.stats.errors["sample"] == len(culprits)
    alive(engine)


def test_a_tree_that_cannot_be_verified_is_left_out():
    engine, _ = make()
    forward = engine.runner.forward

    def without_trees(spans, **more):
        if any(span.ancestors for span in spans):
            raise RuntimeError("no trees here")
        return forward(spans, **more)

    engine.runner.forward = without_trees
    [request] = add(engine, [[1, 2]])
    finish(engine)
    assert request.output == solo([1, 2], 20) and engine.stats.drafted == 0
    engine.runner.forward = forward
    alive(engine)
    assert engine.stats.accepted > 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_chunk_too_large_for_memory_is_read_in_smaller_ones(error):
    engine, _ = make(max_step_tokens=32, pages=100)
    sizes = []
    forward = engine.runner.forward

    def limited(spans, **more):
        rows = sum(len(span.tokens) for span in spans)
        if rows > 10:
            raise error
        sizes.append(rows)
        return forward(spans, **more)

    engine.runner.forward = limited
    long, short = [1 + i % 20 for i in range(90)], [5, 6]
    requests = add(engine, [long, short])
    finish(engine)
    assert [request.output for request in requests] == [solo(long, 20), solo(short, 20)]
    assert max(sizes) > 2 and not any(engine.stats.errors.values())


def test_no_memory_at_all_for_one_request():
    engine, faults = make()
    requests = add(engine, PROMPTS)
    faults.plan("prefill", torch.OutOfMemoryError("CUDA out of memory"), requests[2])
    finish(engine)
    assert requests[2].finish_reason is FinishReason.ERROR and "memory" in requests[2].error
    assert all(requests[i].output == solo(PROMPTS[i], 20) for i in (0, 1, 3))
    alive(engine)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("whole_row", [True, False])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "top_p": 0.9, "seed": 1}]
)
def test_logits_that_are_not_finite(value, whole_row, sampling):
    """Row 1 of 3 breaks at its fourth token, in a step with drafts; the others go on; so does its prompt later."""
    if value == float("-inf") and not whole_row:
        return  # as good as a token that is ruled out
    broken = True
    prompts = PROMPTS[:3]
    certain = table(counting, VOCAB)

    def logits(prefix):
        row = certain(prefix)
        if broken and prefix[:2] == (4, 5) and len(prefix) >= 2 + 4:
            row = [value] * VOCAB if whole_row else [value, *row[1:]]
        return row

    engine = scripted_engine(logits, VOCAB, ScriptedDrafter(draft), max_slots=4)
    requests = add(engine, prompts, **sampling)
    finish(engine)
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert requests[0].output == solo(prompts[0], 20) and requests[2].output == solo(prompts[2], 20)
    # the tokens found before the broken row, in the same verification, are not trusted
    assert requests[1].output == solo(prompts[1], 20)[: requests[1].num_output] and requests[1].num_output <= 4
    assert "not finite" in requests[1].error and engine.stats.errors["sample"] == 1
    broken = False
    [again] = add(engine, [prompts[1]])
    finish(engine)
    assert again.output == solo(prompts[1], 20) and again.cached_tokens == 0


def test_a_drafter_that_fails_for_one_request_is_not_asked_for_it_again():
    engine, faults = make()
    requests = add(engine, PROMPTS)
    faults.plan("draft", RuntimeError("boom"), requests[1], after=1)  # the first is its begin
    finish(engine)
    assert [request.output for request in requests] == [solo(prompt, 20) for prompt in PROMPTS]
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * 4
    assert requests[1].speculation.drafted == 0 and all(requests[i].speculation.accepted > 5 for i in (0, 2, 3))
    assert engine.stats.errors["draft"] == 1 and not engine.drafting_off
    alive(engine)


@pytest.mark.parametrize("method", ["begin", "propose", "sources", "accept", "end"])
def test_a_drafter_that_always_fails(method, caplog):
    engine, _ = make()

    def broken(*args):
        raise ZeroDivisionError("drafter")

    setattr(engine.drafter, method, broken)
    prompts = [[i, i + 1] for i in range(MAX_FAILURES + 4)]
    requests = add(engine, prompts)
    finish(engine)
    assert [request.output for request in requests] == [solo(prompt, 20) for prompt in prompts]
    assert engine.stats.errors["draft"] >= 4 and engine.stats.finished["error"] == 0
    if method != "propose":
        return
    for i in range(MAX_FAILURES):  # one more each: nothing else is known of whose fault it is
        [last] = add(engine, [[i]])
        finish(engine)
        assert last.output == solo([i], 20)
    assert engine.drafting_off and "switched off" in caplog.text
    before = engine.stats.errors["draft"]
    alive(engine)
    assert engine.stats.errors["draft"] == before, "it is not asked any more"


def test_everything_failing_is_fatal_only_if_nothing_can_be_computed():
    engine, faults = make()
    for prompt in PROMPTS:  # one after the other, each alone in its step
        [request] = add(engine, [prompt])
        faults.plan("forward", RuntimeError("boom"), request)
        finish(engine)
        assert request.finish_reason is FinishReason.ERROR
    alive(engine)

    def dead(spans, **more):
        raise RuntimeError("device lost")

    engine.runner.forward = dead
    add(engine, PROMPTS)
    with pytest.raises(EngineFailed, match="device lost"):
        finish(engine)


def test_broken_weights_are_fatal():
    engine = scripted_engine(lambda prefix: [float("nan")] * VOCAB, VOCAB)
    [request] = add(engine, [[1]])
    with pytest.raises(EngineFailed, match="not finite"):
        engine.step()
    assert request.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("stage", ["schedule", "draft", "prefill", "forward", "sample", "commit"])
def test_an_abort_in_the_middle_of_a_step(stage):
    engine, faults = make()
    requests = add(engine, PROMPTS)
    aborted = []

    def abort():
        for _ in range(2):  # the second finds nothing to do
            aborted.append(engine.abort(requests[1]))

    faults.plan(
        stage, abort, None if stage == "schedule" else requests[1], after=2 if stage != "prefill" else 0, times=1
    )
    finish(engine)
    assert aborted[0].finish_reason is FinishReason.ABORT and aborted[1] is None
    for i in (0, 2, 3):
        assert requests[i].output == solo(PROMPTS[i], 20)
    assert engine.stats.finished["abort"] == 1 and engine.stats.finished["length"] == 3
    alive(engine)


def test_an_abort_of_the_only_request_while_it_is_drafted_for():
    engine, faults = make(step_cost=StepCost(1.0, 0.1))
    [request] = add(engine, [[1]])
    faults.plan("draft", lambda: engine.abort(request), after=3, times=1)
    finish(engine)
    assert request.finish_reason is FinishReason.ABORT and 0 < request.num_output < 20
    alive(engine)


def test_an_abort_while_preempted_and_in_the_step_that_ends_it():
    engine, _ = make(pages=12, page_size=4, max_context=48)
    requests = add(engine, [[i] * 8 for i in range(1, 5)], max_tokens=30)
    preempted = None
    while preempted is None:
        engine.step()
        preempted = next((request for request in engine.scheduler.waiting if request.preemptions), None)
    assert engine.abort(preempted).finish_reason is FinishReason.ABORT and engine.abort(preempted) is None
    finish(engine)
    for request in requests:
        if request is not preempted:
            assert request.output == solo(request.prompt, 30)
            assert engine.abort(request) is None  # it has ended
    assert engine.abort(engine.make_request([1], SamplingParams())) is not None  # never added: ended, no harm
    alive(engine)


FAULTS = st.tuples(
    st.sampled_from(("draft", *ENDING)),
    st.integers(0, 5),
    st.integers(0, 6),
    st.sampled_from([1, 2, 100]),
    st.sampled_from([RuntimeError("x"), MemoryError(), torch.OutOfMemoryError("x"), KeyError(1)]),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(FAULTS, max_size=5), st.integers(12, 40))
def test_any_faults_at_all(planned, pages):
    engine, faults = make(pages=pages, page_size=4, max_context=48, max_step_tokens=16)
    prompts = [[i + 1] * (1 + 3 * i) for i in range(6)]
    requests = add(engine, prompts)
    for stage, i, after, times, error in planned:
        faults.plan(stage, error, requests[i], after=after, times=times)
    finish(engine)
    marked = {i for stage, i, *_ in planned if stage != "draft"}
    for i, request in enumerate(requests):
        expected = solo(prompts[i], 20)
        assert request.output == expected[: request.num_output]
        assert request.finish_reason is FinishReason.LENGTH or i in marked
    assert engine.stats.finished["error"] == sum(r.finish_reason is FinishReason.ERROR for r in requests)
    alive(engine)


# ------------------------------------------------------------------------------------------------ with a real model


MIXED = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.7, "seed": 6, "top_p": 0.9})
TEXTS = [[(7 * i + 3 * j) % TINY_VOCAB for j in range(5 + 9 * i)] for i in range(3)]


@functools.cache
def tiny_solo(i: int) -> tuple[int, ...]:
    engine = tiny_engine()
    [request] = add(engine, [TEXTS[i]], max_tokens=12, **MIXED[i])
    finish(engine)
    return tuple(request.output)


@pytest.mark.parametrize(
    ("drafter", "stage"),
    [
        *((drafter, stage) for drafter in ("itself", "suffix+layers") for stage in STAGES[:-1]),
        ("eagle3", "sample"),
        ("eagle3", "draft"),
        ("medusa+ngram", "commit"),
    ],
)
def test_neighbours_of_a_fault_on_a_real_model(drafter, stage):
    engine = tiny_engine(drafter, max_step_tokens=24)
    engine.on_stage = faults = Faults()
    requests = [request for i in range(3) for request in add(engine, [TEXTS[i]], max_tokens=12, **MIXED[i])]
    faults.plan(stage, RuntimeError("boom"), requests[1], after=1 if stage == "prefill" else 3)
    finish(engine)
    failed = [] if stage == "draft" else [1]
    for i, request in enumerate(requests):
        if i in failed:
            assert request.finish_reason is FinishReason.ERROR
        else:
            assert tuple(request.output) == tiny_solo(i)
    assert engine.stats.errors[stage] == 1 and engine.stats.accepted <= engine.stats.drafted
    engine.on_stage = None
    for i in range(3):
        [again] = add(engine, [TEXTS[i]], max_tokens=12, **MIXED[i])
        finish(engine)
        assert tuple(again.output) == tiny_solo(i)


def test_drafts_survive_a_failed_neighbour():
    """What the drafter knows of the others is not spoilt: a model that drafts for itself stays right about them."""
    engine = tiny_engine("itself", depth=4, width=1)
    engine.on_stage = faults = Faults()
    requests = add(engine, [TEXTS[0], TEXTS[1]], max_tokens=12, temperature=0.0)
    faults.plan("commit", RuntimeError("boom"), requests[1], after=1)
    finish(engine)
    assert requests[1].finish_reason is FinishReason.ERROR and tuple(requests[0].output) == tiny_solo(0)
    counts = requests[0].speculation
    assert counts.drafted - counts.accepted <= 4, "only the last step, which the length cuts, may waste drafts"

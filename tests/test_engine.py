"""Control flow of the step loop, with a scripted target: no weights, every branch reachable."""

from __future__ import annotations

import random

import pytest

from minispec.drafters.base import NoDrafter
from minispec.errors import RequestError
from minispec.request import FinishReason, SamplingParams, SpeculationParams
from scripted import ScriptedDrafter, chain, generate, run, scripted_engine, table

EOS = 30
VOCAB = 32


def counting(prefix):
    """The target continues 3 with 4, 4 with 5, …"""
    return (prefix[-1] + 1) % 29


def test_plain_decoding():
    engine = scripted_engine(table(counting, VOCAB), VOCAB)
    request = generate(engine, [3], max_tokens=5)
    assert request.output == [4, 5, 6, 7, 8]
    assert request.finish_reason is FinishReason.LENGTH
    assert request.speculation.drafted == 0


@pytest.mark.parametrize("depth", [1, 2, 4, 7])
@pytest.mark.parametrize("wrong_at", range(8))
def test_a_mismatch_at_every_index(depth, wrong_at):
    def draft(text):
        tokens = [(text[-1] + 1 + i) % 29 for i in range(depth)]
        if wrong_at < depth:
            tokens[wrong_at] = 31
        return chain(tokens)

    drafter = ScriptedDrafter(draft)
    engine = scripted_engine(table(counting, VOCAB), VOCAB, drafter)
    request = generate(engine, [3, 4, 5], max_tokens=40)
    assert request.output == [(6 + i) % 29 for i in range(40)]
    right = min(depth, wrong_at)
    # the first token comes from the prompt; all but the last verification accept what was right
    assert all(len(path) == right + 1 for path in drafter.accepted)
    assert request.speculation.steps == -(-39 // (right + 1))
    assert engine.runner.forwards == request.speculation.steps + 1


def test_branches_and_late_siblings():
    """The right branch is scattered over the tree: nodes 2, 5 and 6."""

    def draft(text):
        t = text[-1]
        right = [(t + 1 + i) % 29 for i in range(3)]
        return [31, right[0], 28, 31, right[1], right[2]], [0, 0, 1, 2, 2, 5]

    drafter = ScriptedDrafter(draft)
    engine = scripted_engine(table(counting, VOCAB), VOCAB, drafter, page_size=1, pages=200)
    request = generate(engine, [3, 4], max_tokens=17)
    assert request.output == [(5 + i) % 29 for i in range(17)]
    assert drafter.accepted[0] == (0, 2, 5, 6)


@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("eos_at", range(1, 10))
def test_eos_at_every_index_of_a_run(depth, eos_at):
    def target(prefix):
        return EOS if len(prefix) == 3 + eos_at else counting(prefix)

    def draft(text):
        return chain([EOS if len(text) + i == 3 + eos_at else (text[-1] + 1 + i) % 29 for i in range(depth)])

    off = generate(scripted_engine(table(target, VOCAB), VOCAB, eos_ids=frozenset({EOS})), [1, 2, 3], max_tokens=20)
    on = generate(
        scripted_engine(table(target, VOCAB), VOCAB, ScriptedDrafter(draft), eos_ids=frozenset({EOS})),
        [1, 2, 3],
        max_tokens=20,
    )
    assert on.output == off.output and on.output[-1] == EOS and on.output.count(EOS) == 1
    assert on.finish_reason is off.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("run_of_tokens", "expected", "reason"),
    [
        ([5, 1, EOS, 8, 8, 8, 8], [5, 1, EOS], FinishReason.STOP),
        ([5, 1, 8, 8, 8, EOS, 8], [5, 1, 8, 8], FinishReason.LENGTH),
        ([5, 1, 8, EOS, 8, 8, 8], [5, 1, 8, EOS], FinishReason.STOP),
    ],
)
def test_stop_and_length_in_one_run(run_of_tokens, expected, reason):
    whole = (2, 9, *run_of_tokens)  # 9 comes from the prompt's row, then the run in one verification

    def target(prefix):
        return whole[len(prefix)] if len(prefix) < len(whole) else 0

    drafter = ScriptedDrafter(lambda text: chain(whole[len(text) :]))
    engine = scripted_engine(table(target, VOCAB), VOCAB, drafter, eos_ids=frozenset({EOS}))
    request = generate(engine, [2], max_tokens=5)
    assert request.output == [9, *expected]
    assert request.finish_reason is reason
    assert request.speculation.emitted == len(expected) and request.speculation.steps == 1
    assert engine.stats.generated_tokens == 1 + len(expected)


def test_ignore_eos_runs_on():
    engine = scripted_engine(
        table(lambda p: EOS, VOCAB), VOCAB, ScriptedDrafter(lambda t: chain([EOS] * 3)), eos_ids=frozenset({EOS, 7})
    )
    request = generate(engine, [1], max_tokens=10, ignore_eos=True)
    assert request.output == [EOS] * 10 and request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", range(1, 8))
def test_exactly_max_tokens_are_delivered(depth):
    rng = random.Random(depth)

    def draft(text):
        tokens = [(text[-1] + 1 + i) % 29 for i in range(depth)]
        tokens[rng.randrange(depth)] = rng.choice([31, tokens[0]])
        return chain(tokens)

    for max_tokens in range(1, 21):
        engine = scripted_engine(table(counting, VOCAB), VOCAB, ScriptedDrafter(draft))
        request = generate(engine, [3], max_tokens=max_tokens)
        assert request.output == [(4 + i) % 29 for i in range(max_tokens)]


def test_one_token_needs_no_draft():
    drafter = ScriptedDrafter(lambda text: pytest.fail("asked for a draft"))
    engine = scripted_engine(table(counting, VOCAB), VOCAB, drafter)
    assert generate(engine, [3, 4, 5], max_tokens=1).output == [6]
    assert engine.runner.forwards == 1


def test_the_drafters_end_of_sequence_does_not_end_the_request():
    engine = scripted_engine(
        table(counting, VOCAB), VOCAB, ScriptedDrafter(lambda t: chain([counting(t), EOS, 3])), eos_ids=frozenset({EOS})
    )
    request = generate(engine, [3], max_tokens=12)
    assert request.output == list(range(4, 16)) and request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("prompt_length", range(58, 64))
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_nothing_goes_past_the_context_limit(prompt_length, page_size):
    """A wide 16-node tree near the limit: exactly the room is filled, whatever the page size."""

    def draft(text):
        right = [(text[-1] + 1 + i) % 29 for i in range(8)]
        return [*right, *[31] * 7], [*range(8), *range(1, 8)]

    for limit in (64, 65):
        engine = scripted_engine(
            table(counting, VOCAB),
            VOCAB,
            ScriptedDrafter(draft),
            max_context=limit,
            page_size=page_size,
            pages=-(-limit // page_size),
        )
        request = generate(engine, [i % 29 for i in range(prompt_length)], max_tokens=10_000, ignore_eos=True)
        assert request.output == [(prompt_length + i) % 29 for i in range(limit - prompt_length)]
        assert request.finish_reason is FinishReason.LENGTH


def test_a_prompt_that_cannot_fit_is_refused_with_both_numbers():
    engine = scripted_engine(table(counting, VOCAB), VOCAB, max_context=64)
    for length in (64, 65, 10_000):
        with pytest.raises(RequestError, match=rf"64 tokens; the prompt has {length} tokens") as caught:
            engine.make_request([1] * length, SamplingParams())
        assert caught.value.code == "context_length_exceeded"
    small = scripted_engine(table(counting, VOCAB), VOCAB, max_context=512, pages=40)
    with pytest.raises(RequestError, match=r"holds 160 tokens .*limit is 512.* the prompt has 200"):
        small.make_request([1] * 200, SamplingParams())
    request = generate(small, [1] * 100, max_tokens=400)
    assert request.num_output == 60 and request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [2**63], [True], [1.0], ["a", 1], [None]])
def test_unusable_prompts_are_refused(prompt):
    engine = scripted_engine(table(counting, VOCAB), VOCAB)
    with pytest.raises(RequestError) as caught:
        engine.make_request(prompt, SamplingParams())
    assert caught.value.param == "prompt"
    assert not engine.has_work


def test_the_first_token_comes_before_the_first_draft():
    order = []

    def target(prefix):
        order.append("target")
        return counting(prefix)

    def draft(text):
        order.append("draft")
        return chain([counting(text)])

    generate(scripted_engine(table(target, VOCAB), VOCAB, ScriptedDrafter(draft)), [3, 4], max_tokens=4)
    assert order[:2] == ["target", "draft"]


def test_long_prompts_are_read_in_chunks_beside_running_streams():
    engine = scripted_engine(table(counting, VOCAB), VOCAB, max_step_tokens=16, pages=200, max_context=400)
    stream = engine.make_request([3], SamplingParams(max_tokens=60, temperature=0))
    engine.add(stream)
    engine.step()
    long = engine.make_request([i % 29 for i in range(300)], SamplingParams(max_tokens=4, temperature=0))
    short = engine.make_request([7, 8], SamplingParams(max_tokens=4, temperature=0))
    engine.add(long)
    engine.add(short)
    for step in range(1, 20):
        before = stream.num_output
        engine.step()
        engine.check()
        assert stream.num_output == before + 1, "the stream stalled"
        if step == 3:
            assert short.num_output > 0, "the short newcomer waits behind the long prompt"
    while engine.has_work:
        engine.step()
    assert max(engine.runner.rows) <= 16
    assert long.output == [(299 + 1 + i) % 29 for i in range(4)]


def test_prefill_of_many_long_prompts_stays_within_the_step():
    engine = scripted_engine(table(counting, VOCAB), VOCAB, max_step_tokens=32, max_slots=9, pages=600, max_context=300)
    params = SamplingParams(max_tokens=5, temperature=0)
    run(engine, [[3] * 2] + [[4] * 200] * 8, [params] * 9)
    assert max(engine.runner.rows) <= 32


def test_requests_wait_for_slots_in_order():
    engine = scripted_engine(table(counting, VOCAB), VOCAB, max_slots=2)
    requests = [engine.make_request([3], SamplingParams(max_tokens=3 + i, temperature=0)) for i in range(6)]
    for request in requests:
        engine.add(request)
    finished = []
    while engine.has_work:
        finished += [event.request for event in engine.step() if event.finish_reason]
        assert len(engine.scheduler.running) <= 2
        engine.check()
    assert finished == requests


@pytest.mark.parametrize("page_size", [1, 4])
def test_preempted_requests_neither_lose_nor_repeat_tokens(page_size):
    """The pool holds one and a half requests: the younger gives way and comes back."""

    def draft(text):
        return chain([counting(text), (text[-1] + 2) % 29, 31])

    drafter = ScriptedDrafter(draft)
    engine = scripted_engine(
        table(counting, VOCAB), VOCAB, drafter, pages=96 // page_size, page_size=page_size, max_context=80
    )
    params = SamplingParams(max_tokens=60, temperature=0)
    requests = [engine.make_request([3, 4, 5], params), engine.make_request([7, 8], params)]
    streamed = {request: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            streamed[event.request] += event.tokens
        engine.check()
    assert engine.stats.preemptions >= 1
    assert all(request.preemptions <= 2 for request in requests)
    for request, first in zip(requests, (6, 9), strict=True):
        assert streamed[request] == request.output == [(first + i) % 29 for i in range(60)]
    assert sorted(map(id, drafter.begun)) == sorted(map(id, drafter.ended))


def test_abort_in_every_state():
    engine = scripted_engine(table(counting, VOCAB), VOCAB, max_slots=2, max_step_tokens=8)
    params = SamplingParams(max_tokens=30, temperature=0)
    decoding = engine.make_request([3], params)
    prefilling = engine.make_request([4] * 60, params)
    waiting = engine.make_request([5], params)
    for request in (decoding, prefilling, waiting):
        engine.add(request)
    engine.step()
    assert decoding.num_output == 1 and prefilling.num_output == 0 and len(engine.scheduler.waiting) == 1
    for request in (waiting, prefilling, decoding):
        event = engine.abort(request)
        assert event is not None and event.finish_reason is FinishReason.ABORT
        assert engine.abort(request) is None  # twice is harmless
        engine.check()
    assert not engine.has_work and engine.pool.owned == 0
    assert engine.stats.finished["abort"] == 3
    assert generate(engine, [3], max_tokens=3).output == [4, 5, 6]
    unknown = engine.make_request([3], params)
    assert engine.abort(unknown) is not None and unknown.finished


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_everything_comes_back_after_random_requests_and_aborts(page_size):
    rng = random.Random(page_size)

    def draft(text):
        n = rng.randrange(5)
        tokens = [(text[-1] + 1 + i) % 29 for i in range(n)]
        if n and rng.random() < 0.5:
            tokens[rng.randrange(n)] = 31
        return chain(tokens)

    engine = scripted_engine(
        table(counting, VOCAB),
        VOCAB,
        ScriptedDrafter(draft),
        max_slots=4,
        pages=160 // page_size,
        page_size=page_size,
        max_context=100,
        max_step_tokens=24,
    )
    alive, finished = [], []
    for _ in range(200):
        prompt = [rng.randrange(29) for _ in range(rng.randrange(1, 60))]
        request = engine.make_request(prompt, SamplingParams(max_tokens=rng.randrange(1, 40), temperature=0))
        engine.add(request)
        alive.append(request)
        for _ in range(rng.randrange(4)):
            engine.step()
            engine.check()
        if rng.random() < 0.3:
            engine.abort(rng.choice(alive))
            engine.check()
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.pool.owned == 0
    for request in alive:
        assert request.finished
        expected = [(request.prompt[-1] + 1 + i) % 29 for i in range(request.num_output)]
        assert request.output == expected
        if request.finish_reason is not FinishReason.ABORT:
            finished.append(request)
            assert request.num_output == min(request.params.max_tokens, 100 - len(request.prompt))
    assert len(finished) > 100


def test_counts_of_speculation():
    """Counters grow, accepted never exceeds drafted, and emitted is accepted + steps - truncated."""
    drafter = ScriptedDrafter(lambda text: chain([counting(text), (text[-1] + 2) % 29]))
    engine = scripted_engine(table(counting, VOCAB), VOCAB, drafter)
    request = generate(engine, [3], max_tokens=9)  # 1 + 3 + 3 + 2
    stats = request.speculation
    assert (stats.steps, stats.drafted, stats.accepted, stats.emitted) == (3, 5, 5, 8)
    assert stats.acceptance_length == pytest.approx(8 / 3)
    assert (
        generate(scripted_engine(table(counting, VOCAB), VOCAB), [3], max_tokens=1).speculation.acceptance_length
        is None
    )


def test_an_idle_engine_does_nothing():
    engine = scripted_engine(table(counting, VOCAB), VOCAB)
    assert engine.step() == [] and engine.runner.forwards == 0
    generate(engine, [3], max_tokens=5)
    forwards = engine.runner.forwards
    assert engine.step() == [] and engine.runner.forwards == forwards == 5


def test_steps_without_drafts_verify_one_row_per_slot():
    engine = scripted_engine(table(counting, VOCAB), VOCAB, NoDrafter())
    run(engine, [[3], [4], [5]], [SamplingParams(max_tokens=6, temperature=0)] * 3)
    assert engine.runner.rows == [3] * 6


def test_counters_by_drafter_and_depth():
    """They only grow, accepted never exceeds drafted, and they add up, aborts and preemptions included."""
    rng = random.Random(5)

    def draft(text):
        tokens = [(text[-1] + 1 + i) % 29 for i in range(rng.randrange(5))]
        if tokens and rng.random() < 0.5:
            tokens[rng.randrange(len(tokens))] = 31
        return chain(tokens)

    engine = scripted_engine(
        table(counting, VOCAB), VOCAB, ScriptedDrafter(draft), max_slots=4, pages=24, max_context=60
    )
    stats, before, requests = engine.stats, {}, []
    while len(requests) < 40 or engine.has_work:
        if len(requests) < 40:
            requests.append(engine.make_request([rng.randrange(29)] * 9, SamplingParams(max_tokens=30, temperature=0)))
            engine.add(requests[-1])
        if rng.random() < 0.05:
            engine.abort(rng.choice(requests))
        engine.step()
        if not stats.drafters:
            continue
        counts = stats.drafters["scripted"]
        now = {("d", k): n for k, n in counts.drafted.items()} | {("a", k): n for k, n in counts.accepted.items()}
        assert all(now[key] >= number for key, number in before.items())
        assert all(counts.accepted[depth] <= counts.drafted[depth] for depth in counts.drafted)
        assert sum(counts.drafted.values()) == stats.drafted and sum(counts.accepted.values()) == stats.accepted
        assert counts.steps <= stats.verifications
        before = now
    assert stats.preemptions and stats.accepted
    for request in requests:
        counts = request.speculation
        # what a verification emits is what it accepts and a bonus, which the end of the text may cut off
        assert (
            counts.accepted + counts.steps - 1 <= counts.emitted <= counts.accepted + counts.steps or not counts.steps
        )


def test_nothing_behind_the_end_counts_as_accepted():
    text = [5, EOS, 7, 7, 7]
    script = {(3,): 9, (3, 9): 5, (3, 9, 5): EOS, (3, 9, 5, EOS): 7, (3, 9, 5, EOS, 7): 7, (3, 9, 5, EOS, 7, 7): 7}
    engine = scripted_engine(
        table(lambda prefix: script.get(prefix, 7), VOCAB),
        VOCAB,
        ScriptedDrafter(lambda prefix: chain(text)),
        eos_ids=frozenset({EOS}),
    )
    request = generate(engine, [3], max_tokens=20, speculation=SpeculationParams(trace=True))
    assert request.output == [9, 5, EOS]
    assert request.speculation.emitted == 2 and request.speculation.accepted == 2
    assert engine.stats.drafters["scripted"].accepted == {1: 1, 2: 1, 3: 0, 4: 0, 5: 0}
    [step] = request.trace
    assert step.tokens == (9, *text) and step.accepted == (0, 1, 2) and step.bonus is None


def test_a_trace_is_kept_if_wanted_and_bounded(monkeypatch):
    def traced(**params):
        engine = scripted_engine(
            table(counting, VOCAB), VOCAB, ScriptedDrafter(lambda text: chain([counting(text), 31]))
        )
        return generate(engine, [3], max_tokens=21, **params)

    assert traced().trace == []
    request = traced(speculation=SpeculationParams(trace=True))
    assert len(request.trace) == request.speculation.steps == 10
    tokens = [request.tokens[1]]
    for step in request.trace:
        assert step.tokens[0] == tokens[-1] and step.accepted[0] == 0
        tokens += [*(step.tokens[node] for node in step.accepted[1:]), step.bonus]
    assert tokens == request.output
    monkeypatch.setattr("minispec.request.MAX_TRACE_NODES", 8)
    assert len(traced(speculation=SpeculationParams(trace=True)).trace) == 2


def test_an_unknown_drafter_is_refused():
    engine = scripted_engine(table(counting, VOCAB), VOCAB, ScriptedDrafter(lambda text: None))
    with pytest.raises(RequestError, match="no drafter 'ngram' here; loaded: scripted") as caught:
        engine.make_request([3], SamplingParams(speculation=SpeculationParams(drafters=("scripted", "ngram"))))
    assert caught.value.param == "speculation.drafters"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("enabled", 1),
        ("max_nodes", 0),
        ("max_nodes", 257),
        ("max_nodes", True),
        ("drafters", "x"),
        ("drafters", (1,)),
        ("trace", None),
    ],
)
def test_wishes_that_make_no_sense(field, value):
    with pytest.raises(RequestError) as caught:
        SpeculationParams(**{field: value})
    assert caught.value.param == f"speculation.{field}"

"""Where memory and context end: no position beyond them, no token lost or repeated, nobody kept waiting for ever."""

from __future__ import annotations

import math

import pytest

from minispec.drafters.ngram import NgramDrafter
from minispec.errors import RequestError
from minispec.request import FinishReason, SamplingParams
from scripted import ScriptedDrafter, ScriptedRunner, generate, run, scripted_engine, table
from tiny_engine import VOCAB as TINY_VOCAB
from tiny_engine import tiny_engine

VOCAB = 32


def counting(prefix):
    return (prefix[-1] + 1) % 29


def wide_and_deep(text):
    """Fifteen nodes, all of the right branch among them."""
    right = [(text[-1] + 1 + i) % 29 for i in range(8)]
    return [*right, *[31] * 7], [*range(8), *range(1, 8)]


@pytest.mark.parametrize("limit", [63, 64, 65])
def test_positions_behind_the_last_page_are_not_touched(limit):
    """Three rows of trees up to the very end; the cache has a page more than the pool, which stays as it was."""
    pages = 3 * -(-limit // 16)
    engine = scripted_engine(
        table(counting, VOCAB), VOCAB, ScriptedDrafter(wide_and_deep), pages=pages, page_size=16, max_context=limit
    )
    engine.runner = ScriptedRunner(table(counting, VOCAB), VOCAB, pages=pages + 1, page_size=16)
    engine.scheduler._copy = engine.runner.kv.copy
    prompts = [[i % 29 for i in range(limit - left)] for left in (6, 3, 1)]
    params = SamplingParams(max_tokens=10_000, temperature=0, ignore_eos=True)
    for request, prompt in zip(run(engine, prompts, [params] * 3), prompts, strict=True):
        assert request.output == [(len(prompt) + i) % 29 for i in range(limit - len(prompt))]
        assert request.finish_reason is FinishReason.LENGTH
    assert engine.runner.kv.k[0, 0, pages * 16 :].isnan().all()


def test_what_can_never_fit_is_refused_and_holds_nobody_up():
    engine = scripted_engine(table(counting, VOCAB), VOCAB, pages=40, page_size=4, max_context=512)
    with pytest.raises(RequestError, match=r"holds 160 tokens .* the prompt has 200") as caught:
        engine.make_request([1] * 200, SamplingParams())
    assert caught.value.status == 400
    assert generate(engine, [3], max_tokens=2).output == [4, 5]
    long = generate(engine, [1] * 100, max_tokens=400)
    assert long.num_output == 60 and long.finish_reason is FinishReason.LENGTH


def test_prompts_are_read_while_many_streams_run():
    """Eight streams with large trees leave a prompt its share of every step."""
    drafter = ScriptedDrafter(wide_and_deep)
    engine = scripted_engine(
        table(counting, VOCAB),
        VOCAB,
        drafter,
        max_slots=9,
        pages=600,
        max_context=300,
        max_step_tokens=32,
        tree_budget=32,
    )
    params = SamplingParams(max_tokens=250, temperature=0)
    streams = [engine.make_request([n], params) for n in range(8)]
    for stream in streams:
        engine.add(stream)
    engine.step()
    newcomer = engine.make_request([i % 29 for i in range(160)], SamplingParams(max_tokens=1, temperature=0))
    engine.add(newcomer)
    for _ in range(math.ceil(160 / 16)):
        before = [stream.num_output for stream in streams]
        engine.step()
        assert all(stream.num_output > past for stream, past in zip(streams, before, strict=True))
    assert newcomer.finished and max(engine.runner.rows) <= 32


def test_admission_goes_on_whatever_is_aborted():
    """Running and waiting requests leave at random; the queue is served in order and never freezes."""
    engine = scripted_engine(
        table(counting, VOCAB), VOCAB, NgramDrafter(), max_slots=2, pages=12, page_size=4, max_context=40
    )
    params = SamplingParams(max_tokens=3, temperature=0)
    for i in range(200):
        batch = [engine.make_request([i % 29] * 20, params) for _ in range(4)]
        for request in batch:
            engine.add(request)
        engine.step()
        for request in list(engine.scheduler.waiting)[i % 2 :]:
            engine.abort(request)
        while engine.has_work:
            engine.step()
        assert {request.finish_reason for request in batch[:2]} == {FinishReason.LENGTH}
    engine.check()


@pytest.mark.parametrize("draft", ["none", "ngram", "itself"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_request_keeps_its_history(draft, prefix_cache):
    """Penalties, min_tokens and the seed go by what was generated, also after it was computed again."""
    params = [
        SamplingParams(max_tokens=48, min_tokens=20, seed=3 + n, frequency_penalty=1.0, logprobs=2) for n in range(2)
    ]
    prompts = [[(5 * i + n) % TINY_VOCAB for i in range(20)] for n in range(2)]
    alone = [run(tiny_engine("none"), [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    engine = tiny_engine(
        draft, page_size=4, pages=24, max_slots=2, max_context=80, tree_budget=8, prefix_cache=prefix_cache
    )
    requests = [engine.make_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    streamed = {request: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            streamed[event.request] += event.tokens
        engine.check()
    assert engine.stats.preemptions >= 1
    for request, other in zip(requests, alone, strict=True):
        assert streamed[request] == request.output == other.output
        assert len(request.logprobs) == len(other.logprobs) == 48

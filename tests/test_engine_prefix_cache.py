"""Prompts that begin as earlier texts do: less is computed, the text is the same, for target and drafts."""

from __future__ import annotations

import pytest
import torch

from minispec.prefix_cache import PrefixCache
from minispec.request import FinishReason, SamplingParams, SpeculationParams
from scripted import ScriptedDrafter, chain, generate, run, scripted_engine, table
from tiny_engine import VOCAB as TINY_VOCAB
from tiny_engine import tiny_engine

VOCAB = 32
PAGE = 4


def target(prefix):
    return (prefix[-1] + 1 + sum(prefix) % 3) % 29


def engine(drafter=None, **settings):
    return scripted_engine(table(target, VOCAB), VOCAB, drafter, **{"page_size": PAGE, "pages": 64, **settings})


def solo(prompt, max_tokens):
    return generate(engine(prefix_cache=False), prompt, max_tokens=max_tokens).output


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed + 5 * i) % 29 for i in range(length)]


@pytest.fixture(params=[True, False], ids=["in place", "gathered"])
def serving(request):
    """An engine as on a CPU, and one as on a GPU."""
    made = engine()
    if not request.param:
        made.scheduler._copy = None
    return made


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 16])
def test_a_prompt_that_was_read_is_not_read_again_but_for_its_end(serving, length):
    first = generate(serving, prompt(length), max_tokens=2)
    serving.runner.rows.clear()
    again = generate(serving, prompt(length), max_tokens=2)
    assert again.output == first.output == solo(prompt(length), 2)
    cached = (length - 1) // PAGE * PAGE
    assert (first.cached_tokens, again.cached_tokens) == (0, cached)
    assert serving.runner.rows == [length - cached, 1]  # the last token's row gives the next
    stats = serving.stats
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.prompt_tokens) == (2 * length, cached, 2 * length)


def test_a_conversation_goes_on_where_it_was(serving):
    """What was generated is remembered too, up to the last full page."""
    text = prompt(6)
    for turn in range(4):
        answer = generate(serving, text, max_tokens=9)
        assert answer.output == solo(text, 9)
        # the last token of an answer was never computed
        assert answer.cached_tokens == ((len(text) - 3 - 1) // PAGE * PAGE if turn else 0)
        text = [*answer.tokens, *prompt(3, turn)]


def test_what_an_aborted_request_has_read_is_kept(serving):
    """A client that leaves, and one that comes at once with the same prompt and more."""
    text = prompt(20)
    request = serving.make_request(text, SamplingParams(max_tokens=50, temperature=0))
    serving.add(request)
    serving.step()
    serving.abort(request)
    follower = generate(serving, [*text, 7, 8], max_tokens=8)
    assert follower.output == solo([*text, 7, 8], 8)
    assert 0 < follower.cached_tokens <= len(text)
    assert serving.pool.owned == 0


def test_a_running_text_may_be_joined(serving):
    text = prompt(21)
    params = SamplingParams(max_tokens=30, temperature=0)
    first = serving.make_request(text, params)
    serving.add(first)
    for _ in range(3):
        serving.step()
    others = [serving.make_request([*text[:17], n], params) for n in range(3)]
    for other in others:
        serving.add(other)
    while serving.has_work:
        serving.step()
        serving.check()
    assert [other.cached_tokens for other in others] == [16] * 3
    for request in (first, *others):
        assert request.output == solo(request.prompt, 30)


def test_contexts_stay_in_consecutive_pages_where_those_are_read_in_place():
    serving = engine(pages=200, max_slots=4)
    text, params = prompt(30), SamplingParams(max_tokens=40, temperature=0)
    for n in range(8):
        serving.add(serving.make_request([*text, n], params))
        serving.step()
        serving.step()
        for slot in serving.scheduler.running:
            assert slot.pages == list(range(slot.pages[0], slot.pages[0] + len(slot.pages)))
    while serving.has_work:
        serving.step()
        serving.check()
        for slot in serving.scheduler.running:
            assert slot.pages == list(range(slot.pages[0], slot.pages[0] + len(slot.pages)))


def test_pages_are_shared_elsewhere():
    serving = engine(pages=14, max_slots=4, max_context=50)
    serving.scheduler._copy = None
    text, params = prompt(33), SamplingParams(max_tokens=5, temperature=0)
    generate(serving, text, max_tokens=1)
    requests = [serving.make_request([*text, n], params) for n in range(3)]
    for request in requests:
        serving.add(request)
    serving.step()
    # eight pages are one and the same for all three; without sharing only one of them would have found a place
    assert len(serving.scheduler.running) == 3 and serving.pool.owned <= 14
    while serving.has_work:
        serving.step()
        serving.check()
    assert [request.output for request in requests] == [solo(request.prompt, 5) for request in requests]
    assert serving.stats.preemptions == 0


def test_a_preempted_request_finds_its_own_text_again():
    """Only what was evicted, and the last page, is computed again; nothing is lost or repeated."""
    rows = {}
    for remember in (True, False):
        serving = engine(
            pages=14, max_slots=2, max_context=56, max_step_tokens=64, tree_budget=4, prefix_cache=remember
        )
        params = SamplingParams(max_tokens=20, temperature=0)
        requests = run(serving, [prompt(24, 1), prompt(24, 2)], [params] * 2)
        assert serving.stats.preemptions >= 1
        assert [request.output for request in requests] == [solo(request.prompt, 20) for request in requests]
        assert all(request.cached_tokens == 0 for request in requests)  # which is about prompts of others
        rows[remember] = sum(serving.runner.rows)
    assert rows[True] < rows[False]


def test_many_prompts_through_a_small_pool():
    """Pages of finished texts make room for new ones, and an evicted text is not found again."""
    serving = engine(pages=20, max_slots=3, max_context=60)
    texts = [[n % 29, n // 29, *prompt(10, n)] for n in range(100)]
    params = SamplingParams(max_tokens=3, temperature=0)
    requests = run(serving, texts, [params] * 100)
    for request in requests:
        assert request.output == solo(request.prompt, 3)
    assert serving.pool.evictions > 100 and serving.pool.owned == 0
    assert serving.pool.free + serving.pool.cached == 20
    assert generate(serving, texts[99], max_tokens=3).cached_tokens > 0
    again = generate(serving, texts[0], max_tokens=3)
    assert again.cached_tokens == 0 and again.output == requests[0].output


def test_clashing_hashes_serve_nobody_anothers_text(monkeypatch):
    monkeypatch.setattr(PrefixCache, "_key", lambda *_: b"same")
    serving = engine(max_slots=3)
    texts = [prompt(4 + n, n % 5) for n in range(20)] * 2
    for request in run(serving, texts, [SamplingParams(max_tokens=5, temperature=0)] * 40):
        assert request.output == solo(request.prompt, 5)


def test_owners_and_switched_off_caches_have_no_hits():
    serving = engine()
    params = SamplingParams(max_tokens=2, temperature=0)
    for owner in ("one", "other", ""):
        request = serving.make_request(prompt(20), params, owner=owner)
        serving.add(request)
        while serving.has_work:
            serving.step()
        assert request.cached_tokens == 0
    off = engine(prefix_cache=False)
    for _ in range(2):
        assert generate(off, prompt(20), max_tokens=2).cached_tokens == 0
    assert off.pool.free == off.pool.total


def test_failed_requests_leave_nothing():
    serving = engine()
    request = serving.make_request(prompt(20), SamplingParams(max_tokens=9, temperature=0))
    serving.add(request)
    serving.step()
    serving.abort(request, FinishReason.ERROR, "broken")
    assert serving.pool.free == serving.pool.total
    assert generate(serving, prompt(20), max_tokens=3).cached_tokens == 0


@pytest.mark.parametrize("draft", ["itself", "small", "eagle1", "eagle3", "medusa", "layers"])
@pytest.mark.parametrize("length", [33, 40, 64])
def test_drafts_are_the_same_behind_a_hit(draft, length):
    """The draft's own cache, its hidden states, and the target's: every tree of the second run is that of the first."""
    text = [(7 * i + 3) % TINY_VOCAB for i in range(length)]
    serving = tiny_engine(draft, page_size=8, depth=3, width=3)
    traced = SpeculationParams(trace=True)
    first = generate(serving, text, max_tokens=40, speculation=traced)
    again = generate(serving, text, max_tokens=40, speculation=traced)
    assert again.output == first.output and again.cached_tokens > 0
    assert [(step.tokens, step.parents) for step in again.trace] == [
        (step.tokens, step.parents) for step in first.trace
    ]
    # and further on, where the answer is part of the prompt
    more = generate(serving, first.tokens, max_tokens=10)
    cold = generate(tiny_engine(draft, page_size=8, depth=3, width=3), first.tokens, max_tokens=10)
    assert more.output == cold.output and more.cached_tokens > length


def test_a_draft_that_is_the_target_is_always_right_behind_a_hit():
    serving = tiny_engine("itself", page_size=8, depth=4, width=1)
    text = [(7 * i + 3) % TINY_VOCAB for i in range(60)]
    for cached in (0, 56):
        request = generate(serving, text, max_tokens=41)
        stats = request.speculation
        assert request.cached_tokens == cached and (stats.steps, stats.drafted, stats.accepted) == (8, 32, 32)


def test_a_draft_model_does_not_read_a_prompt_twice():
    serving = tiny_engine("other", page_size=8)
    text = [(7 * i + 3) % TINY_VOCAB for i in range(100)]
    runner, rows = serving.drafter._runner, []
    forward = runner.forward
    runner.forward = lambda spans: rows.append(sum(len(span.tokens) for span in spans)) or forward(spans)
    generate(serving, text, max_tokens=4)
    assert max(rows) > 100
    rows.clear()
    generate(serving, text, max_tokens=4)
    assert max(rows) < 20


def test_a_head_that_has_seen_less_than_the_target_is_no_harm():
    """Requests without drafts leave the head without rows: a later one drafts from where the hit ends."""
    serving = tiny_engine("eagle3", page_size=8)
    text = [(7 * i + 3) % TINY_VOCAB for i in range(150)]
    plain = generate(serving, text, max_tokens=20, speculation=SpeculationParams(enabled=False))
    assert serving.drafter.reusable(plain, 144) == 144
    drafted = generate(serving, text, max_tokens=20)
    assert drafted.output == plain.output and drafted.cached_tokens == 144 and drafted.speculation.drafted > 0
    # a little less is computed again, so that the head misses nothing
    other = tiny_engine("eagle3", page_size=8)
    generate(other, text[:100], max_tokens=20)
    generate(other, text[:140], max_tokens=1)
    third = generate(other, text, max_tokens=20)
    assert third.output == plain.output and 88 <= third.cached_tokens < 136


def test_keys_and_values_are_those_of_a_text_read_alone():
    serving = tiny_engine("none", page_size=8, pages=40)
    text = [(11 * i + 5) % TINY_VOCAB for i in range(60)]
    generate(serving, text[:50], max_tokens=6)
    request = serving.make_request(text, SamplingParams(max_tokens=30, temperature=0))
    serving.add(request)
    for _ in range(12):
        serving.step()
    [slot] = serving.scheduler.running
    assert request.cached_tokens == 48 and slot.num_cached > 64
    alone = tiny_engine("none", page_size=8, pages=40, prefix_cache=False, max_step_tokens=300)
    generate(alone, request.tokens, max_tokens=1)
    kv, other = serving.runner.kv, alone.runner.kv
    places = [kv.kv_index(slot.pages, i) for i in range(slot.num_cached)]
    torch.testing.assert_close(kv.k[:, :, places], other.k[:, :, : slot.num_cached], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kv.v[:, :, places], other.v[:, :, : slot.num_cached], atol=1e-5, rtol=1e-5)


def test_spare_pages_of_trees_go_to_a_newcomer():
    """A running stream holds pages for large trees; they do not keep anybody waiting."""
    drafter = ScriptedDrafter(lambda text: chain([31] * 20))
    serving = engine(drafter, pages=10, max_context=40, tree_budget=24, max_slots=2)
    stream = serving.make_request(prompt(4), SamplingParams(max_tokens=12, temperature=0))
    serving.add(stream)
    serving.step()
    serving.step()
    assert serving.pool.available < 5
    newcomer = serving.make_request(prompt(19, 3), SamplingParams(max_tokens=2, temperature=0))
    serving.add(newcomer)
    serving.step()
    assert newcomer not in serving.scheduler.waiting and stream.preemptions == 0
    while serving.has_work:
        serving.step()
        serving.check()
    assert stream.output == solo(prompt(4), 12) and newcomer.output == solo(prompt(19, 3), 2)

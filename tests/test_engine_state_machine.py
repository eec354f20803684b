"""The whole engine under events in any order: admit, step, abort, fail, preempt, finish, hit the prefix cache.

After every step the invariants of slots, pages and what is remembered hold, the pages hold the text they are said to
hold, and every finished output equals the same request run alone by an engine without drafts and without a cache.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minispec.batch import Span
from minispec.drafters.ngram import NgramDrafter
from minispec.drafters.union import UnionDrafter
from minispec.engine import Engine
from minispec.request import FinishReason, Request, SamplingParams
from scripted import ScriptedDrafter, generate, pools, scripted_engine, table
from tiny_engine import tiny_engine

VOCAB = 32
PAGE = 4
ROOM = 48
OWNERS = ("", "", "somebody")
LENGTHS = (1, PAGE, PAGE + 1, 5 * PAGE - 1, 5 * PAGE, 6 * PAGE + 2, 34)


def target(prefix: tuple[int, ...]) -> int:
    """A text of ids below 29 that depends on every token before, and repeats itself at times."""
    return (prefix[-1] + 1 + sum(prefix) % 3 * (len(prefix) % 5 == 0)) % 29


@cache
def solo(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    engine = scripted_engine(
        table(target, VOCAB), VOCAB, pages=ROOM // PAGE, page_size=PAGE, max_context=ROOM, prefix_cache=False
    )
    return generate(engine, prompt, max_tokens=max_tokens).output


class Serving(RuleBasedStateMachine):
    """Events that are drawn in any order; subclasses say what engine serves."""

    engine: Engine
    max_prompt = 34

    def __init__(self) -> None:
        super().__init__()
        self.shape: list[tuple[int, bool]] = []
        self.streamed: dict[Request, list[int]] = {}
        self.alive: list[Request] = []
        self.texts: list[list[int]] = []

    def solo(self, request: Request) -> list[int]:
        raise NotImplementedError

    def check_contents(self) -> None:
        """What the cache holds of running and of remembered texts is what it should."""

    def prompt(self, first: int, length: int) -> list[int]:
        return [(first + 7 * i) % 29 for i in range(length)]

    def warm_up(self, lengths: list[int]) -> None:
        """Begin with texts that are finished and remembered."""
        for first, length in enumerate(lengths):
            self.add(self.prompt(first % 2, min(length, self.max_prompt)), 9, OWNERS[0])
        while self.engine.has_work:
            self.one_step()

    def add(self, prompt: list[int], max_tokens: int, owner: str) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        request = self.engine.make_request(prompt, params, owner=owner)
        self.engine.add(request)
        self.alive.append(request)
        self.streamed[request] = []

    # Few beginnings, so that texts have prefixes in common.
    @rule(
        first=st.integers(0, 1),
        length=st.sampled_from(LENGTHS),
        max_tokens=st.integers(1, 24),
        owner=st.sampled_from(OWNERS),
    )
    def add_new(self, first: int, length: int, max_tokens: int, owner: str) -> None:
        self.add(self.prompt(first, min(length, self.max_prompt)), max_tokens, owner)

    @precondition(lambda self: self.texts)
    @rule(
        which=st.integers(0, 100),
        keep=st.sampled_from([*LENGTHS, 100, 100]),
        tail=st.integers(0, 5),
        max_tokens=st.integers(1, 16),
        owner=st.sampled_from(OWNERS),
    )
    def add_continuation(self, which: int, keep: int, tail: int, max_tokens: int, owner: str) -> None:
        """A conversation goes on: an earlier text, or a part of it, and something new."""
        text = self.texts[which % len(self.texts)][:keep] + self.prompt(tail, tail)
        self.add(text[: self.max_prompt], max_tokens, owner)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 100), reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]))
    def end(self, which: int, reason: FinishReason) -> None:
        request = self.alive.pop(which % len(self.alive))
        event = self.engine.abort(request, reason)
        assert event is not None and event.finish_reason is reason and event.tokens == ()
        assert self.engine.abort(request) is None

    @precondition(lambda self: self.alive)
    @rule(shape=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=10), count=st.integers(1, 5))
    def step(self, shape: list[tuple[int, bool]], count: int) -> None:
        self.shape = shape
        for _ in range(count):
            if self.engine.has_work:
                self.one_step()

    def one_step(self) -> None:
        before = {slot: slot.request for slot in self.engine.scheduler.running}
        decoding = [slot for slot in before if slot.decoding]
        events = self.engine.step()
        self.engine.check()
        self.check_contents()
        advanced = [event.request for event in events]
        assert len(set(advanced)) == len(advanced)
        for slot in decoding:  # nobody is passed over: a stream advances with every step, or has given its seat up
            assert (slot.request in advanced) != (slot.request in self.engine.scheduler.waiting)
        for event in events:
            assert event.tokens and event.request in self.alive
            self.streamed[event.request] += event.tokens
            if event.finish_reason is not None:
                assert event.finish_reason is FinishReason.LENGTH
                self.alive.remove(event.request)
                self.finished(event.request)

    def finished(self, request: Request) -> None:
        assert request.output == self.solo(request) == self.streamed[request]
        self.texts.append(list(request.tokens))

    @invariant()
    def pages_and_seats_belong_to_the_running(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        seated = [slot.request for slot in self.engine.scheduler.running]
        assert sorted(map(id, [*seated, *self.engine.scheduler.waiting])) == sorted(map(id, self.alive))
        for pool in pools(self.engine):
            assert pool.free + pool.owned + pool.cached == pool.total
        stats = self.engine.stats
        assert stats.accepted <= stats.drafted and stats.prefix_hit_tokens <= stats.prefix_query_tokens
        for request in self.streamed:
            assert request.cached_tokens < len(request.prompt)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.has_work:
            self.one_step()
            steps += 1
            assert steps < 2000, "no progress"
        self.pages_and_seats_belong_to_the_running()
        assert self.alive == [] and all(pool.owned == 0 for pool in pools(self.engine))
        assert all(request.finished for request in self.streamed)


class ScriptedServing(Serving):
    """A scripted target, whose cache holds the tokens themselves, in a pool too small for all."""

    @initialize(
        in_place=st.booleans(),
        remember=st.integers(0, 3),
        draft=st.sampled_from(["scripted", "ngram", "both"]),
        pages=st.sampled_from([ROOM // PAGE, 14, 17, 24, 40]),
        slots=st.integers(1, 4),
        warm=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3),
    )
    def begin(self, in_place: bool, remember: int, draft: str, pages: int, slots: int, warm: list[int]) -> None:
        self.drafter = ScriptedDrafter(self.draft)
        drafters = {"scripted": [self.drafter], "ngram": [NgramDrafter()], "both": [self.drafter, NgramDrafter()]}
        members = drafters[draft]
        self.engine = scripted_engine(
            table(target, VOCAB),
            VOCAB,
            UnionDrafter(members) if len(members) > 1 else members[0],
            pages=pages,
            page_size=PAGE,
            max_context=ROOM,
            max_slots=slots,
            max_step_tokens=16,
            tree_budget=12,
            prefix_cache=bool(remember),
        )
        if not in_place:  # as on a GPU, where contexts lie in whatever pages there are
            self.engine.scheduler._copy = None
        self.warm_up(warm)

    def draft(self, text: tuple[int, ...]):
        """A tree of the drawn shape; a node carries what the target says after its path, or something else."""
        tokens, parents, paths = [text[-1]], [-1], [text]
        for parent, right in self.shape:
            parent %= len(tokens)
            token = target(paths[parent]) if right else 29 + len(tokens) % 3
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
                paths.append((*paths[parent], token))
        return tokens[1:], parents[1:]

    def solo(self, request: Request) -> list[int]:
        return solo(request.prompt, request.params.max_tokens)

    def one_step(self) -> None:
        super().one_step()
        assert max(self.engine.runner.rows, default=0) <= 16

    def check_contents(self) -> None:
        kv = self.engine.runner.kv
        tokens, positions = kv.k[0, 0, :, 0].tolist(), kv.v[0, 0, :, 0].tolist()
        for slot in self.engine.scheduler.running:
            places = [kv.kv_index(slot.pages, i) for i in range(slot.num_cached)]
            assert [tokens[at] for at in places] == slot.request.tokens[: slot.num_cached]
            assert [positions[at] for at in places] == list(range(slot.num_cached))
        if self.engine.pool.prefixes is not None:
            for page, node in self.engine.pool.prefixes._by_page.items():
                assert tuple(tokens[page * PAGE : (page + 1) * PAGE]) == node.tokens

    def teardown(self) -> None:
        super().teardown()
        # seats are first taken in the order of arrival, and every slot that drafting began with has ended
        order = list(dict.fromkeys(slot.request for slot in self.drafter.begun))
        assert order == sorted(order, key=list(self.streamed).index)
        assert sorted(map(id, self.drafter.begun)) == sorted(map(id, self.drafter.ended))


TINY = {"page_size": PAGE, "pages": 20, "max_slots": 3, "max_step_tokens": 24, "max_context": ROOM, "tree_budget": 12}


@cache
def tiny_solo(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    engine = tiny_engine("none", prefix_cache=False, **TINY)
    return generate(engine, prompt, max_tokens=max_tokens).output


class TinyServing(Serving):
    """Real numerics in float32: what is read from another's pages gives the same keys, values and text."""

    @initialize(
        draft=st.sampled_from(["none", "itself", "eagle1", "eagle3+ngram", "layers+small", "medusa"]),
        warm=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3),
    )
    def begin(self, draft: str, warm: list[int]) -> None:
        self.engine = tiny_engine(draft, depth=3, width=2, **TINY)
        self.fresh = tiny_engine("none", prefix_cache=False, **TINY).runner
        self.warm_up(warm)

    def solo(self, request: Request) -> list[int]:
        return tiny_solo(request.prompt, request.params.max_tokens)

    def finished(self, request: Request) -> None:
        super().finished(request)
        for slot in self.engine.scheduler.running:
            if slot.num_cached:
                self.fresh.forward([Span.chunk(slot.request.tokens[: slot.num_cached], range(20), 0, sample_last=True)])
                kv = self.engine.runner.kv
                places = [kv.kv_index(slot.pages, i) for i in range(slot.num_cached)]
                for own, again in ((kv.k, self.fresh.kv.k), (kv.v, self.fresh.kv.v)):
                    torch.testing.assert_close(own[:, :, places], again[:, :, : slot.num_cached], atol=1e-4, rtol=1e-4)

    def check_contents(self) -> None:
        for member in self.engine.drafter.members:
            if (states := getattr(member, "_states", None)) is not None and member._pool.total:
                member._pool.check([state.pages for state in states.values()])


COMMON = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}

TestScripted = ScriptedServing.TestCase
TestScripted.settings = settings(max_examples=80, stateful_step_count=25, **COMMON)

TestTiny = TinyServing.TestCase
TestTiny.settings = settings(max_examples=10, stateful_step_count=20, **COMMON)


class ScriptedServingLong(ScriptedServing):
    """The same, more of it."""


TestScriptedLong = pytest.mark.slow(ScriptedServingLong.TestCase)
TestScriptedLong.settings = settings(max_examples=500, stateful_step_count=40, **{**COMMON, "derandomize": False})

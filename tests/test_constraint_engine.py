"""Grammars in the engine: the text is of the language and does not depend on speculation, and some drafts are free."""

from __future__ import annotations

import json
from functools import cache

import jsonschema
import pytest

from minispec.constraint import OutputFormat
from minispec.guide import SOURCE
from minispec.request import FinishReason, Request, SamplingParams, SpeculationParams
from scripted import ScriptedDrafter, chain, generate, run, scripted_engine, table
from test_constraint import CHOICES, FORMATS, PERSON, tokenizer
from tiny_engine import DRAFTERS, tiny_engine
from tokenizers_fixture import EOS, IM_END

MODES = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "top_p": 0.97}}
WANTED = [*FORMATS.values(), OutputFormat("json_object"), None]
PLAIN = SpeculationParams(enabled=False)


def engine(draft: str = "none", **settings):
    return tiny_engine(draft, tokenizer=tokenizer("bytes"), eos_ids=frozenset({EOS, IM_END}), **settings)


def prompt(seed: int) -> list[int]:
    return [(37 * seed + 11 * i * i) % 256 for i in range(9 + 5 * seed)]


def params(seed: int, mode: str, **more) -> SamplingParams:
    return SamplingParams(**MODES[mode], seed=seed, output_format=WANTED[seed], max_tokens=50, **more)


@cache
def alone(seed: int, mode: str) -> Request:
    [request] = run(engine(), [prompt(seed)], [params(seed, mode, speculation=PLAIN)])
    assert request.speculation.drafted == 0
    return request


def same(request: Request, other: Request) -> bool:
    return (request.output, request.text, request.finish_reason) == (other.output, other.text, other.finish_reason)


@pytest.mark.parametrize(
    ("draft", "mode"),
    [*((draft, "sampled") for draft in DRAFTERS), *((d, "greedy") for d in ("none", "ngram", "eagle3"))],
)
def test_the_text_is_the_same_whoever_drafts(draft: str, mode: str) -> None:
    seeds = range(len(WANTED))
    own = engine(draft, max_slots=4, max_step_tokens=60)
    for seed, request in zip(
        seeds, run(own, list(map(prompt, seeds)), [params(seed, mode) for seed in seeds]), strict=True
    ):
        assert same(request, alone(seed, mode))
    grammar = own.stats.drafters[SOURCE]
    assert sum(grammar.drafted.values()) == sum(grammar.accepted.values()) > 10


@pytest.mark.parametrize("draft", ["none", "ngram", "small", "suffix+ngram", "medusa+eagle3+ngram"])
def test_the_text_is_the_same_after_preemptions(draft: str) -> None:
    seeds = [0, 5, 0, 5]  # the longest
    own = engine(draft, page_size=4, pages=26, max_slots=4, max_step_tokens=40)
    for seed, request in zip(
        seeds, run(own, list(map(prompt, seeds)), [params(seed, "sampled") for seed in seeds]), strict=True
    ):
        assert same(request, alone(seed, "sampled"))
    assert own.stats.preemptions > 0


@pytest.mark.parametrize("mode", MODES)
def test_texts_are_of_the_language(mode: str) -> None:
    texts = [alone(seed, mode) for seed in range(len(WANTED))]
    for request, wanted in zip(texts, WANTED, strict=True):
        if wanted == FORMATS["schema"] and request.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(request.text), PERSON)
        elif wanted == FORMATS["choice"]:
            assert request.text in CHOICES and request.finish_reason is FinishReason.STOP
        elif wanted == OutputFormat("json_object"):
            assert request.text.startswith("{")


def test_what_is_forced_costs_no_step_even_without_a_drafter() -> None:
    wanted = OutputFormat("json_schema", {"enum": ["this is the only one"]})
    for settings, steps in (({}, 1), ({"speculation": SpeculationParams(max_nodes=4)}, 6), ({"max_tokens": 9}, 1)):
        request = generate(engine(), prompt(0), output_format=wanted, **settings)
        length = settings.get("max_tokens", 22)
        assert request.text == '"this is the only one"'[:length]
        assert request.finish_reason is (FinishReason.STOP if length == 22 else FinishReason.LENGTH)
        counts = request.speculation
        assert (counts.steps, counts.drafted) == (steps, counts.accepted)
        assert counts.emitted == length - 1  # the first token waits for no draft
    assert generate(engine(), prompt(0), output_format=wanted, speculation=PLAIN).speculation.steps == 21


def test_forced_tokens_stay_within_the_budget() -> None:
    wanted = OutputFormat("json_schema", {"enum": ["this is the only one"]})
    own = engine(tree_budget=8, max_slots=3)
    requests = [
        own.make_request(prompt(i), SamplingParams(temperature=0.0, output_format=wanted, speculation=traced))
        for i, traced in enumerate([SpeculationParams(trace=True)] * 3)
    ]
    for request in requests:
        own.add(request)
    while own.has_work:
        rows = own.stats.forward_rows
        prefill = any(slot.num_cached == 0 for slot in own.scheduler.running) or not own.scheduler.running
        own.step()
        own.check()
        assert prefill or own.stats.forward_rows - rows <= 8
    assert all(request.text == '"this is the only one"' for request in requests)


def bytes_target(text: str):
    """A scripted target that would write ``text`` behind a prompt of one token."""
    return table(lambda prefix: [*text.encode(), EOS][min(len(prefix) - 1, len(text.encode()))], 300)


def scripted(text: str, drafter=None, **settings):
    return scripted_engine(
        bytes_target(text), 300, drafter, tokenizer=tokenizer("bytes"), eos_ids=frozenset({EOS}), **settings
    )


def test_drafts_that_the_grammar_forbids_are_not_verified() -> None:
    """The drafter is right about the target and wrong about the grammar, and then the other way round."""
    wanted = OutputFormat("regex", "a[bc]+d[ef]g")
    drafter = ScriptedDrafter(lambda text: chain(b"xyz") if len(text) < 4 else ([*b"bdz", EOS], [0, 0, 2, 2]))
    request = generate(
        scripted("abbdeg", drafter), [0], output_format=wanted, speculation=SpeculationParams(trace=True)
    )
    assert request.text == "abbdeg"
    assert [bytes(t for t in step.tokens[1:]) for step in request.trace] == [b"", b"", b"bd", b"g"]


def test_a_complete_text_ends_the_request_at_once() -> None:
    """Without a step for the end-of-sequence token, and also with ignore_eos and below min_tokens."""
    wanted = OutputFormat("choice", ["yes", "no"])
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 30, "max_tokens": 40}):
        request = generate(scripted("no, never"), [0], output_format=wanted, **more)
        assert (request.text, request.output) == ("no", [*b"no"])
        assert request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("more", "text", "reason"),
    [
        ({}, "aa", FinishReason.STOP),
        ({"min_tokens": 4}, "aaaa", FinishReason.STOP),
        ({"ignore_eos": True, "max_tokens": 9}, "aaaaaaaaa", FinishReason.LENGTH),
        ({"max_tokens": 1}, "a", FinishReason.LENGTH),
        ({"stop": ("a",)}, "", FinishReason.STOP),
    ],
)
@pytest.mark.parametrize("drafts", [b"", b"aaaa"])
def test_ends_of_a_text_that_may_go_on(more: dict, text: str, reason: FinishReason, drafts: bytes) -> None:
    own = scripted("aa", ScriptedDrafter(lambda _: chain([*drafts, EOS])))
    request = generate(own, [0], output_format=OutputFormat("regex", "a+"), **more)
    assert (request.text, request.finish_reason) == (text, reason)
    assert request.num_output == len(text.encode()) + (reason is FinishReason.STOP and bool(text)) + ("stop" in more)


@pytest.mark.parametrize("drafts", [b"", b"aaxx"])
def test_a_grammar_without_a_way_on_ends_its_own_request_only(drafts: bytes) -> None:
    wanted = OutputFormat("grammar", f'start: "aa" <[{IM_END}]>')  # leads to a control token, which is never allowed
    own = scripted("aab", ScriptedDrafter(lambda _: chain(drafts) if drafts else None), max_slots=2)
    stuck, free = run(
        own,
        [[0], [0]],
        [SamplingParams(temperature=0.0, output_format=wanted), SamplingParams(temperature=0.0, max_tokens=3)],
    )
    assert (stuck.text, stuck.finish_reason) == ("aa", FinishReason.ERROR)
    assert stuck.error is not None and "no token of this model can follow" in stuck.error
    assert (free.text, free.finish_reason) == ("aab", FinishReason.LENGTH)
    assert own.stats.finished["error"] == 1

"""Speculation changes nothing where everything that shapes a distribution comes together. Float32, real numerics."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor

from minispec.request import FinishReason, Request, SamplingParams
from minispec.tree import DraftTree
from scripted import pools
from tiny_engine import VOCAB, tiny_engine

DRAFTERS = ("itself", "eagle3", "wrong", "medusa+ngram")
EOS = 11


def residues_allow(total: int, token: int) -> bool:
    return total % 2 == 0 if token == EOS else token % 7 in (total % 7, (total + 3) % 7)


@cache
def residues_mask(total: int) -> Tensor:
    bits = sum(1 << token for token in range(VOCAB) if residues_allow(total, token))
    return torch.frombuffer(bytearray(bits.to_bytes(VOCAB // 8, "little")), dtype=torch.int32)


class Residues:
    """A made-up grammar: after a text whose ids sum to s come the ids of two residues of seven that s chooses; it may
    end where s is even. Keeps to the protocol of ``minispec.constraint.Constraint``."""

    done = False
    error: str | None = None

    def __init__(self) -> None:
        self.text: list[int] = []

    def masks(self, tree: DraftTree) -> Tensor:
        masks = []
        for node in range(len(tree)):
            total = sum(self.text) + sum(tree.tokens[i] for i in tree.path(node)[1:])
            masks.append(residues_mask(total % 14))
        return torch.stack(masks)

    def accept(self, token: int) -> bool:
        assert residues_allow(sum(self.text), token), "the grammar forbids this token"
        self.text.append(token)
        self.done = token == EOS
        return True

    def prune(self, tree: DraftTree) -> DraftTree:
        return tree

    def forced(self, limit: int) -> tuple[int, ...]:
        return ()


class Letters:
    """A decoder: one character per id."""

    def feed(self, token: int) -> str:
        return chr(0x100 + token)

    def finish(self) -> str:
        return ""


MIXES = [
    {"frequency_penalty": 0.8, "presence_penalty": 0.4, "logprobs": 3},
    {"repetition_penalty": 1.3, "logit_bias": {5: 3.0, 17: -100.0, EOS: 2.0}, "logprobs": 0, "prompt_logprobs": 2},
    {"min_tokens": 9, "stop_token_ids": (40, 41, 42), "logit_bias": {40: 12.0, EOS: 12.0}, "logprobs": 2},
    {"frequency_penalty": -0.5, "stop": tuple(chr(0x100 + i) for i in range(60, 70)), "min_tokens": 3, "logprobs": 20},
    {"grammar": True, "logprobs": 1},
    {"grammar": True, "min_tokens": 6, "presence_penalty": 1.0, "repetition_penalty": 0.8, "stop": "aĀ", "logprobs": 5},
    {"logprobs": 1},
    {},
]
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.9, "min_p": 0.02, "top_p": 0.97, "top_k": 60}
HOT = {"temperature": 1.3}


def make(engine, prompt, params: dict) -> Request:
    params = dict(params)
    grammar = params.pop("grammar", False)
    request = engine.make_request(prompt, SamplingParams(**params))
    request.decoder = Letters()
    request.constraint = Residues() if grammar else None
    return request


def drive(engine, requests, rng) -> None:
    pending = list(requests)
    while pending or engine.has_work:
        for _ in range(rng.randrange(4)):
            if pending:
                engine.add(pending.pop(0))
        for event in engine.step():
            assert len(event.logprobs) == (len(event.tokens) if event.request.params.logprobs is not None else 0)
        engine.check()
    assert all(pool.owned == 0 for pool in pools(engine))


def cases(mode: dict) -> list[tuple[tuple[int, ...], dict]]:
    """Each mix for two prompts, the first of them as choices 0 and 1 of the same seed."""
    rng = random.Random(7)
    found = []
    for i, mix in enumerate(MIXES):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 20))]
        for choice in range(2):
            params = SamplingParams(seed=100 * i).choice(choice)
            found.append((tuple(prompt * 2), {**mode, **mix, "seed": params.seed, "max_tokens": 24}))
    return found


@cache
def alone(mode: str) -> list[Request]:
    """The requests one by one, without speculation."""
    requests = []
    for prompt, params in cases(MODES[mode]):
        engine = tiny_engine("none", max_step_tokens=512, eos_ids=frozenset({EOS}))
        request = make(engine, prompt, params)
        drive(engine, [request], random.Random(0))
        requests.append(request)
    return requests


MODES = {"greedy": GREEDY, "sampled": SAMPLED, "hot": HOT}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draft", DRAFTERS)
def test_everything_together(draft, mode):
    engine = tiny_engine(draft, max_slots=6, max_step_tokens=60, eos_ids=frozenset({EOS}))
    requests = [make(engine, prompt, params) for prompt, params in cases(MODES[mode])]
    drive(engine, requests, random.Random(3))
    for request, expected in zip(requests, alone(mode), strict=True):
        assert request.output == expected.output
        assert (request.text, request.finish_reason) == (expected.text, expected.finish_reason)
        for ours, theirs in (
            (request.logprobs, expected.logprobs),
            (request.prompt_logprobs[1:], expected.prompt_logprobs[1:]),
        ):
            assert [entry.token for entry in ours] == [entry.token for entry in theirs]
            for entry, other in zip(ours, theirs, strict=True):
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [token for token, _ in entry.top] == [token for token, _ in other.top]
                assert [p for _, p in entry.top] == pytest.approx([p for _, p in other.top], abs=1e-4)


def test_the_cases_reach_what_they_are_there_for():
    """Ends by a stop string, a stop token, the grammar and the length; choices that differ."""
    ended = {(request.finish_reason, bool(request.params.stop)) for request in alone("hot") + alone("sampled")}
    assert {(FinishReason.STOP, True), (FinishReason.STOP, False), (FinishReason.LENGTH, False)} <= ended
    for first, second in zip(alone("hot")[::2], alone("hot")[1::2], strict=True):
        assert first.output != second.output
    for request in alone("sampled"):
        assert request.finish_reason is FinishReason.LENGTH or request.num_output > request.params.min_tokens
    assert any(request.output[-1] in (40, 41, 42) for request in alone("greedy") + alone("hot"))

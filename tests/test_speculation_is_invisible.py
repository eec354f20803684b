"""The headline: speculation changes how fast text comes, never the text. Float32, real numerics, every drafter."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from minispec.request import SamplingParams
from scripted import ScriptedDrafter, chain, generate, pools, run, scripted_engine
from tiny_engine import DRAFTERS, VOCAB, tiny_engine

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts; half of them repeat themselves, which gives n-gram lookup something to find."""
    rng = random.Random(seed)
    result = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 41))]
        result.append(prompt * 2 if i % 2 else prompt)
    return result


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """The same request alone, without speculation, prompt read in one piece."""
    return run(tiny_engine("none", max_step_tokens=512), [prompt], [params])[0].output


def params_for(count: int, mode: dict, max_tokens: int = 48) -> list[SamplingParams]:
    return [SamplingParams(**mode, max_tokens=max_tokens, seed=i) for i in range(count)]


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("draft", DRAFTERS)
def test_staggered_batches(draft, batch, mode):
    """Requests arrive at different steps and share every step with others at other stages."""
    count = max(batch, 3) if batch < 8 else 12
    texts, params = prompts(count), params_for(count, mode)
    engine = tiny_engine(draft, max_slots=batch, max_step_tokens=40)
    requests = [engine.make_request(text, one) for text, one in zip(texts, params, strict=True)]
    pending = list(requests)
    rng = random.Random(batch)
    while pending or engine.has_work:
        for _ in range(rng.randrange(3)):
            if pending:
                engine.add(pending.pop(0))
        engine.step()
        engine.check()
    assert all(pool.owned == 0 for pool in pools(engine))
    for request, text, one in zip(requests, texts, params, strict=True):
        assert request.output == alone(tuple(text), one)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2, 4, 7])
@pytest.mark.parametrize("draft", ["itself", "other", "layers"])
def test_every_shape_of_tree(draft, depth, width):
    texts = prompts(6, seed=1)
    for mode in (GREEDY, SAMPLED):
        params = params_for(6, mode)
        engine = tiny_engine(draft, depth=depth, width=width, max_slots=6)
        for request, text, one in zip(run(engine, texts, params), texts, params, strict=True):
            assert request.output == alone(tuple(text), one)


@pytest.mark.parametrize("draft", DRAFTERS)
def test_under_preemption_and_small_pages(draft):
    texts = prompts(6, seed=2)
    params = params_for(6, SAMPLED, max_tokens=60)
    engine = tiny_engine(draft, page_size=4, pages=70, max_slots=4, max_step_tokens=24)
    requests = run(engine, texts, params)
    assert engine.stats.preemptions > 0
    for request, text, one in zip(requests, texts, params, strict=True):
        assert request.output == alone(tuple(text), one)


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_prompts_around_a_page(draft, length):
    [text] = [[(7 * i + 3) % VOCAB for i in range(length)]]
    [one] = params_for(1, GREEDY, max_tokens=24)
    assert run(tiny_engine(draft), [text], [one])[0].output == alone(tuple(text), one)


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_target_drafting_for_itself_is_always_right(mode):
    """Every draft is accepted: chains of 4, so 5 tokens a step."""
    texts = prompts(5, seed=3)
    engine = tiny_engine("itself", depth=4, width=1, max_slots=5)
    for request in run(engine, texts, params_for(5, mode, max_tokens=101)):
        stats = request.speculation
        assert (stats.steps, stats.drafted, stats.accepted) == (20, 80, 80)


def test_mixed_requests_keep_to_themselves():
    """Greedy, seeded and unseeded neighbours: the first two are as alone, and the last two differ."""
    texts = prompts(4, seed=4)
    modes = [{**SAMPLED, "seed": 42}, {"temperature": 1.0}, GREEDY, {"temperature": 1.0}]
    params = [SamplingParams(**mode, max_tokens=40) for mode in modes]
    texts[3] = texts[1]
    requests = run(tiny_engine("other"), texts, params)
    assert requests[0].output == alone(tuple(texts[0]), params[0])
    assert requests[2].output == alone(tuple(texts[2]), params[2])
    assert requests[1].output != requests[3].output


@pytest.mark.parametrize("draft", ["none", "ngram+itself"])
def test_a_seed_is_a_text_whoever_comes_and_goes(draft):
    """Neighbours without a seed of their own arrive, end and are cut off in the middle."""
    [text] = prompts(1, seed=6)
    params = SamplingParams(temperature=1.0, seed=42, max_tokens=48)
    rng = random.Random(0)
    for neighbours in (0, 3, 7):
        engine = tiny_engine(draft, max_slots=8, max_step_tokens=40)
        request = engine.make_request(text, params)
        engine.add(request)
        guests, arrived = [], 0
        while engine.has_work:
            if arrived < neighbours and rng.random() < 0.5:
                arrived += 1
                guest = SamplingParams(temperature=rng.choice([0.0, 1.0, 2.0]), max_tokens=rng.randrange(1, 30))
                guests.append(engine.make_request([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))], guest))
                engine.add(guests[-1])
            if guests and rng.random() < 0.2:
                engine.abort(rng.choice(guests))
            engine.step()
            engine.check()
        assert request.output == alone(tuple(text), params)
        assert all(0 <= token < VOCAB for guest in guests for token in guest.output)
    other = SamplingParams(temperature=1.0, seed=43, max_tokens=48)
    assert alone(tuple(text), other) != alone(tuple(text), params)


def test_without_a_seed_every_text_is_another():
    """Whatever state the generators of the process are in: a restart begins with the same one."""
    flat = [0.0] * 64
    outputs = set()
    for _ in range(2):
        random.seed(0)
        torch.manual_seed(0)
        engine = scripted_engine(lambda prefix: flat, 64, ScriptedDrafter(lambda text: chain([7, 7])))
        outputs |= {tuple(generate(engine, [1], temperature=1.0, max_tokens=32).output) for _ in range(10)}
    assert len(outputs) == 20


def test_order_of_admission_does_not_matter():
    texts, params = prompts(8, seed=5), params_for(8, SAMPLED)
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    shuffled = run(tiny_engine("ngram"), [texts[i] for i in order], [params[i] for i in order])
    for i, request in zip(order, shuffled, strict=True):
        assert request.output == alone(tuple(texts[i]), params[i])

"""Deterministic mode: a token's numbers are the same bits alone, in company, in any tree, and read in any chunks."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minispec.batch import Span
from minispec.drafters.base import Drafter, NoDrafter
from minispec.drafters.ngram import NgramDrafter
from minispec.drafters.suffix import SuffixDrafter
from minispec.drafters.union import UnionDrafter
from minispec.engine import Engine
from minispec.kv_cache import PagePool
from minispec.model import fixed_attention
from minispec.model.config import ModelConfig
from minispec.model.llama import Llama
from minispec.request import SamplingParams
from minispec.runner import ModelRunner
from minispec.sampling import Noise
from scripted import ScriptedDrafter, run
from tiny_engine import always_wrong, poisoned_runner

VOCAB, PAGE = 512, 16
LENGTH = 330
TEXT = random.Random(7).choices(range(VOCAB), k=LENGTH)
"""Longer than two tiles of keys, so that chunks and trees lie across their edges."""

SEATS = [list(range(24 * i, 24 * i + 23)) for i in range(3)]
DTYPES = [torch.float32, torch.bfloat16]


@cache
def model(dtype: torch.dtype, window: int | None = None, quantize: str = "none") -> Llama:
    """Random weights; down's inputs are many, where libraries begin to sum otherwise for few rows."""
    config = ModelConfig.from_json(
        {
            "architectures": ["MistralForCausalLM" if window else "LlamaForCausalLM"],
            "model_type": "mistral" if window else "llama",
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 1100,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            **({"sliding_window": window} if window else {}),
        }
    )
    return Llama.random(config, device="cpu", dtype=dtype, std=0.2, deterministic=True, quantize=quantize)


@cache
def runner(dtype: torch.dtype, window: int | None = None) -> ModelRunner:
    return poisoned_runner(model(dtype, window), pages=80, page_size=PAGE)


def chunk(begin: int, end: int, seat: int = 0) -> Span:
    return Span(TEXT[begin:end], SEATS[seat], begin, range(end - begin), None, range(end - begin))


@cache
def expected(dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Logits after every token of the text, read in one piece."""
    return runner(dtype, window).forward([chunk(0, LENGTH)])


def tree(begin: int, depth: int, rng: random.Random, seat: int = 0) -> tuple[Span, list[int]]:
    """A tree in which ``depth`` tokens of the text are a path, between other nodes; and that path."""
    tokens, parents, path = [TEXT[begin]], [-1], [0]
    for d in range(1, depth):
        right = TEXT[begin + d]
        children = [right, *({rng.randrange(VOCAB) for _ in range(rng.randrange(4))} - {right})]
        rng.shuffle(children)
        for token in children:
            tokens.append(token)
            # the others hang on any node there is, where only its other children would hold them already
            parents.append(path[-1] if token == right else rng.randrange(len(parents)))
        path.append(len(tokens) - len(children) + children.index(right))
    bits: list[int] = []
    depths: list[int] = []
    for i, parent in enumerate(parents):
        bits.append((bits[parent] if i else 0) | 1 << i)
        depths.append(depths[parent] + 1 if i else 0)
    return Span(tokens, SEATS[seat], begin, depths, bits, range(len(tokens))), path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("size", [1, 2, 19, 100, 128])
def test_chunks_of_any_size(dtype, window, size):
    got = [
        runner(dtype, window).forward([chunk(at, min(at + size, LENGTH))])
        for at in range(0, LENGTH if size > 2 else 40, size)
    ]
    logits = torch.cat(got)
    assert torch.equal(logits, expected(dtype, window)[: len(logits)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8(dtype):
    this = poisoned_runner(model(dtype, quantize="int8"), pages=80, page_size=PAGE)
    whole = this.forward([chunk(0, 150)])
    parts = [this.forward([chunk(at, min(at + size, 150))]) for size in (1, 19) for at in range(0, 150, size)]
    assert torch.equal(torch.cat(parts), torch.cat([whole, whole]))
    beside = this.forward([chunk(0, 33, seat=1), chunk(100, 150)])
    assert torch.equal(beside, torch.cat([whole[:33], whole[100:]]))


@given(
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([None, 40]),
    begin=st.integers(1, LENGTH - 20) | st.sampled_from([110, 120, 125, 127, 128, 250, 255]),
    depth=st.integers(1, 20),
    others=st.lists(st.tuples(st.sampled_from(["chunk", "tree"]), st.integers(1, 40)), max_size=2),
    place=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_a_node_alone_in_any_tree_and_any_company(dtype, window, begin, depth, others, place, seed):
    rng = random.Random(seed)
    this = runner(dtype, window)
    this.forward([chunk(0, begin)])
    span, path = tree(begin, depth, rng)
    spans = []
    for i, (kind, size) in enumerate(others):
        if kind == "tree":
            this.forward([chunk(0, 30, seat=i + 1)])
        spans.append(chunk(0, size, seat=i + 1) if kind == "chunk" else tree(30, min(size, 12), rng, seat=i + 1)[0])
    spans.insert(min(place, len(spans)), span)
    logits = this.forward(spans)
    first = sum(len(other.tokens) for other in spans[: spans.index(span)])
    assert torch.equal(logits[first:][path], expected(dtype, window)[begin : begin + depth])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tree_as_large_as_they_come(dtype):
    """From the last position of a tile on, 250 keys lie between the nodes of a path."""
    rng = random.Random(3)
    this = runner(dtype)
    this.forward([chunk(0, 127)])
    tokens = [TEXT[127], *(rng.randrange(VOCAB) for _ in range(249)), TEXT[128]]
    parents = [-1, *[0] * 250]
    bits = [1, *(1 | 1 << i for i in range(1, 251))]
    span = Span(tokens, SEATS[0] + SEATS[1], 127, [0] + [1] * 250, bits, range(251))
    assert len(parents) == len(tokens)
    logits = this.forward([span])
    assert torch.equal(logits[[0, 250]], expected(dtype)[127:129])


def engine(dtype: torch.dtype, draft: str, slots: int, step_tokens: int = 256, pages: int = 80) -> Engine:
    drafter: Drafter = {
        "none": NoDrafter,
        "lookup": lambda: UnionDrafter([NgramDrafter(), SuffixDrafter(), ScriptedDrafter(always_wrong)]),
    }[draft]()
    own = poisoned_runner(model(dtype), pages=pages, page_size=PAGE)
    return Engine(
        own,
        PagePool(pages),
        drafter,
        Noise(VOCAB),
        max_context=400,
        max_slots=slots,
        max_step_tokens=step_tokens,
        tree_budget=48,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_with_speculation_among_others_and_after_preemption(dtype, temperature):
    rng = random.Random(11)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(3, 40))] * 2 for _ in range(8)]
    params = [SamplingParams(temperature=temperature, top_p=0.95, max_tokens=32, seed=i) for i in range(8)]
    alone = [
        run(engine(dtype, "none", slots=1), [prompt], [one])[0].tokens
        for prompt, one in zip(prompts, params, strict=True)
    ]
    assert [r.tokens for r in run(engine(dtype, "lookup", slots=8, step_tokens=90), prompts, params)] == alone
    scarce = engine(dtype, "lookup", slots=8, step_tokens=64, pages=30)
    assert [r.tokens for r in run(scarce, prompts, params)] == alone
    assert scarce.stats.preemptions > 0


def test_attention_is_that_of_the_reference():
    """Against torch's own, over a tree and a chunk."""
    span, _ = tree(140, 9, random.Random(0), seat=1)
    plain = Llama.random(model(torch.float32).config, device="cpu", dtype=torch.float32, std=0.2)
    reference = poisoned_runner(plain, pages=80, page_size=PAGE)
    this = runner(torch.float32)
    for spans in ([chunk(0, 140, seat=1)], [span, chunk(0, 200)]):
        torch.testing.assert_close(this.forward(spans), reference.forward(spans), atol=2e-3, rtol=1e-4)


def test_the_matrix_library_is_tried():
    fixed_attention.check(kv_heads=3, head_dim=64, group=3)
    fixed_attention.check(kv_heads=5, head_dim=80, group=1)

"""Padded steps in static buffers give what plain ones give; the host waits once a step."""

from __future__ import annotations

import random

import pytest
import torch

import minispec.engine
import tiny_engine as tiny
from fake_graphs import FakeGraphs, HostReads, attention_from_tensors
from minispec import kernels
from minispec.batch import Span
from minispec.graphs import CapturedRunner, row_buckets, runner_for
from minispec.model.config import ModelConfig
from minispec.model.llama import Llama, Taps
from minispec.request import SamplingParams
from minispec.runner import ModelRunner
from minispec.settle import settle, settle_on_device
from minispec.tree import DraftTree
from scripted import run

PAGES, PAGE_SIZE = 96, 8
NAN = float("nan")


@pytest.fixture(autouse=True)
def attention(monkeypatch):
    """Nothing captured may look at the host's copy of the spans."""
    reference = kernels.tree_attention

    def attend(q, k_cache, v_cache, batch, scale):
        return (reference if batch.spans else attention_from_tensors)(q, k_cache, v_cache, batch, scale)

    monkeypatch.setattr(kernels, "tree_attention", attend)


def captured_runner(model: Llama, *, pages: int = PAGES, page_size: int = PAGE_SIZE, **settings) -> CapturedRunner:
    runner = CapturedRunner(
        model, pages=pages, page_size=page_size, **{"max_context": 400, "capture": FakeGraphs(), **settings}
    )
    runner.kv.k.fill_(NAN)
    runner.kv.v.fill_(NAN)
    return runner


def random_tree(rng: random.Random, size: int) -> DraftTree:
    parents = (-1, *(rng.randrange(max(0, i - 8), i) for i in range(1, size)))
    return DraftTree(tuple(rng.sample(range(tiny.VOCAB), size)), parents, (0.0,) * size)


def random_spans(rng: random.Random, sizes: list[int]) -> list[Span]:
    """Chunks, trees and parts of grown trees, on scattered pages, around page boundaries."""
    free = rng.sample(range(PAGES), PAGES)
    spans = []
    for rows in sizes:
        cached = rng.choice([0, 1, PAGE_SIZE - 1, PAGE_SIZE, 2 * PAGE_SIZE + 1, rng.randrange(40)])
        kind = rng.choice(["chunk", "tree", "grown"])
        size = rows + (min(rows, 8) if kind == "grown" else 0)
        count = -(-(cached + size) // PAGE_SIZE)
        pages, free = free[:count], free[count:]
        if kind == "chunk":
            tokens = [rng.randrange(tiny.VOCAB) for _ in range(rows)]
            spans.append(Span.chunk(tokens, pages, cached, sample_last=rng.random() < 0.7))
            continue
        tree = random_tree(rng, size)
        first = size - rows
        spans.append(
            Span(tree.tokens[first:], pages, cached, tree.depth[first:], tree.ancestors[first:], range(rows), first)
        )
    return spans


def filled(kv, spans) -> None:
    """Random keys and values where the spans may look and do not write, NaN elsewhere."""
    generator = torch.Generator().manual_seed(1)
    for span in spans:
        index = [kv.kv_index(span.pages, p) for p in range(span.num_cached + span.first_key)]
        for cache in (kv.k, kv.v):
            cache[:, :, index] = torch.randn(*cache.shape[:2], len(index), cache.shape[3], generator=generator)


MIXES = [
    [1],
    [2],
    [65],
    [63, 1],
    [1] * 8,
    [1, 1, 1, 1, 1],
    [8] * 8,
    [64, 64, 64, 64],
    [1, 7, 16, 33, 2, 1, 31],
    [17, 16],
    [5, 3, 1],
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sizes", MIXES, ids=str)
def test_padded_steps_give_the_same(sizes, seed):
    rng = random.Random(f"{sizes}{seed}")
    spans = random_spans(rng, sizes)
    plain = ModelRunner(tiny.tiny_model(0), pages=PAGES, page_size=PAGE_SIZE)
    captured = captured_runner(tiny.tiny_model(0))
    plain.kv.k.fill_(NAN)
    plain.kv.v.fill_(NAN)
    for runner in (plain, captured):
        filled(runner.kv, spans)
    expected = plain.forward(spans)
    logits = captured.forward(spans)
    assert captured._capture.replayed == 1
    assert not logits.isnan().any()
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    # nothing was written but this step's rows, and the page that is nobody's
    for own, theirs in ((captured.kv.k, plain.kv.k), (captured.kv.v, plain.kv.v)):
        torch.testing.assert_close(own[:, :, : PAGES * PAGE_SIZE], theirs, atol=2e-5, rtol=1e-4, equal_nan=True)


def test_one_graph_serves_every_step_of_its_bucket():
    """Replays after the capture, with other lengths, pages and masks; buffers stay where they are."""
    rng = random.Random(0)
    runner = captured_runner(tiny.tiny_model(0))
    plain = ModelRunner(tiny.tiny_model(0), pages=PAGES, page_size=PAGE_SIZE)
    places = set()
    for _ in range(12):
        spans = random_spans(rng, rng.choice([[9, 3, 2], [5, 5, 5, 1], [13, 1, 1], [2, 7, 6]]))
        for one in (runner, plain):
            filled(one.kv, spans)
        torch.testing.assert_close(runner.forward(spans), plain.forward(spans), atol=2e-5, rtol=1e-4)
        [step] = runner._steps.values()
        buffers = [runner._logits, *(t for t in vars(step.batch).values() if isinstance(t, torch.Tensor))]
        places.add(tuple(buffer.data_ptr() for buffer in buffers))
    assert (runner._capture.captured, runner._capture.replayed, len(places)) == (1, 12, 1)


def test_what_fits_no_bucket_runs_eagerly():
    runner = captured_runner(tiny.tiny_model(0), max_rows=32)
    plain = ModelRunner(tiny.tiny_model(0), pages=PAGES, page_size=PAGE_SIZE)
    chunk = [Span.chunk(range(33), range(5), 0, sample_last=True)]
    torch.testing.assert_close(runner.forward(chunk), plain.forward(chunk))
    narrow = captured_runner(tiny.tiny_model(0), pages=6)  # pages of a longer context than the runner was made for
    narrow._width = 2
    narrow.forward([Span.chunk(range(9), range(3), 0, sample_last=True)])
    assert runner._capture.captured == narrow._capture.captured == 0


def test_what_cannot_be_captured_runs_eagerly(caplog):
    def refuse(launch):
        raise RuntimeError("operation not permitted when stream is capturing")

    runner = captured_runner(tiny.tiny_model(0), capture=refuse)
    plain = ModelRunner(tiny.tiny_model(0), pages=PAGES, page_size=PAGE_SIZE)
    for _ in range(2):
        chunk = [Span.chunk(range(5), [2], 0, sample_last=True)]
        torch.testing.assert_close(runner.forward(chunk), plain.forward(chunk))
    assert len(runner.failures) == len(caplog.records) == 1
    assert "not permitted" in caplog.text


def test_taps_and_early_exit():
    runner = captured_runner(tiny.tiny_model(0))
    plain = ModelRunner(tiny.tiny_model(0), pages=PAGES, page_size=PAGE_SIZE)
    seen = []
    for tokens in ([1, 2, 3], [4, 5, 6, 7, 8]):
        spans = [Span.chunk(tokens, [0], 0, sample_last=True), Span.chunk([9], [1], 0, sample_last=True)]
        taps, expected = Taps((0, 1, 2)), Taps((0, 1, 2))
        torch.testing.assert_close(runner.forward(spans, taps=taps), plain.forward(spans, taps=expected))
        torch.testing.assert_close(taps.features, expected.features)
        seen.append((taps.features, expected.features))
        torch.testing.assert_close(runner.forward(spans, layers=1), plain.forward(spans, layers=1))
    # what a drafter keeps is not overwritten by later steps
    torch.testing.assert_close(*seen[0])


def test_sliding_window():
    config = ModelConfig.from_json(
        {
            "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": tiny.VOCAB,
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "sliding_window": 7,
        }
    )  # fmt: skip
    model = Llama.random(config, device="cpu", dtype=torch.float32, std=0.2)
    runner, plain = captured_runner(model), ModelRunner(model, pages=PAGES, page_size=PAGE_SIZE)
    rng = random.Random(3)
    for sizes in ([20], [9, 1, 12], [1, 1]):
        spans = random_spans(rng, sizes)
        for one in (runner, plain):
            filled(one.kv, spans)
        torch.testing.assert_close(runner.forward(spans), plain.forward(spans), atol=2e-5, rtol=1e-4)


def test_prepare_captures_every_bucket_largest_first(caplog):
    runner = captured_runner(tiny.tiny_model(0), max_rows=16)
    with caplog.at_level("INFO"):
        runner.prepare(3)
    buckets = [(key.rows, key.spans) for key in runner._graphs]
    assert buckets == [(r, s) for r in (16, 8, 4) for s in (4, 2, 1)] + [(2, 2), (2, 1), (1, 1)]
    assert "captured 12 graphs" in caplog.text
    assert runner.kv.k[:, :, : PAGES * PAGE_SIZE].isnan().all(), "padding was written into a page of the pool"
    runner.forward(random_spans(random.Random(0), [3, 2, 1]))
    assert runner._capture.captured == 12


def test_drafters_prepare_their_own(captured_engines):
    engine = tiny.tiny_engine("layers+suffix+other")
    for member in engine.drafter.members:
        member.prepare(2)
    target, draft = captured_engines
    assert {key.layers for key in target._graphs} == {1}
    assert {key.layers for key in draft._graphs} == {None}
    assert len(target._graphs) == len(draft._graphs) == 2 * 13 - 1


def test_buckets():
    assert row_buckets(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert row_buckets(100)[-2:] == (96, 100)
    assert row_buckets(1) == (1,)


def test_a_cpu_runs_plainly():
    runner = runner_for(tiny.tiny_model(0), pages=4, page_size=8, max_context=32)
    assert type(runner) is ModelRunner
    runner.prepare(4)


@pytest.fixture
def captured_engines(monkeypatch):
    """tiny_engine builds captured runners, target and draft, and samples and settles as on a GPU."""
    runners = []

    def make(model, *, pages, page_size):
        runners.append(captured_runner(model, pages=pages, page_size=page_size))
        return runners[-1]

    monkeypatch.setattr(tiny, "ModelRunner", make)
    monkeypatch.setattr(minispec.engine, "settle", settle_on_device)
    monkeypatch.setattr(minispec.engine, "drawable", lambda logits, finite: logits.where(finite[:, None], 0.0))
    return runners


@pytest.mark.parametrize("mode", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", tiny.DRAFTERS)
def test_the_engine_gives_the_same_text(draft, mode, captured_engines, monkeypatch):
    rng = random.Random(0)
    prompts = [[rng.randrange(tiny.VOCAB) for _ in range(n)] * 2 for n in (1, 8, 20, 13)]
    params = [SamplingParams(**mode, max_tokens=24, seed=i) for i in range(4)]
    requests = run(tiny.tiny_engine(draft, max_slots=3, max_step_tokens=40), prompts, params)
    assert sum(runner._capture.replayed for runner in captured_engines) > 20
    monkeypatch.undo()
    expected = run(tiny.tiny_engine("none", max_slots=3), prompts, params)
    assert [r.output for r in requests] == [r.output for r in expected]


@pytest.mark.parametrize(("draft", "most"), [("none", 1), ("ngram", 1), ("suffix", 1), ("wrong", 1), ("itself", 5)])
def test_the_host_reads_once_a_step(draft, most, captured_engines, monkeypatch):
    """Drafters that run a model also read each layer's children, here of four layers."""
    engine = tiny.tiny_engine(draft, max_slots=4)
    requests = [
        engine.make_request([3, 4, 5, 6] * 3 + [i], SamplingParams(temperature=0.7 * (i % 2), top_k=9, max_tokens=20))
        for i in range(4)
    ]
    for request in requests:
        engine.add(request)
    engine.step()
    reads = HostReads(monkeypatch)
    # what the captured functions read, a GPU reads
    monkeypatch.setattr(Llama, "forward", reads.device(Llama.forward))
    counts = set()
    while engine.has_work:
        reads.count = 0
        engine.step()
        counts.add(reads.count)
    assert max(counts) == most


def test_settling_on_the_device_is_settling_on_the_host():
    rng = random.Random(5)
    for _ in range(40):
        trees = [random_tree(rng, rng.choice([1, 2, 9, 33])) for _ in range(rng.randrange(1, 5))]
        free = rng.sample(range(PAGES), PAGES)
        places = []
        for _ in trees:
            places.append(([free.pop() for _ in range(9)], rng.randrange(9 * PAGE_SIZE - 33)))
        samples = [rng.randrange(tiny.VOCAB) for _ in range(rng.randrange(3))]
        for tree in trees:  # mostly the token of some child, so that walks go on
            samples += [rng.choice([*children, 0]) for children in tree.children]
        caches = [captured_runner(tiny.tiny_model(0)).kv for _ in range(2)]
        for kv in caches:
            kv.k.copy_(torch.arange(kv.k.numel()).view(kv.k.shape))
            kv.v.copy_(-kv.k)
        results = [
            how(kv, torch.tensor(samples), trees, places)
            for how, kv in zip((settle, settle_on_device), caches, strict=True)
        ]
        assert results[0] == results[1]
        assert torch.equal(caches[0].k, caches[1].k) and torch.equal(caches[0].v, caches[1].v)


def test_nothing_sampled_needs_nothing():
    kv = captured_runner(tiny.tiny_model(0)).kv
    assert settle(kv, torch.empty(0, dtype=torch.int64), [], []) == ([], [])
    assert settle_on_device(kv, torch.tensor([5]), [], []) == ([5], [])

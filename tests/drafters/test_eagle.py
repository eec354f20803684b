"""EAGLE heads: every published layout against the formula, and their life beside the target."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from minispec.batch import Span
from minispec.drafters.base import NoDrafter
from minispec.drafters.eagle import EagleDrafter
from minispec.drafters.eagle_head import load_eagle_head
from minispec.drafters.heads import EAGLE3, head_kind, load_head
from minispec.drafters.ngram import NgramDrafter
from minispec.drafters.union import UnionDrafter
from minispec.engine import Engine
from minispec.kv_cache import PagePool
from minispec.model.llama import Llama, Tapped, Taps
from minispec.request import SamplingParams
from minispec.runner import ModelRunner
from minispec.sampling import Noise
from minispec.scheduler import Slot
from minispec.tree import DraftTree
from scripted import run
from tiny_engine import VOCAB
from tiny_heads import DRAFT_VOCAB, EAGLE_LAYOUTS, HIDDEN, eagle_folder, eagle_formula, head_target, medusa_folder

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
MODES = pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
LAYOUTS = pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
EAGLE3_LAYOUT = "eagle3-authors"


class Watched(EagleDrafter):
    """Notes the logits behind every node it asked for, and the forwards of its head."""

    def __init__(self, *more, **named) -> None:
        super().__init__(*more, **named)
        self._kv.k.fill_(float("nan"))
        self._kv.v.fill_(float("nan"))
        self.rows: list[int] = []
        self.seen: dict[tuple, torch.Tensor] = {}

    def _forward(self, spans, gaps, hidden, rows=None):
        self.rows.append(len(hidden) if rows is None else len(rows))
        return super()._forward(spans, gaps, hidden, rows)

    def _add_children(self, growths, logits):
        row = 0
        for growth in growths:
            for node in growth.frontier:
                path, at = [], node
                while at:
                    path.insert(0, growth.tokens[at])
                    at = growth.parents[at]
                self.seen[(*growth.slot.request.tokens,), (*path,)] = logits[row].clone()
                row += 1
        assert row == len(logits)
        super()._add_children(growths, logits)


class Prompted(Watched):
    """Proposes, before its own nodes, the true continuation for some way and then something wrong."""

    texts: dict[tuple[int, ...], list[int]] = {}  # noqa: RUF012
    rng = random.Random(0)

    def propose(self, slots, max_nodes):
        trees = super().propose(slots, max_nodes)
        result = []
        for slot, count, tree in zip(slots, max_nodes, trees, strict=True):
            done = len(slot.request.output)
            right = self.texts[slot.request.prompt][done : done + self.rng.randrange(5)]
            chain = [*right, (self.texts[slot.request.prompt][done : done + 1] or [0])[0] ^ 1]
            first, at = tree.children[0], len(tree)
            tokens, parents, values = list(tree.tokens), list(tree.parents), list(tree.values)
            parent = 0
            for token in chain:
                if parent == 0 and token in first:
                    parent = first[token]
                    continue
                tokens.append(token)
                parents.append(parent)
                values.append(values[parent])
                parent, at = at, at + 1
            merged = DraftTree(tuple(tokens), tuple(parents), tuple(values))
            result.append(merged.best(count) if len(set(zip(parents, tokens, strict=True))) == at else tree)
        return result


def drafting(folder, *, drafter=Watched, pages=64, head_pages=None, page_size=16, target=None, depth=3, width=3,
             children=3, chunk=256, **settings):  # fmt: skip
    """(engine, drafter) over head_target."""
    target = target or head_target()
    runner = ModelRunner(target, pages=pages, page_size=page_size)
    runner.kv.k.fill_(float("nan"))
    runner.kv.v.fill_(float("nan"))
    noise = Noise(VOCAB)
    data = json.loads((folder / "config.json").read_text())
    head = load_eagle_head(folder, data, 3 if head_kind(folder) == EAGLE3 else 1, target)
    shape = {"depth": depth, "width": width, "children": children, "chunk": chunk}
    own = drafter("head", head, noise, pages=pages if head_pages is None else head_pages, page_size=page_size, **shape)
    return Engine(runner, PagePool(pages), own, noise, max_context=400, **settings), own


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(31 * i * (seed + 3) + 7 * i * i + seed) % VOCAB for i in range(length)]


def plain(prompts, params) -> list[list[int]]:
    """The same without drafts."""
    return [plain_one(tuple(text), one) for text, one in zip(prompts, params, strict=True)]


@cache
def plain_one(text: tuple[int, ...], params: SamplingParams) -> list[int]:
    runner = ModelRunner(head_target(), pages=32, page_size=16)
    engine = Engine(runner, PagePool(32), NoDrafter(), Noise(VOCAB), max_context=400)
    return run(engine, [text], [params])[0].output


def params_for(count: int, mode: dict, max_tokens: int = 24) -> list[SamplingParams]:
    return [SamplingParams(**mode, max_tokens=max_tokens, seed=i) for i in range(count)]


def run_watched(engine, drafter, texts, params):
    requests = run(engine, texts, params)
    assert drafter._pool.owned == 0 and drafter._states == {}
    return requests


def features_of(target, taps, tokens) -> list[torch.Tensor]:
    """The target's hidden states at all positions of the text."""
    runner = ModelRunner(target, pages=64, page_size=16)
    seen = Taps(taps)
    runner.forward([Span.chunk(tokens, range(64), 0, sample_last=True)], taps=seen)
    return [part.clone() for part in seen.hidden]


def weights_of(folder) -> dict[str, torch.Tensor]:
    strip = ("model.", "midlayer.", "layers.0.")
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        for prefix in strip:
            name = name.removeprefix(prefix)
        weights[name] = weight.float() if weight.is_floating_point() else weight
    return weights


TAPS = {"eagle3-borrowing": (1, 2), "eagle1-sglang": (2,), "eagle1-authors": (2,)}


@MODES
@LAYOUTS
def test_every_layout_computes_its_formula(tmp_path, layout, mode):
    """Prompts read in chunks, chained steps, branches, and what is left after every kind of partial acceptance."""
    folder = eagle_folder(tmp_path / "head", layout)
    target = head_target()
    engine, drafter = drafting(folder, drafter=Prompted, max_slots=2, max_step_tokens=24, chunk=20)
    assert drafter.taps == TAPS.get(layout, (0, 1, 2))
    texts, params = [prompt(3), prompt(45, 1), prompt(18, 2)], params_for(3, mode, 24)
    expected = plain(texts, params)
    Prompted.texts = {tuple(text): output for text, output in zip(texts, expected, strict=True)}
    requests = run_watched(engine, drafter, texts, params)
    assert [r.output for r in requests] == expected
    assert engine.stats.accepted > 15
    weights = weights_of(folder)
    checked = random.Random(1).sample(sorted(drafter.seen), 40)
    assert {len(path) for _, path in checked} == {0, 1, 2}
    features = {}
    for tokens, path in checked:
        if tokens not in features:
            features[tokens] = features_of(target, drafter.taps, tokens[:-1])
        with torch.inference_mode():
            row = eagle_formula(weights, layout, target, features[tokens], tokens[1:], path)[-1]
        torch.testing.assert_close(drafter.seen[tokens, path], row, atol=2e-3, rtol=2e-3)


@MODES
@pytest.mark.parametrize("layout", [EAGLE3_LAYOUT, "eagle3-vllm"])
def test_children_are_the_targets_likeliest_draws(tmp_path, layout, mode):
    """Ids are the target's (i + d2t[i]); sampled rows are ranked with the noise at those ids."""
    folder = eagle_folder(tmp_path / "head", layout)
    engine, drafter = drafting(folder, depth=1, children=4)
    weights = weights_of(folder)
    ids = weights["d2t"] + torch.arange(DRAFT_VOCAB) if "d2t" in weights else torch.arange(VOCAB)
    request = engine.make_request(prompt(9), SamplingParams(max_tokens=20, seed=5, temperature=mode["temperature"]))
    engine.add(request)
    engine.step()
    [slot] = engine.scheduler.running
    for _ in range(6):
        tree = drafter.propose([slot], [5])[0]
        tokens = tuple(request.tokens)
        scores = drafter.seen[tokens, ()]
        if mode is SAMPLED:
            scores = scores / 0.8 + Noise(VOCAB).rows([(5, len(tokens))])[0, ids]
        assert tree.tokens[1:] == tuple(ids[scores.topk(4).indices].tolist())
        assert tree.values[1:] == pytest.approx(scores.log_softmax(-1).topk(4).values.tolist(), abs=1e-4)
        # the step asks again, of a drafter that does not know it was asked
        drafter._states[slot].num_cached -= 1
        drafter._states[slot].fused.append(drafter._head.fuse(last_features(engine, drafter, tokens)))
        engine.step()


def last_features(engine, drafter, tokens) -> torch.Tensor:
    return torch.cat(features_of(engine.runner.model, drafter.taps, tokens[:-1]), dim=-1)[-1:]


@MODES
@pytest.mark.parametrize(("layout", "slots"), [*((layout, 3) for layout in EAGLE_LAYOUTS), (EAGLE3_LAYOUT, 1)])
def test_speculation_is_invisible(tmp_path, layout, slots, mode):
    """Requests that arrive at different steps, at other stages than their neighbours."""
    folder = eagle_folder(tmp_path / "head", layout)
    engine, drafter = drafting(folder, max_slots=slots, max_step_tokens=40, depth=4)
    texts, params = [prompt(4 + 9 * i, i) for i in range(5)], params_for(5, mode)
    requests = [engine.make_request(text, one) for text, one in zip(texts, params, strict=True)]
    pending, rng = list(requests), random.Random(slots)
    while pending or engine.has_work:
        if pending and rng.randrange(3):
            engine.add(pending.pop(0))
        engine.step()
        engine.check()
        for slot, state in drafter._states.items():
            rows = drafter._num_pending(slot)
            assert state.gap + state.num_cached + rows == slot.num_cached
        drafter._pool.check([state.pages for state in drafter._states.values()])
    assert [r.output for r in requests] == plain(texts, params)
    assert engine.stats.drafted > 50 and drafter.invalid == 0 and drafter._pool.owned == 0


@MODES
def test_in_a_union_each_reads_its_own_hidden_states(tmp_path, mode):
    engine, eagle = drafting(eagle_folder(tmp_path / "eagle", EAGLE3_LAYOUT), page_size=4, pages=80, max_slots=3)
    _, first = drafting(eagle_folder(tmp_path / "first", "eagle1-sglang"))
    first.name, target = "first", engine.runner.model
    folder = medusa_folder(tmp_path / "medusa", "authors")
    medusa = load_head("medusa", folder, target, Noise(VOCAB), pages=1, page_size=1)
    engine.drafter = UnionDrafter([medusa, eagle, first, NgramDrafter()])
    assert engine.drafter.taps == (0, 1, 2)
    texts, params = [prompt(7 + 11 * i, i) for i in range(4)], params_for(4, mode, 40)
    requests = run_watched(engine, eagle, texts, params)
    assert [r.output for r in requests] == plain(texts, params)
    assert first._pool.owned == 0 and engine.stats.drafted > 50
    for drafter, layout in ((eagle, EAGLE3_LAYOUT), (first, "eagle1-sglang")):
        weights = weights_of(tmp_path / ("eagle" if drafter is eagle else "first"))
        for tokens, path in random.Random(1).sample(sorted(drafter.seen), 10):
            features = features_of(target, drafter.taps, tokens[:-1])
            row = eagle_formula(weights, layout, target, features, tokens[1:], path)[-1]
            torch.testing.assert_close(drafter.seen[tokens, path], row, atol=2e-3, rtol=2e-3)


@MODES
@pytest.mark.parametrize("layout", [EAGLE3_LAYOUT, "eagle1-sglang"])
def test_under_preemption(tmp_path, layout, mode):
    folder = eagle_folder(tmp_path / "head", layout)
    engine, drafter = drafting(folder, pages=60, head_pages=80, page_size=4, max_slots=4, max_step_tokens=24)
    texts, params = [prompt(10 + 7 * i, i) for i in range(4)], params_for(4, mode, 50)
    requests = run_watched(engine, drafter, texts, params)
    assert engine.stats.preemptions > 0
    assert [r.output for r in requests] == plain(texts, params)


def test_pages_come_back_at_an_abort(tmp_path):
    engine, drafter = drafting(eagle_folder(tmp_path / "head", EAGLE3_LAYOUT))
    first, second = (engine.make_request(prompt(20, i), SamplingParams(max_tokens=60)) for i in range(2))
    engine.add(first)
    engine.add(second)
    engine.abort(second)  # before it began
    engine.add(second := engine.make_request(prompt(20, 1), SamplingParams(max_tokens=60, **GREEDY)))
    for _ in range(4):
        engine.step()
    held = drafter._pool.owned
    engine.abort(first)
    assert 0 < drafter._pool.owned < held
    while engine.has_work:
        engine.step()
    assert second.finished and drafter._pool.owned == 0 and drafter._states == {}


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("slots", [1, 3])
def test_as_many_forwards_as_the_tree_is_deep(tmp_path, depth, slots):
    """Not as many as it has nodes, nor as there are slots."""
    engine, drafter = drafting(eagle_folder(tmp_path / "head", EAGLE3_LAYOUT), depth=depth)
    for i in range(slots):
        engine.add(engine.make_request(prompt(5, i), SamplingParams(max_tokens=60, **GREEDY)))
    engine.step()
    assert drafter.rows == []  # the first token waits for no draft
    for _ in range(4):
        drafter.rows.clear()
        engine.step()
        assert len(drafter.rows) == depth
        assert drafter.rows[1:] == [3 * slots] * (depth - 1)


def test_what_cannot_be_kept_is_not_run(tmp_path):
    """A small tree is the best of a large one, for fewer rows."""
    engine, drafter = drafting(eagle_folder(tmp_path / "head", EAGLE3_LAYOUT), depth=4, width=8, children=6)
    request = engine.make_request(prompt(9), SamplingParams(max_tokens=60, **GREEDY))
    engine.add(request)
    engine.step()
    [slot] = engine.scheduler.running
    for _ in range(5):
        tokens, trees, rows = tuple(request.tokens), [], []
        for nodes in (200, 7):
            drafter.rows.clear()
            [tree] = drafter.propose([slot], [nodes])
            trees.append(tree)
            rows.append(sum(drafter.rows))
            drafter._states[slot].num_cached -= 1
            drafter._states[slot].fused.append(drafter._head.fuse(last_features(engine, drafter, tokens)))
        large, small = trees
        best = large.best(7)
        assert (small.tokens, small.parents) == (best.tokens, best.parents)
        assert small.values == pytest.approx(best.values, abs=1e-4)
        assert rows[1] < rows[0]
        engine.step()


def test_a_long_prompt_is_read_in_chunks_while_others_draft(tmp_path):
    folder = eagle_folder(tmp_path / "head", EAGLE3_LAYOUT)
    engine, drafter = drafting(folder, chunk=16, depth=2, max_step_tokens=512)
    long = engine.make_request(prompt(200), SamplingParams(max_tokens=30, **GREEDY))
    short = engine.make_request(prompt(4, 1), SamplingParams(max_tokens=30, **GREEDY))
    engine.add(long)
    engine.add(short)
    engine.step()
    for _ in range(4):
        engine.step()
    assert max(drafter.rows) <= 16
    assert long.speculation.drafted == 0 and short.speculation.drafted > 0
    while engine.has_work:
        engine.step()
    assert long.speculation.drafted > 0
    assert [long.output, short.output] == plain([prompt(200), prompt(4, 1)], [long.params, short.params])


def test_an_exhausted_pool_means_no_drafts_and_the_same_text(tmp_path):
    folder = eagle_folder(tmp_path / "head", EAGLE3_LAYOUT)
    texts, params = [prompt(20, i) for i in range(3)], params_for(3, GREEDY)
    for pages in (0, 1, 3):
        engine, drafter = drafting(folder, head_pages=pages)
        requests = run_watched(engine, drafter, texts, params)
        assert [r.output for r in requests] == plain(texts, params)
        assert (engine.stats.drafted > 0) == (pages == 3)


@MODES
def test_what_is_not_drafted_for_is_caught_up_with(tmp_path, mode):
    """Steps without a proposal leave hidden states to read: the next tree is the one of a head that read them all."""
    folder = eagle_folder(tmp_path / "head", EAGLE3_LAYOUT)
    engine, drafter = drafting(folder)
    request = engine.make_request(prompt(10), SamplingParams(max_tokens=110, seed=3, **mode))
    engine.add(request)
    own, drafter.propose = drafter.propose, NoDrafter().propose
    for _ in range(80):
        engine.step()
    [slot] = engine.scheduler.running
    assert drafter.rows == [] and len(drafter._states[slot].fused) > 1
    drafter.propose = own
    engine.step()
    tokens, _ = next(iter(drafter.seen))
    features = features_of(engine.runner.model, drafter.taps, tokens[:-1])
    [row] = eagle_formula(weights_of(folder), EAGLE3_LAYOUT, engine.runner.model, features, tokens[1:])
    torch.testing.assert_close(drafter.seen[tokens, ()], row, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("layout", [EAGLE3_LAYOUT, "eagle1-sglang"])
def test_a_slot_that_begins_on_cached_pages(tmp_path, layout):
    """The target's hidden states of a reused prefix are not known: the head reads from there on."""
    folder = eagle_folder(tmp_path / "head", layout)
    engine, drafter = drafting(folder)
    target = head_target()
    request = engine.make_request(prompt(40), SamplingParams(max_tokens=20, **GREEDY))
    slot = Slot(0, request, num_cached=16)
    drafter.begin(slot)
    request.append([7])
    assert drafter.propose([slot], [9]) == [DraftTree.root(7)]
    features = features_of(target, drafter.taps, request.tokens[:-1])
    taps = Taps(drafter.taps)
    for layer, stream in zip(drafter.taps, features, strict=True):
        taps.see(layer, stream)
    for start, end in ((16, 30), (30, 40)):
        slot.num_cached = start
        drafter.observe(slot, Tapped(taps, range(start, end)))
    slot.num_cached = 40
    [tree] = drafter.propose([slot], [9])
    assert len(tree) == 9
    tokens = tuple(request.tokens)
    for (_, path), seen in drafter.seen.items():
        rest = [part[16:] for part in features]
        row = eagle_formula(weights_of(folder), layout, target, rest, tokens[17:], path, first=16)[-1]
        torch.testing.assert_close(seen, row, atol=2e-3, rtol=2e-3)
    drafter.end(slot)
    # a slot whose whole text was cached has nothing to begin from until the target's next step
    slot = Slot(0, request, num_cached=40)
    drafter.begin(slot)
    assert drafter.propose([slot], [9]) == [DraftTree.root(7)]
    drafter.end(slot)


@MODES
@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_a_head_that_gives_no_numbers_is_not_drafted_from(tmp_path, monkeypatch, fill, mode, caplog):
    engine, drafter = drafting(eagle_folder(tmp_path / "head", EAGLE3_LAYOUT))
    healthy = drafter._head.logits

    def spoilt(hidden):
        logits = healthy(hidden).clone()
        logits[0] = fill
        return logits

    monkeypatch.setattr(drafter._head, "logits", spoilt)
    texts, params = [prompt(9), prompt(12, 1)], params_for(2, mode)
    requests = run_watched(engine, drafter, texts, params)
    assert [r.output for r in requests] == plain(texts, params)
    assert drafter.invalid > 10 and sum(r.speculation.drafted for r in requests) > 0
    assert caplog.text.count("not finite") == 1


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [EAGLE3_LAYOUT, "eagle1-authors"])
def test_dtypes_may_differ(tmp_path, layout, stored, dtype):
    folder = eagle_folder(tmp_path / "head", layout, dtype=stored)
    target = Llama.random(head_target().config, device="cpu", dtype=dtype, seed=0, std=0.2)
    target.norm = head_target().norm.to(dtype)
    engine, drafter = drafting(folder, target=target)
    [request] = run_watched(engine, drafter, [prompt(9)], params_for(1, GREEDY))
    assert drafter._kv.k.dtype == dtype and engine.stats.drafted > 0
    if dtype == torch.float32:
        assert [request.output] == plain([prompt(9)], params_for(1, GREEDY))


def test_gradients_flow_through_a_head(tmp_path):
    """Attention is an argument, so a head can be trained with a dense one."""
    target = head_target()
    folder = eagle_folder(tmp_path / "head", EAGLE3_LAYOUT)
    head = load_eagle_head(folder, EAGLE_LAYOUTS[EAGLE3_LAYOUT][0], 3, target)
    head.weights.fc.weight.requires_grad_()
    fused = head.fuse(torch.randn(5, 3 * HIDDEN))
    out = head.forward(torch.arange(5), fused, lambda layer, q, k, v: q + v.repeat_interleave(2, dim=1))
    head.logits(out).logsumexp(-1).sum().backward()
    assert head.weights.fc.weight.grad.abs().sum() > 0

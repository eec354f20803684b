"""Medusa heads: every published layout against the formula, their trees, and their life beside the target."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from minispec.batch import Span
from minispec.drafters.base import NoDrafter
from minispec.drafters.heads import MEDUSA, head_kind, load_head
from minispec.drafters.medusa import MedusaDrafter, product_tree
from minispec.engine import Engine
from minispec.errors import ConfigError
from minispec.kv_cache import PagePool
from minispec.model.llama import Llama, Taps
from minispec.request import SamplingParams
from minispec.runner import ModelRunner
from minispec.sampling import Noise
from minispec.tree import DraftTree
from scripted import run
from tiny_engine import VOCAB
from tiny_heads import MEDUSA_LAYOUTS, NUM_HEADS, head_target, medusa_folder, medusa_formula

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
MODES = pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
LAYOUTS = pytest.mark.parametrize("layout", MEDUSA_LAYOUTS)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(31 * i * (seed + 3) + 7 * i * i + seed) % VOCAB for i in range(length)]


def params_for(count: int, mode: dict, max_tokens: int = 24) -> list[SamplingParams]:
    return [SamplingParams(**mode, max_tokens=max_tokens, seed=i) for i in range(count)]


def plain(prompts, params) -> list[list[int]]:
    """The same without drafts."""
    return [plain_one(tuple(text), one) for text, one in zip(prompts, params, strict=True)]


@cache
def plain_one(text: tuple[int, ...], params: SamplingParams) -> list[int]:
    runner = ModelRunner(head_target(), pages=32, page_size=16)
    engine = Engine(runner, PagePool(32), NoDrafter(), Noise(VOCAB), max_context=400)
    return run(engine, [text], [params])[0].output


def drafting(folder, *, pages=64, page_size=16, target=None, **settings):
    """(engine, drafter) over head_target."""
    runner = ModelRunner(target or head_target(), pages=pages, page_size=page_size)
    runner.kv.k.fill_(float("nan"))
    runner.kv.v.fill_(float("nan"))
    noise = Noise(VOCAB)
    drafter = load_head("heads", folder, runner.model, noise, pages=pages, page_size=page_size)
    assert isinstance(drafter, MedusaDrafter)
    return Engine(runner, PagePool(pages), drafter, noise, max_context=400, **settings), drafter


def feature_of(target, tokens) -> torch.Tensor:
    """The target's hidden state at the end of the text, before its final norm."""
    runner = ModelRunner(target, pages=64, page_size=16)
    seen = Taps((target.config.num_layers,))
    runner.forward([Span.chunk(tokens, range(64), 0, sample_last=True)], taps=seen)
    return seen.hidden[0][-1].clone()


@LAYOUTS
def test_layouts_are_recognised(tmp_path, layout):
    folder = medusa_folder(tmp_path / "head", layout)
    assert head_kind(folder) == MEDUSA
    _, drafter = drafting(folder)
    assert drafter.taps == (2,)


class Chained:
    """Makes a drafter propose the true continuation for some way before its own tree, so that much is accepted."""

    def __init__(self, drafter, texts) -> None:
        self.propose, self.texts, self.rng = drafter.propose, texts, random.Random(0)
        self.seen: dict[tuple[int, ...], DraftTree] = {}
        drafter.propose = self

    def __call__(self, slots, max_nodes):
        trees = self.propose(slots, max_nodes)
        result = []
        for slot, count, tree in zip(slots, max_nodes, trees, strict=True):
            self.seen[tuple(slot.request.tokens)] = tree
            done = len(slot.request.output)
            right = self.texts[slot.request.prompt][done : done + self.rng.randrange(5)]
            if len(right) == 4 or len(right) >= count:
                result.append(tree)
                continue
            nodes = range(len(right) + 1)
            result.append(DraftTree((tree.tokens[0], *right), tuple(i - 1 for i in nodes), (0.0,) * len(nodes)))
        return result


@MODES
@LAYOUTS
def test_every_layout_computes_its_formula(tmp_path, layout, mode):
    """Layer d + 1 holds the best of head d, with the noise of its own position; also after partial acceptance."""
    folder = medusa_folder(tmp_path / "head", layout)
    target, weights = head_target(), load_file(folder / "medusa_lm_head.safetensors")
    engine, drafter = drafting(folder, max_slots=2, max_step_tokens=30)
    texts = [prompt(3), prompt(45, 1), prompt(18, 2)]
    params = [SamplingParams(temperature=mode["temperature"], max_tokens=24, seed=i) for i in range(3)]
    expected = plain(texts, params)
    chained = Chained(drafter, {tuple(text): output for text, output in zip(texts, expected, strict=True)})
    requests = run(engine, texts, params)
    assert [r.output for r in requests] == expected
    assert engine.stats.accepted > 15
    checked = 0
    for tokens, tree in chained.seen.items():
        if len(tree) < 5:
            continue
        seed = next(i for i, text in enumerate(texts) if tokens[: len(text)] == tuple(text))
        layers = []
        for d, logits in enumerate(medusa_formula(weights, layout, target, feature_of(target, tokens[:-1]))):
            if mode is SAMPLED:
                logits = logits / 0.8 + Noise(VOCAB).rows([(seed, len(tokens) + d)])[0]
            top = logits.log_softmax(-1).topk(10)
            layers.append(list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        wanted = best_of_product(tokens[-1], layers[: max(tree.depth)], len(tree))
        found = {path(tree, node): value for node, value in enumerate(tree.values)}
        assert found == pytest.approx(wanted, abs=1e-3)
        checked += 1
    assert checked > 5


def path(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[i] for i in tree.path(node))


def best_of_product(root, layers, count) -> dict[tuple[int, ...], float]:
    """All of the cartesian product, sorted."""
    nodes = {(root,): 0.0}
    for depth in range(len(layers)):
        for chosen in itertools.product(*layers[: depth + 1]):
            nodes[(root, *(token for token, _ in chosen))] = sum(value for _, value in chosen)
    return dict(sorted(nodes.items(), key=lambda item: -item[1])[:count])


@pytest.mark.parametrize("count", [1, 2, 7, 40, 200])
def test_the_tree_is_the_best_of_the_cartesian_product(count):
    rng = random.Random(count)
    layers = []
    for size in (5, 4, 4):
        values = sorted((math.log(rng.random()) for _ in range(size)), reverse=True)
        layers.append([(rng.randrange(1000) * 10 + i, value) for i, value in enumerate(values)])
    tree = product_tree(3, layers, count)
    found = {path(tree, node): value for node, value in enumerate(tree.values)}
    assert found == pytest.approx(best_of_product(3, layers, count))
    assert len(tree) == min(count, 1 + 5 + 20 + 80)


def test_layers_without_children_end_the_tree():
    assert product_tree(3, [], 9) == DraftTree.root(3)
    assert product_tree(3, [[(1, -0.5)], [], [(2, -0.1)]], 9).tokens == (3, 1)


@MODES
@pytest.mark.parametrize(("layout", "slots"), [*((layout, 3) for layout in MEDUSA_LAYOUTS), ("authors", 1)])
def test_speculation_is_invisible(tmp_path, layout, slots, mode):
    folder = medusa_folder(tmp_path / "head", layout)
    engine, drafter = drafting(folder, max_slots=slots, max_step_tokens=40)
    texts, params = [prompt(4 + 9 * i, i) for i in range(4)], params_for(4, mode)
    requests = [engine.make_request(text, one) for text, one in zip(texts, params, strict=True)]
    pending, rng = list(requests), random.Random(slots)
    while pending or engine.has_work:
        if pending and rng.randrange(3):
            engine.add(pending.pop(0))
        engine.step()
        engine.check()
    assert [r.output for r in requests] == plain(texts, params)
    assert engine.stats.drafted > 50 and drafter.invalid == 0
    assert drafter._hidden == {} and drafter._tree == {}


@MODES
def test_under_preemption_and_abort(tmp_path, mode):
    folder = medusa_folder(tmp_path / "head", "authors")
    engine, drafter = drafting(folder, pages=60, page_size=4, max_slots=4, max_step_tokens=24)
    texts, params = [prompt(10 + 7 * i, i) for i in range(4)], params_for(4, mode, 60)
    requests = [engine.make_request(text, one) for text, one in zip(texts, params, strict=True)]
    for request in requests:
        engine.add(request)
    aborted = engine.make_request(prompt(5), SamplingParams(max_tokens=50))
    for _ in range(3):
        engine.step()
    engine.add(aborted)
    engine.step()
    engine.abort(aborted)
    while engine.has_work:
        engine.step()
        engine.check()
        assert set(drafter._hidden) == set(engine.scheduler.running)
    assert engine.stats.preemptions > 0
    assert [r.output for r in requests] == plain(texts, params)
    assert drafter._hidden == {} and drafter._tree == {}


def test_one_pass_for_all_slots(tmp_path, monkeypatch):
    engine, drafter = drafting(medusa_folder(tmp_path / "head", "borrowing"), max_slots=3)
    calls, own = [], drafter._heads.logits

    def counted(hidden, depth):
        calls.append((len(hidden), depth))
        return own(hidden, depth)

    monkeypatch.setattr(drafter._heads, "logits", counted)
    for i in range(3):
        engine.add(engine.make_request(prompt(5, i), SamplingParams(max_tokens=40, **GREEDY)))
    engine.step()
    engine.step()
    drafter.depth_limit = 2
    [*_] = drafter.propose(engine.scheduler.running, [9, 1, 9])
    assert calls == [(3, NUM_HEADS), (2, 2)]


@pytest.mark.parametrize(("max_tokens", "calls"), [(2, []), (3, [1]), (4, [2, 1]), (9, [3, 3, 3, 3, 3, 2, 1])])
def test_no_head_is_run_that_the_request_has_no_room_for(tmp_path, monkeypatch, max_tokens, calls):
    """A text of n tokens has room for drafts of depth n - 2 at its second step: the bonus comes behind them."""
    engine, drafter = drafting(medusa_folder(tmp_path / "head", "authors"))
    depths, own = [], drafter._heads.logits
    monkeypatch.setattr(drafter._heads, "logits", lambda hidden, depth: depths.append(depth) or own(hidden, depth))
    engine.add(engine.make_request(prompt(5), SamplingParams(max_tokens=max_tokens, **GREEDY)))
    while engine.has_work:
        engine.step()
    assert engine.stats.accepted == 0 and depths == calls


@MODES
def test_heads_that_give_no_numbers_are_not_drafted_from(tmp_path, monkeypatch, mode, caplog):
    engine, drafter = drafting(medusa_folder(tmp_path / "head", "authors"))
    own = drafter._heads.logits

    def spoilt(hidden, depth):
        logits = own(hidden, depth).clone()
        logits[1:, 0] = float("nan")
        return logits

    monkeypatch.setattr(drafter._heads, "logits", spoilt)
    texts, params = [prompt(9), prompt(12, 1)], params_for(2, mode)
    requests = run(engine, texts, params)
    assert [r.output for r in requests] == plain(texts, params)
    assert drafter.invalid > 10 and all(r.speculation.drafted > 0 for r in requests)
    assert caplog.text.count("not finite") == 1


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_may_differ(tmp_path, stored, dtype):
    folder = medusa_folder(tmp_path / "head", "named", dtype=stored)
    target = Llama.random(head_target().config, device="cpu", dtype=dtype, seed=0, std=0.2)
    target.norm = head_target().norm.to(dtype)
    engine, _ = drafting(folder, target=target)
    [request] = run(engine, [prompt(9)], params_for(1, GREEDY))
    assert engine.stats.drafted > 0
    if dtype == torch.float32:
        assert [request.output] == plain([prompt(9)], params_for(1, GREEDY))


@pytest.mark.parametrize("depth", [0, NUM_HEADS + 1])
def test_a_tree_deeper_than_there_are_heads_is_refused(tmp_path, depth):
    _, drafter = drafting(medusa_folder(tmp_path / "head", "authors"))
    with pytest.raises(ConfigError, match=rf"depth {depth} .* it has 3 Medusa heads.*depth of 1 to 3"):
        MedusaDrafter("heads", drafter._heads, Noise(VOCAB), depth=depth)

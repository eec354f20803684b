"""EAGLE heads in the compiled step: equal to eager torch, adopted behind the target, and given up without harm."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minispec import compiled
from minispec.batch import Span
from minispec.compiled import Compilation, _deviation
from minispec.compiled_probe import HeadProbe, ModelProbe
from minispec.drafters.base import NoDrafter
from minispec.drafters.eagle import EagleDrafter
from minispec.drafters.eagle_head import EagleHead, HeadWeights, load_eagle_head
from minispec.drafters.eagle_runner import EagerHead, HeadRunner
from minispec.drafters.heads import EAGLE3, head_kind
from minispec.engine import Engine
from minispec.kv_cache import PagePool
from minispec.model.int8 import BlockInt8Linear
from minispec.model.linear import Head, Linear
from minispec.model.llama import Llama, Tapped, Taps
from minispec.native.eagle import CompiledHead, pack, unsupported
from minispec.native.library import Team
from minispec.native.model import CompiledForward, PackedHead, PackedLinear, packed_layer
from minispec.request import SamplingParams
from minispec.runner import ModelRunner, Phase
from minispec.sampling import Noise
from native_library import needs_machine
from scripted import run
from tiny_engine import VOCAB
from tiny_heads import EAGLE_LAYOUTS, eagle_folder, head_target

LAYOUTS = pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
AUTHORS = "eagle3-authors"


def target(dtype: torch.dtype = torch.bfloat16) -> Llama:
    made = Llama.random(head_target().config, device="cpu", dtype=dtype, seed=0, std=0.2)
    made.norm = head_target().norm.to(dtype)
    return made


def load(folder: Path, model: Llama) -> EagleHead:
    data = json.loads((folder / "config.json").read_text())
    return load_eagle_head(folder, data, 3 if head_kind(folder) == EAGLE3 else 1, model)


def noise(*shape: int, around: float = 0.0) -> torch.Tensor:
    return (around + torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.15).bfloat16()


def with_everything(head: EagleHead) -> EagleHead:
    """Biases everywhere, norms of q and k, a norm of what fc reads, and a second layer, where there can be one."""

    def biased(linear: Linear) -> Linear:
        weight = linear.weight.to_dense() if linear.packed else linear.weight
        return Linear(weight, noise(linear.out_features))

    size, hidden = head.config.layer.head_dim, head.config.layer.hidden_size
    [layer] = head.weights.layers
    layer = replace(
        layer,
        qkv=biased(layer.qkv),
        o=biased(layer.o),
        gate_up=biased(layer.gate_up),
        down=biased(layer.down),
        q_norm=noise(size, around=1),
        k_norm=noise(size + 1, around=1)[1:],
    )
    layers = [layer]
    if head.config.version == 1:
        layers.append(replace(layer, input_norm=noise(hidden, around=1)))
    else:
        layers.append(replace(layer, input_norm=noise(hidden, around=1), qkv=Linear(noise(128, hidden))))
    fc_norm = noise(head.weights.fc.in_features, around=1) if head.config.version == 3 else None
    head.weights = replace(head.weights, layers=layers, fc=biased(head.weights.fc), fc_norm=fc_norm)
    head.config = replace(head.config, layer=replace(head.config.layer, num_layers=2))
    return head


def of_8_bits(weights: HeadWeights) -> HeadWeights:
    """What packing makes of them, for eager torch."""

    def rounded(linear: Linear) -> Linear:
        return BlockInt8Linear(linear.weight.to_dense() if linear.packed else linear.weight, linear.bias)

    names = ("qkv", "o", "gate_up", "down")
    layers = [replace(x, **{name: rounded(getattr(x, name)) for name in names}) for x in weights.layers]
    return replace(weights, fc=rounded(weights.fc), layers=layers)


@needs_machine
@LAYOUTS
@pytest.mark.parametrize("everything", [False, True])
def test_agrees_with_eager(layout: str, everything: bool, team: Team, tmp_path: Path) -> None:
    """Texts and two layers of trees behind them, side by side, on scattered pages, one with a gap before it."""
    head = load(eagle_folder(tmp_path / "head", layout), target())
    if everything:
        head = with_everything(head)
    assert unsupported(head) is None
    probe = HeadProbe(HeadRunner(head, pages=4, page_size=16))
    eager, plain = EagerHead(head), head.weights
    head.weights = of_8_bits(plain)
    expected = torch.cat(probe.logits(eager))
    best, values = map(torch.tensor, eager.best(expected, 5))
    head.weights = plain
    pack(team, team, head)
    native = CompiledHead(team, head)
    got = torch.cat(probe.logits(native))
    assert len(got) == 3 + 8 + 8
    deviation = _deviation(got, expected)
    assert deviation.median() < 0.04 and deviation.max() < 0.15
    # the eager forward goes on over the same weights
    assert _deviation(torch.cat(probe.logits(eager)), expected).median() < 0.04
    ours, our_values = map(torch.tensor, native.best(expected, 5))
    torch.testing.assert_close(our_values, values, atol=1e-4, rtol=1e-4)
    differ = ours != best  # only where they are as likely
    assert torch.allclose(values[differ], our_values[differ], atol=1e-4)
    assert "in another layout" in (unsupported(head) or "")


@needs_machine
def test_a_rows_bits_depend_on_its_text_alone(team: Team, tmp_path: Path) -> None:
    head = load(eagle_folder(tmp_path / "head", AUTHORS), target())
    pack(team, team, head)
    runner = HeadRunner(head, pages=40, page_size=16)
    runner.use(CompiledHead(team, head))
    tokens, hidden = [(i * 131 + 7) % VOCAB for i in range(270)], noise(270, 64) * 6
    pages = [*range(39, 20, -1)]

    def read(begin: int, end: int, *others: Span) -> tuple[torch.Tensor, torch.Tensor]:
        spans = [*others, Span(tokens[begin:end], pages, begin, range(end - begin), None, range(end - begin))]
        rows = torch.cat([hidden[: len(other.tokens)] for other in others] + [hidden[begin:end]])
        g, logits = runner.forward(spans, [0] * len(spans), rows)
        return g[-(end - begin) :].clone(), logits[-(end - begin) :].clone()

    whole = read(0, 270)
    for i in range(240, 270):
        assert all(torch.equal(part[0], all_[i]) for part, all_ in zip(read(i, i + 1), whole, strict=True))
    beside = read(250, 270, Span([1, 2, 3], [0], 0, range(3), None, (0, 2)))
    assert all(torch.equal(part, all_[250:]) for part, all_ in zip(beside, whole, strict=True))


@needs_machine
@LAYOUTS
@pytest.mark.parametrize("everything", [False, True])
def test_hidden_states_are_fused_where_they_lie(layout: str, everything: bool, team: Team, tmp_path: Path) -> None:
    """Rows of two steps, in any order, one of them by an eager forward."""
    model = target()
    head = load(eagle_folder(tmp_path / "head", layout), model)
    head = with_everything(head) if everything else head
    pack(team, team, head)
    native, eager = CompiledHead(team, head), EagerHead(head)
    model.layers[:] = [packed_layer(team, team, layer) for layer in model.layers]
    model.head = PackedHead(team, team, model.head)
    steps = []
    for begin, forward in ((0, CompiledForward(team, model)), (9, CompiledForward(team, model)), (9, model.forward)):
        taps, runner = Taps(head.config.taps), ModelRunner(model, pages=2, page_size=16)
        runner.use(forward)
        runner.forward([Span.chunk(range(begin, begin + 9), [1, 0], 0, sample_last=True)], taps=taps)
        steps.append(taps)
    first, second, plain = steps
    tapped = [Tapped(first, [0, 2, 3]), Tapped(first, range(7, 9)), Tapped(second, [8, 1])]
    fused = native.fuse(tapped).clone()
    assert fused.shape == (7, head.config.layer.hidden_size)
    assert torch.equal(fused, eager.fuse(tapped))
    assert torch.equal(fused[5:], native.fuse(tapped[2:]))
    assert torch.equal(native.fuse([*tapped, Tapped(plain, [4])])[:7], fused)
    assert all(
        torch.equal(one, other)
        for one, other in zip(first.hidden, first.features.chunk(len(first.layers), -1), strict=True)
    )


@needs_machine
def test_a_layer_reads_rows_of_the_last(team: Team, tmp_path: Path) -> None:
    head = load(eagle_folder(tmp_path / "head", AUTHORS), target())
    pack(team, team, head)
    hidden = noise(5, 64) * 6
    outcomes = []
    for forward in (CompiledHead(team, head), EagerHead(head)):
        runner = HeadRunner(head, pages=2, page_size=16)
        runner.use(forward)
        g, _ = runner.forward([Span.chunk(range(5), [1], 0, sample_last=True, sample_all=True)], [0], hidden)
        layers = []
        for layer, rows in enumerate(([4, 4, 1], [2, 0, 0])):
            bits = [1 << i | (1 << i + 3) * layer for i in range(3)]
            span = Span([3, 4, 5], [1], 5, [layer] * 3, bits, range(3), first_key=3 * layer)
            given = g.index_select(0, torch.tensor(rows))
            g, logits = runner.forward([span], [0], g, rows)
            kept = g.clone(), logits.clone()
            again = runner.forward([span], [0], given)
            assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))
            g = kept[0]
            layers.append(kept[1])
        outcomes.append(torch.cat(layers))
    assert _deviation(*outcomes).max() < 0.1


@needs_machine
@pytest.mark.parametrize("layout", [AUTHORS, "eagle3-vllm"])
def test_best(layout: str, team: Team, tmp_path: Path) -> None:
    """Equal ones in order, rows that are not finite, fewer possible ones than are wanted; the target's ids."""
    head = load(eagle_folder(tmp_path / "head", layout), target())
    names = torch.arange(VOCAB) if head.vocabulary.ids is None else head.vocabulary.ids
    size = head.vocabulary.size
    pack(team, team, head)
    native = CompiledHead(team, head)
    logits = torch.randn((9, size), generator=torch.Generator().manual_seed(2)) * 20
    logits[1] = 3.0
    logits[2, 5:] = float("-inf")
    logits[3, 17], logits[4, -1], logits[5, 0], logits[6] = float("nan"), float("inf"), float("nan"), float("-inf")
    for k in (1, 7, size):
        tokens, values = map(torch.tensor, native.best(logits, k))
        assert values[3:7].isnan().all()
        for row in (0, 1, 7, 8):
            wanted = logits[row].sort(descending=True, stable=True)
            assert torch.equal(tokens[row], names[wanted.indices[:k]])
            expected = wanted.values[:k] - logits[row].logsumexp(-1)
            torch.testing.assert_close(values[row], expected, atol=1e-5, rtol=1e-5)
        assert (values[2, 5:] == float("-inf")).all() and values[2, :5].isfinite().all()
    assert native.best(logits[:0], 3) == ([], [])


def drafting(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[ModelRunner, EagleDrafter]:
    model = target(dtype)
    runner = ModelRunner(model, pages=64, page_size=16)
    drafter = EagleDrafter("head", load(folder, model), Noise(VOCAB), pages=64, page_size=16, depth=4, width=3)
    return runner, drafter


@needs_machine
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_is_adopted_and_drafts(
    library_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """The compiled target writes the same text with the compiled head's drafts as without any."""
    cached = Path(shutil.copy(library_path, tmp_path / "step.so"))
    for probe in (ModelProbe, HeadProbe):
        monkeypatch.setattr(probe, "seconds", lambda *_: {1: 1.0})
    runner, drafter = drafting(eagle_folder(tmp_path / "head", AUTHORS))
    assert Compilation([runner, *drafter.runners], threads=2, cached=cached).start().phase is Phase.READY
    assert isinstance(drafter._runner._forward, CompiledHead)
    assert runner.kv.native is not None
    assert isinstance(drafter._head.weights.fc, PackedLinear)
    assert not hasattr(drafter._head.output, "weight")  # there is one copy
    texts = [[(31 * i + 7 * n * i * i + n) % VOCAB for i in range(5 + 14 * n)] for n in range(5)]
    params = [SamplingParams(temperature=temperature, max_tokens=24, seed=n) for n in range(5)]
    engine = Engine(runner, PagePool(64), drafter, Noise(VOCAB), max_context=400, max_slots=3, max_step_tokens=40)
    requests = run(engine, texts, params)
    assert engine.stats.drafted > 50 and drafter.invalid == 0 and drafter._pool.owned == 0
    plain = Engine(runner, PagePool(64), NoDrafter(), Noise(VOCAB), max_context=400, max_slots=3, max_step_tokens=40)
    assert [request.output for request in requests] == [request.output for request in run(plain, texts, params)]


@needs_machine
@pytest.mark.parametrize("why", ["wrong", "slower", "out of memory"])
def test_goes_back(
    library_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """The target stays compiled, the head is as it was."""
    cached = Path(shutil.copy(library_path, tmp_path / "step.so"))
    runner, drafter = drafting(eagle_folder(tmp_path / "head", AUTHORS))
    head, weights, output = drafter._head, drafter._head.weights, drafter._head.output
    probe = HeadProbe(drafter._runner)
    expected = torch.cat(probe.logits(EagerHead(head)))
    times = iter([{1: 1.0, 8: 1.0}, {1: 0.5, 8: 1.1 if why == "slower" else 0.5}])
    monkeypatch.setattr(ModelProbe, "seconds", lambda *_: {1: 1.0})
    monkeypatch.setattr(HeadProbe, "seconds", lambda *_: next(times))
    right = CompiledHead.__call__
    if why == "wrong":
        monkeypatch.setattr(CompiledHead, "__call__", lambda *given: (right(*given)[0], right(*given)[1].flip(-1)))
    if why == "out of memory":

        def fail(*_):
            raise MemoryError

        monkeypatch.setattr("minispec.native.eagle.PackedOutput", fail)
    with caplog.at_level(logging.INFO, compiled.__name__):
        state = Compilation([runner, *drafter.runners], threads=2, cached=cached).start()
    assert state.phase is Phase.READY and cached.exists()
    said = {"wrong": "deviate", "slower": "compiled {1: 500.0, 8: 1100.0} ms", "out of memory": "MemoryError"}[why]
    assert "drafts run eagerly" in caplog.text and said in caplog.text
    assert head.weights is weights and head.output is output and type(output) is Head
    assert isinstance(drafter._runner._forward, EagerHead)
    assert torch.equal(torch.cat(probe.logits(drafter._runner._forward)), expected)


@needs_machine
def test_what_it_cannot_run(
    library_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = eagle_folder(tmp_path / "head", AUTHORS)
    head = load(folder, target())
    head.config = replace(head.config, layer=replace(head.config.layer, head_dim=24))
    assert "24" in (unsupported(head) or "")
    runner, _ = drafting(folder)
    _, wide = drafting(folder, torch.float32)
    monkeypatch.setattr(ModelProbe, "seconds", lambda *_: {1: 1.0})
    cached = Path(shutil.copy(library_path, tmp_path / "step.so"))
    with caplog.at_level(logging.INFO, compiled.__name__):
        assert Compilation([runner, *wide.runners], cached=cached).start().phase is Phase.READY
    assert "drafts run eagerly: it computes in bfloat16, the head in float32" in caplog.text
    assert isinstance(wide._runner._forward, EagerHead)

"""The compiled step: built once, atomically; checked, timed, and then used; equal to eager torch, and to itself in any
company."""

import logging
import shutil
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from minispec import compiled, compiled_probe
from minispec.batch import Span, StepBatch
from minispec.compiled import Compilation, _deviation
from minispec.compiled_probe import ModelProbe
from minispec.errors import ConfigError
from minispec.model import Llama, ModelConfig
from minispec.model.int8 import GROUP, BlockInt8Linear, Blocks, from_blocks, round_rows, to_blocks
from minispec.model.linear import Linear
from minispec.model.llama import Taps
from minispec.model.rope import RopeConfig
from minispec.native import build
from minispec.native.library import Library, Team
from minispec.native.model import CompiledForward, PackedHead, PackedLinear, packed_layer, plain_layer, unsupported
from minispec.runner import ModelRunner, Phase
from native_library import needs_machine

SHAPE = {
    "vocab_size": 301, "hidden_size": 96, "intermediate_size": 136, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2,
    "head_dim": 16, "max_position": 4096,
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "biases and qk norm": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True},
    "window": {"sliding_window": 40},
    "yarn": {"rope": RopeConfig(type="yarn", factor=4.0, original_max_position=64)},
    "wide heads, one for all": {"head_dim": 80, "num_kv_heads": 1, "hidden_size": 90},
}


def model(quantize: str = "none", **changes) -> Llama:
    config = ModelConfig(**SHAPE | changes)
    return Llama.random(config, device="cpu", dtype=torch.bfloat16, seed=3, std=0.15, quantize=quantize)


def compiled_forward(team: Team, llama: Llama) -> CompiledForward:
    llama.layers = [packed_layer(team, team, layer) for layer in llama.layers]
    llama.head = PackedHead(team, team, llama.head)
    return CompiledForward(team, llama)


def run(forward, runner: ModelRunner, spans: list[Span], **options) -> torch.Tensor:
    window = runner.model.config.sliding_window
    with torch.inference_mode():
        batch = StepBatch.build(spans, runner.kv.page_size, "cpu", window)
        return forward(batch, runner.kv, **options).clone()  # the next forward may write in the same place


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Size of the difference as a share of the size."""
    return ((got - expected).float().norm() / expected.float().norm()).item()


@needs_machine
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_agrees_with_eager(variant: str, quantize: str, team: Team) -> None:
    llama = model(quantize, **VARIANTS[variant])
    probe = ModelProbe(llama)
    eager = torch.cat(probe.logits(llama.forward))
    got = torch.cat(probe.logits(compiled_forward(team, llama)))
    deviation = _deviation(got, eager)
    assert deviation.median() < (0.05 if quantize == "int8" else 0.03)
    assert deviation.max() < 0.1
    # the eager forward goes on over the same weights
    assert _deviation(torch.cat(probe.logits(llama.forward)), eager).max() < 0.1


@needs_machine
@pytest.mark.parametrize("wanted", [(0, 2), (0, 1)], ids=["behind the last", "before it"])
def test_layers_taps_and_kv_agree_with_eager(wanted: tuple[int, ...], team: Team) -> None:
    llama = model()
    runners = [ModelRunner(llama, pages=6, page_size=16) for _ in range(2)]
    spans = [Span.chunk(range(5, 38), [4, 1, 2], 0, sample_last=True), Span.chunk([1, 2], [5], 0, sample_last=False)]
    for runner in runners:  # positions that are never written are compared too
        runner.kv.k.zero_(), runner.kv.v.zero_()
    eager_taps, taps = Taps(wanted), Taps(wanted)
    expected = run(llama.forward, runners[0], spans, layers=2, taps=eager_taps)
    got = run(compiled_forward(team, llama), runners[1], spans, layers=2, taps=taps)
    assert got.shape == (1, 301)
    assert _deviation(got, expected).max() < 0.05
    assert torch.equal(taps.hidden[0], eager_taps.hidden[0])
    assert apart(taps.features, eager_taps.features) < 0.02
    for ours, theirs in ((runners[1].kv.k, runners[0].kv.k), (runners[1].kv.v, runners[0].kv.v)):
        assert apart(ours, theirs) < 0.02
        assert not ours[2].any()  # the layer that was left out
        assert not ours[:, :, :16].any()  # page 0 belongs to nobody


@needs_machine
@pytest.mark.parametrize(
    ("changes", "quantize"),
    [
        ({}, "none"),
        ({"sliding_window": 300}, "none"),
        ({"sliding_window": 40}, "none"),
        ({"num_kv_heads": 6}, "none"),
        ({"num_kv_heads": 1, "head_dim": 80}, "none"),
        ({}, "int8"),
    ],
)
def test_a_rows_bits_depend_on_its_text_alone(team: Team, changes: dict[str, int], quantize: str) -> None:
    """Token by token, in a chunk, in a branching tree across a boundary of chunks, beside others: the same bits."""
    llama = model(quantize, **changes)
    forward = compiled_forward(team, llama)
    text = [(i * 131 + 7) % 301 for i in range(263)]

    def fresh(cached: int, pages: list[int]) -> ModelRunner:
        runner = ModelRunner(llama, pages=40, page_size=16)
        if cached:
            run(forward, runner, [Span.chunk(text[:cached], pages, 0, sample_last=False)])
        return runner

    pages = [*range(20, 38)]
    alone = fresh(250, pages)
    expected = torch.cat(
        [run(forward, alone, [Span.chunk([text[i]], pages, i, sample_last=True)]) for i in range(250, 263)]
    )

    together = fresh(0, pages)
    chunk = Span(text, pages, 0, range(263), None, range(250, 263))
    assert torch.equal(run(forward, together, [chunk]), expected)

    # the text is every other node; between them siblings that it does not take
    tokens, parents = [text[250]], [-1]
    for token in text[251:263]:
        before = max(len(tokens) - 2, 0)
        tokens += [token, (token + 1) % 301]
        parents += [before, before]
    ancestors, depths = [], []
    for i, parent in enumerate(parents):
        ancestors.append((ancestors[parent] if i else 0) | 1 << i)
        depths.append(depths[parent] + 1 if i else 0)
    tree = Span(tokens, list(reversed(pages)), 250, depths, ancestors, range(len(tokens)))
    branching = fresh(250, list(reversed(pages)))
    others = [Span.chunk(text[40:60], [1, 0], 0, sample_last=True), tree]
    logits = run(forward, branching, others)[1:]
    assert torch.equal(logits[[0, *range(1, 24, 2)]], expected)


def to_units(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows as multiples of a power of two each, the greatest of them of so many bits: float32."""
    unit = torch.exp2(torch.floor(torch.log2(x.float().abs().amax(-1, keepdim=True))) - (bits - 1))
    return torch.where(unit > 0, (x.float() / unit).round() * unit, 0.0)


def fixed_rows(x: torch.Tensor) -> torch.Tensor:
    """Activations [rows, in] as the compiled step rounds them beside weights of 16 bits; see weights.h."""
    grouped = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    return to_units(grouped, 11).flatten(1)[:, : x.shape[1]]


@needs_machine
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(52, 70), (64, 32), (2, 5), (34, 161)])
def test_packed_linear(outputs: int, inputs: int, paired: bool, team: Team) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((outputs, inputs), generator=generator).bfloat16()
    weight[1, :2] = torch.tensor([1000.0, 1.0])
    weight[0] = 0 if outputs == 2 else weight[0]
    bias = torch.randn(outputs, generator=generator).bfloat16()
    linear = PackedLinear(team, team, weight, bias, paired=paired)
    back = linear.unpacked(team)
    top = weight.abs().amax(1, keepdim=True).float()
    assert torch.equal(back[weight.abs() >= top / 128], weight[weight.abs() >= top / 128])
    assert ((back - weight).abs() <= top * 2**-15).all()
    assert torch.equal(to_units(weight, 15).bfloat16(), back)

    x = torch.randn((40, inputs), generator=generator).bfloat16()
    x[5], x[6, 1] = 0, 25_000
    whole = linear.apply(x, torch.float32)
    exact = fixed_rows(x).double() @ to_units(weight, 15).double().T + bias.double()
    torch.testing.assert_close(whole.double(), exact, atol=2e-5, rtol=1e-5)
    close = x.float() @ weight.float().T + bias.float()
    size = x.float().norm(dim=1, keepdim=True) * weight.float().norm(dim=1)
    assert ((whole - close).abs() <= 1e-3 * size + 1e-5).all()  # bfloat16 inputs themselves are 2e-3 off
    assert torch.equal(whole[5], bias.float())
    assert torch.equal(linear(x), whole.bfloat16())
    assert torch.equal(linear(x.view(5, 8, inputs)[:, ::3]), linear(x).view(5, 8, outputs)[:, ::3])  # strided rows
    assert linear(x[:0].view(0, 8, inputs)).shape == (0, 8, outputs)
    for rows in range(41):
        assert torch.equal(linear.apply(x[:rows], torch.float32), whole[:rows])
        assert torch.equal(linear.apply(x[rows:], torch.float32), whole[rows:])
    tiny = x[:3].float().mul(2.0**-100).bfloat16()
    assert torch.equal(linear.apply(tiny, torch.float32).isfinite().all(1), torch.ones(3, dtype=torch.bool))
    for bad in (float("nan"), float("inf"), float("-inf")):
        x[3, -1] = bad
        spoilt = linear.apply(x, torch.float32)
        assert not spoilt[3].isfinite().any()
        assert torch.equal(spoilt[[*range(3), *range(4, 40)]], whole[[*range(3), *range(4, 40)]])
        broken = weight.clone()
        broken[-1, -1] = bad
        packed = PackedLinear(team, team, broken, bias, paired=paired)
        assert not packed.apply(x[:3], torch.float32)[:, -1].isfinite().any()
        assert torch.equal(packed.apply(x[:3], torch.float32)[:, :-1], whole[:3, :-1])


@needs_machine
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(52, 70), (64, 32), (2, 5), (34, 161)])
def test_packed_int8_linear(outputs: int, inputs: int, paired: bool, team: Team) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = to_blocks(torch.randn((outputs, inputs), generator=generator))
    bias = torch.randn(outputs, generator=generator).bfloat16()
    linear = PackedLinear(team, team, blocks, bias, paired=paired)
    back = linear.unpacked(team)
    assert isinstance(back, Blocks)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(back, blocks, strict=True))
    x = torch.randn((40, inputs), generator=generator).bfloat16()
    x[5], x[6, 1] = 0, 25_000
    whole = linear.apply(x, torch.float32)
    exact = round_rows(x).double() @ from_blocks(blocks).double().T + bias.double()
    # whole numbers are summed exactly, blocks of them in float32
    torch.testing.assert_close(whole.double(), exact, atol=2e-5, rtol=1e-5)
    assert torch.equal(whole[5], bias.float())
    assert torch.equal(linear(x), whole.bfloat16())
    for rows in range(41):
        assert torch.equal(linear.apply(x[:rows], torch.float32), whole[:rows])
        assert torch.equal(linear.apply(x[rows:], torch.float32), whole[rows:])
    for bad in (float("nan"), float("inf"), float("-inf")):
        x[3, -1] = bad
        spoilt = linear.apply(x, torch.float32)
        assert not spoilt[3].isfinite().any()
        assert torch.equal(spoilt[[*range(3), *range(4, 40)]], whole[[*range(3), *range(4, 40)]])


@needs_machine
@pytest.mark.parametrize("vocab", [5, 8, 301])
def test_the_best_logits_of_an_int8_head_are_its_own_weights(vocab: int, team: Team) -> None:
    llama = model("int8", vocab_size=vocab)
    runner = ModelRunner(llama, pages=2, page_size=16)
    span = Span([1, 2, 3, 4], [0], 0, range(4), None, range(4))
    forward = compiled_forward(team, llama)
    taps = Taps((llama.config.num_layers,))
    got = run(forward, runner, [span], taps=taps)
    hidden = taps.features.float()
    normed = (hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + llama.config.rms_norm_eps)).bfloat16()
    normed = normed * llama.norm
    rough = llama.head.linear.apply(normed, torch.float32)
    exact = normed.float() @ llama.head.weight.float().T
    best = torch.zeros_like(rough, dtype=torch.bool).scatter_(1, rough.topk(min(8, vocab)).indices, True)
    torch.testing.assert_close(got, torch.where(best, exact, rough), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(llama.head(normed), got, atol=1e-4, rtol=1e-4)


@needs_machine
def test_int8_is_adopted_and_goes_back(library_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = Path(shutil.copy(library_path, tmp_path / "step.so"))
    runner = ModelRunner(model("int8"), pages=4, page_size=16)
    layer, x = runner.model.layers[0], torch.randn(3, 96).bfloat16()
    expected = layer.gate_up(x)
    times = iter([{1: 1.0}, {1: 2.0}])
    with monkeypatch.context() as patch:
        patch.setattr(ModelProbe, "seconds", lambda *_: next(times))
        assert Compilation([runner], cached=cached).start().phase is Phase.SLOWER
    assert type(runner.model.layers[0].gate_up) is BlockInt8Linear
    assert torch.equal(runner.model.layers[0].gate_up(x), expected)
    monkeypatch.setattr(ModelProbe, "seconds", lambda *_: {1: 1.0})
    assert Compilation([runner], cached=cached).start().phase is Phase.READY
    assert isinstance(runner.model.layers[0].gate_up, PackedLinear)
    assert apart(runner.model.layers[0].gate_up(x), expected) < 0.01


@needs_machine
def test_weights_go_there_and_back(team: Team) -> None:
    layer = model().layers[0]
    x = torch.randn(3, 96).bfloat16()
    expected = layer.gate_up(x)
    back = plain_layer(packed_layer(team, team, layer), team)
    assert type(back.gate_up) is Linear
    assert apart(back.gate_up(x), expected) < 2e-3  # small weights have lost their last bits


@needs_machine
def test_switches_while_running_and_is_cached(
    library_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "NICENESS", 0)  # of the background's thread
    (tmp_path / "minispec" / "compiled").mkdir(parents=True)
    monkeypatch.setattr(build, "build", lambda path: shutil.copy(library_path, path))
    monkeypatch.setattr(
        ModelProbe, "seconds", lambda *_: {1: 1.0}
    )  # as fast as eager: what is tested here is the switch
    llama = model()
    runner = ModelRunner(llama, pages=32, page_size=16)
    span = Span.chunk(range(30), [3, 4], 0, sample_last=True)
    eager = runner.forward([span])
    state = Compilation([runner]).start()
    assert state is runner.compile_state
    deadline = time.monotonic() + 60
    while state.phase in (Phase.BUILDING, Phase.CHECKING):
        assert _deviation(runner.forward([span]), eager).max() < 0.1
        assert time.monotonic() < deadline
        time.sleep(0.05)  # a request now and then
    assert state.phase is Phase.READY, state.reason
    assert _deviation(runner.forward([span]), eager).max() < 0.1
    assert isinstance(llama.layers[0].qkv, PackedLinear)
    assert build.library_path().exists()

    again = ModelRunner(model(), pages=32, page_size=16)
    monkeypatch.setattr(build, "compiler", lambda: None)  # nor is one needed
    assert Compilation([again]).start().phase is Phase.READY


@needs_machine
def test_what_is_no_faster_is_not_used(
    library_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([{1: 1.0, 16: 2.0}, {1: 0.5, 16: 2.1}])
    monkeypatch.setattr(ModelProbe, "seconds", lambda *_: next(times))
    cached = Path(shutil.copy(library_path, tmp_path / "step.so"))
    runner = ModelRunner(model(), pages=4, page_size=16)
    with caplog.at_level(logging.INFO, compiled.__name__):
        state = Compilation([runner], cached=cached).start()
    assert state.phase is Phase.SLOWER
    assert "run eagerly" in caplog.text
    assert type(runner.model.layers[0].down) is Linear
    assert runner._forward == runner.model.forward


@needs_machine
@pytest.mark.parametrize("why", ["slower", "wrong", "out of memory"])
def test_goes_back_while_running(library_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """The engine steps on over the weights that are being laid out anew, and then as they were."""
    callers: defaultdict[int, set[int]] = defaultdict(set)  # of each team

    class Watched(Library):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            for name in ("pack", "unpack", "linear", "forward"):
                setattr(self, name, partial(self._call, getattr(self, name)))

        @staticmethod
        def _call(function, team: int, *arguments) -> None:
            callers[team].add(threading.get_ident())
            function(team, *arguments)

    def fail(*_):
        raise MemoryError

    times = iter([{1: 1.0}, {1: 2.0 if why == "slower" else 0.5}])
    monkeypatch.setattr(ModelProbe, "seconds", lambda *_: next(times))
    monkeypatch.setattr(compiled, "Library", Watched)
    if why == "wrong":
        monkeypatch.setattr(compiled, "_deviation", lambda got, _: torch.full((len(got),), float("nan")))
    if why == "out of memory":
        monkeypatch.setattr(compiled_probe, "PackedHead", fail)
    cached = Path(shutil.copy(library_path, tmp_path / "step.so"))
    runner = ModelRunner(model(num_layers=8), pages=32, page_size=16)
    span = Span.chunk(range(30), [3, 4], 0, sample_last=True)
    eager = runner.forward([span])
    compilation = Compilation([runner], threads=2)
    background = threading.Thread(target=lambda: compilation._finish(cached, 0.0, background=True))
    background.start()
    while background.is_alive():
        assert _deviation(runner.forward([span]), eager).max() < 0.1
    background.join()
    assert compilation.state.phase is (Phase.SLOWER if why == "slower" else Phase.FAILED)
    assert all(len(threads) == 1 for threads in callers.values())
    assert all(type(layer.down) is Linear for layer in runner.model.layers)
    assert _deviation(runner.forward([span]), eager).max() < 0.03


@needs_machine
def test_callers_of_one_team_wait_for_each_other(team: Team) -> None:
    x = torch.randn((7, 96)).bfloat16()
    linear = PackedLinear(team, team, torch.randn((301, 96)).bfloat16())
    expected = linear(x)
    with ThreadPoolExecutor(4) as threads:
        assert all(torch.equal(got, expected) for got in threads.map(lambda _: linear(x), range(400)))


@needs_machine
def test_what_is_wrong_is_not_used(
    library_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cached = Path(shutil.copy(library_path, tmp_path / "step.so"))
    right = CompiledForward.__call__
    monkeypatch.setattr(CompiledForward, "__call__", lambda self, batch, kv: right(self, batch, kv).flip(-1))
    runner = ModelRunner(model(), pages=4, page_size=16)
    eager = ModelProbe(runner.model).logits(runner.model.forward)
    state = Compilation([runner], cached=cached).start()
    assert state.phase is Phase.FAILED
    assert "deviate" in state.reason
    assert "deviate" in caplog.text
    assert not cached.exists()
    for ours, theirs in zip(ModelProbe(runner.model).logits(runner._forward), eager, strict=True):
        assert _deviation(ours, theirs).max() < 0.03


@needs_machine
@pytest.mark.parametrize("content", [b"", b"not a library at all", None])
def test_a_bad_file_in_the_cache_is_left_and_removed(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached = tmp_path / "step.so"
    if content is None:  # a library, but not ours
        import _hashlib

        shutil.copy(_hashlib.__file__, cached)
    else:
        cached.write_bytes(content)
    runner = ModelRunner(model(), pages=4, page_size=16)
    assert Compilation([runner], cached=cached).start().phase is Phase.FAILED
    assert "steps run eagerly" in caplog.text
    assert not cached.exists()
    assert runner.forward([Span.chunk([1, 2], [0], 0, sample_last=True)]).isfinite().all()


@needs_machine
def test_threads_that_begin_later_keep_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []
    later = threading.Thread(target=lambda: (torch.ones(99999).sum(), seen.append(torch.get_num_threads())))
    monkeypatch.setattr(build, "build", lambda _: seen.append(torch.get_num_threads()) or fail())

    def fail() -> None:
        raise build.BuildError("no")

    try:
        torch.set_num_threads(2)
        compilation = Compilation([ModelRunner(model(), pages=4, page_size=16)])
        background = threading.Thread(target=compilation._background, args=(tmp_path / "step.so",))
        background.start(), background.join()
        later.start(), later.join()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    path = tmp_path / "cache" / "step.so"
    with pytest.raises(build.BuildError, match="status 3: no such flag"):
        build.build(path)
    assert list(path.parent.iterdir()) == []
    # what compiles and then fails its own test is no better
    broken.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho junk > "$2"\n')
    with pytest.raises(build.BuildError, match="self-test"):
        build.build(path)
    assert list(path.parent.iterdir()) == []


def test_the_name_holds_what_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = build.library_path()
    assert first == build.library_path()
    with monkeypatch.context() as patch:
        patch.setattr(build, "processor", lambda: ("another", frozenset(build.NEEDED)))
        assert build.library_path() != first
    with monkeypatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
        assert build.library_path() != first
    shutil.copytree(build.SOURCES, tmp_path / "native")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "native")
    assert build.library_path() == first
    (tmp_path / "native" / "gemm.h").write_text("// changed\n")
    assert build.library_path() != first


def test_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "processor", lambda: ("old", frozenset({"avx2"})))
    runner = ModelRunner(model(), pages=4, page_size=16)
    with caplog.at_level(logging.INFO, compiled.__name__):
        assert Compilation([runner]).start().phase is Phase.UNSUPPORTED
    assert "steps run eagerly" in caplog.text
    with pytest.raises(ConfigError, match="cannot be compiled here"):
        compiled.compile_ahead(None)
    monkeypatch.setattr(build, "obstacle", lambda: None)
    monkeypatch.setattr(build, "compiler", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "install g++" in Compilation([runner]).start().reason
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        compiled.compile_ahead(None)


def test_what_models_it_cannot_run() -> None:
    assert unsupported(model()) is None
    assert unsupported(model("int8")) is None
    assert "24" in (unsupported(model(head_dim=24)) or "")
    wide = Llama.random(ModelConfig(**SHAPE), device="cpu", dtype=torch.float32)
    assert "float32" in (unsupported(wide) or "")

"""What a training run's target computes in, and that its runners share one compiled step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minispec.compiled_probe import ModelProbe
from minispec.tokenizer import Tokenizer
from minispec.train import target as module
from minispec.train.generate import Generator
from minispec.train.prompts import Opening
from minispec.train.shards import ANSWER, GIVEN
from minispec.train.target import Numerics, Target, numerics
from native_library import needs_machine
from tiny_folders import tiny_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("wide") / "tiny", max_position=512, head_dim=16)


def machine(monkeypatch, *, amx: bool = False, obstacle: str | None = None, compiler: str | None = "g++") -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx, "avx512_bf16": True})
    monkeypatch.setattr(module.build, "obstacle", lambda: obstacle)
    monkeypatch.setattr(module.build, "compiler", lambda: compiler)
    monkeypatch.setattr(module.build, "library_path", lambda: Path("nowhere"))


def test_the_machine_decides_the_numerics(folder, tmp_path, monkeypatch):
    eager = Numerics(torch.float32, compiled=False, autocast=False)
    machine(monkeypatch)
    assert numerics(folder, CPU) == Numerics(torch.bfloat16, compiled=True, autocast=False)
    assert numerics(tiny_folder(tmp_path / "heads of 8"), CPU) == eager
    machine(monkeypatch, compiler=None)
    assert numerics(folder, CPU) == eager
    machine(monkeypatch, obstacle="another processor")
    assert numerics(folder, CPU) == eager
    machine(monkeypatch, amx=True)
    assert numerics(folder, CPU) == Numerics(torch.bfloat16, compiled=False, autocast=True)


def generated(target: Target, folder: Path, steps: int | None = None) -> list:
    """Conversations of a generator that has enough after ``steps``."""
    tokenizer = Tokenizer.from_folder(folder)
    generator = Generator(target, tokenizer, (0, 1, target.model.config.num_layers), seed=0, slots=4)
    left = iter(range(steps if steps is not None else 10_000))
    openings = [(i, Opening("chat", None, "Tell me", 8, complete=True)) for i in range(6)]
    return list(generator.stream(iter(openings), enough=lambda: next(left, None) is None))


@needs_machine
def test_what_writes_compiled_records_what_the_eager_step_does(folder, library_path, monkeypatch):
    monkeypatch.setattr(module.build, "library_path", lambda: library_path)
    times = iter([{1: 2.0}, {1: 1.0}])  # eager, compiled
    monkeypatch.setattr(ModelProbe, "seconds", lambda *_: next(times))
    compiled = Target.load(folder, CPU, Numerics(torch.bfloat16, True, False), 260)
    assert compiled.compiled
    eager = Target.load(folder, CPU, Numerics(torch.float32, False, False), 260)
    first, second = (compiled.runner(pages=2, page_size=16, max_context=32) for _ in range(2))
    assert first.step is second.step and first.kv is not second.kv
    for (_, a), (_, b) in zip(generated(compiled, folder, 12), generated(eager, folder, 12), strict=True):
        mine, other = a[0], b[0]
        given = int((mine.classes == GIVEN).sum())
        assert mine.tokens[:given].equal(other.tokens[:given])
        apart = (mine.features[:given].float() - other.features[:given].float()).norm()
        assert apart < 0.05 * other.features[:given].float().norm()


def test_half_an_answer_is_kept_as_far_as_it_goes(folder):
    target = Target.load(folder, CPU, Numerics(torch.float32, False, False), 260)
    whole, half = dict(generated(target, folder)), dict(generated(target, folder, 20))
    assert set(whole) == set(range(6)) and set(half) == set(range(4)), "four run at once"
    for index, samples in half.items():
        [sample] = samples
        entire = whole[index][0]
        length = len(sample.tokens)
        assert 8 <= int((sample.classes == ANSWER).sum()) <= 20 and length < len(entire.tokens)
        assert sample.tokens.equal(entire.tokens[:length]) and sample.classes.equal(entire.classes[:length])
        assert len(sample.features) == length - 1
        torch.testing.assert_close(sample.features, entire.features[: length - 1], rtol=0.02, atol=0.02)
    assert [samples for _, samples in generated(target, folder, 3)] == [[]] * 4, "too little of an answer"

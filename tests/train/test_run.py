"""``minispec train-draft`` from end to end on a tiny model: what it leaves behind, going on, and what it refuses."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minispec.config import EngineConfig
from minispec.drafters import shipped
from minispec.errors import ConfigError, ModelError
from minispec.load import load_engine
from minispec.request import SamplingParams
from minispec.train import generate, run
from minispec.train.folder import Recipe, RunFolder
from minispec.train.prompts import Opening, opening
from minispec.train.run import TrainOptions, _prompt, conversations, run_train_draft
from minispec.train.shards import ANSWER, GIVEN, WRITTEN, Shard
from minispec.train.trainer import Settings, Trainer
from tiny_folders import tiny_folder

TOKENS = 600


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shrink(monkeypatch)


def shrink(monkeypatch) -> None:
    for name, value in {
        "_SHARD": 8,
        "_SLOTS": {"cpu": 8},
        "_ROWS": {"cpu": 256},
        "_HELD_OUT": 4,
        "_REPORTED": 2,
        "_CHECKS": 2,
        "opening": _opening,
    }.items():
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(run.reporting, "TREES", (8,))
    monkeypatch.setattr(run.reporting, "_TOKENS", 8)
    monkeypatch.setattr(generate, "ANSWERS", ((0.5, 24), (1.0, 32)))


def _opening(seed: int, index: int) -> Opening:
    made = opening(seed, index)
    return Opening(made.kind, made.system, made.start[:24], 8)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("target") / "tiny", max_position=512)


@pytest.fixture(scope="module")
def kept(target, tmp_path_factory) -> Path:
    """A run to its end, which the tests only read; ``printed`` beside it is what it said."""
    out = tmp_path_factory.mktemp("kept") / "run"
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(said):
        shrink(monkeypatch)
        assert run_train_draft(options(target, out)) == 0
    out.with_name("printed").write_text(said.getvalue())
    return out


def options(target: Path, out: Path, **more) -> TrainOptions:
    return TrainOptions(target=str(target), out=out, vocabulary=100, **{"tokens": TOKENS, **more})


def interrupt(monkeypatch, after: int) -> None:
    """Ctrl-C just before step ``after`` + 1 of writing or training."""

    @contextlib.contextmanager
    def interruptible():
        questions = iter(range(after))
        yield lambda: next(questions, None) is None

    monkeypatch.setattr(run, "_interruptible", interruptible)


def drafted(target: Path, head: Path) -> int:
    """Tokens that the head drafts for a short request."""
    engine = load_engine(EngineConfig(target=str(target), draft=str(head), tree_budget=8))
    engine.add(engine.make_request([1, 2, 3], SamplingParams(max_tokens=12, temperature=0.0)))
    while engine.has_work:
        engine.step()
    return engine.stats.drafted


def test_a_run_leaves_a_head_a_report_and_a_picture(target, kept):
    report = json.loads(kept.with_name("printed").read_text().splitlines()[-1])
    assert report == json.loads((kept / "report.json").read_text())
    assert report["tokens"] >= TOKENS and report["steps"] >= 16
    assert set(report["acceptance_length"]) == {"chain", "tree 8", "tree 32 + ngram", "ngram"}
    assert all(length >= 1 for length in report["acceptance_length"].values())
    assert (kept / "curves.png").read_bytes().startswith(b"\x89PNG")

    tensors = load_file(kept / "model.safetensors")
    assert tensors["lm_head.weight"].shape == (100, 32) and tensors["d2t"].shape == (100,)
    ids = tensors["d2t"] + torch.arange(100)
    assert tensors["t2d"].shape == (260,) and tensors["t2d"].nonzero()[:, 0].equal(ids)
    config = json.loads((kept / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 100
    assert config[shipped.KEY]["fingerprint"] == shipped.fingerprint(target)
    assert drafted(target, kept) > 0


def test_training_goes_on_bit_for_bit_and_leaves_a_usable_head(target, kept, tmp_path, monkeypatch):
    again = tmp_path / "again"
    shutil.copytree(kept, again)
    for name in ("model.safetensors", "training/checkpoint.pt", "report.json"):
        (again / name).unlink()
    interrupt(monkeypatch, after=9)
    assert run_train_draft(options(target, again, resume=True)) == 130
    whole, halfway = load_file(kept / "model.safetensors"), load_file(again / "model.safetensors")
    assert not halfway["fc.weight"].equal(whole["fc.weight"])
    assert drafted(target, again) > 0
    monkeypatch.undo()
    monkeypatch.setattr(run, "_HELD_OUT", 4)
    monkeypatch.setattr(run, "_ROWS", {"cpu": 256})
    monkeypatch.setattr(run, "_CHECKS", 2)
    monkeypatch.setattr(run.reporting, "measure", lambda *_: {})
    assert run_train_draft(options(target, again, resume=True)) == 0
    for name, tensor in load_file(again / "model.safetensors").items():
        assert tensor.equal(whole[name]), name


def test_writing_goes_on_with_the_same_conversations(target, kept, tmp_path, monkeypatch):
    interrupt(monkeypatch, after=90)
    assert run_train_draft(options(target, tmp_path / "out")) == 130
    files = list((tmp_path / "out" / "training").glob("shard-*"))
    assert files and not (tmp_path / "out" / "model.safetensors").exists()
    interrupt(monkeypatch, after=10_000)
    monkeypatch.setattr(run._Job, "train", lambda self: None)
    monkeypatch.setattr(run._Job, "report", lambda self: None)
    assert run_train_draft(options(target, tmp_path / "out", resume=True)) == 0
    for mine, whole in zip(
        *(sorted((out / "training").glob("shard-*")) for out in (tmp_path / "out", kept)), strict=True
    ):
        tag = json.loads((kept / "training" / "run.json").read_text())["recipe"]
        tag = Recipe(**tag).tag
        for a, b in zip(Shard.load(mine, tag).samples, Shard.load(whole, tag).samples, strict=True):
            assert a.tokens.equal(b.tokens) and a.classes.equal(b.classes)
            torch.testing.assert_close(a.features, b.features, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_deleted_of_the_text_is_written_again(target, kept, tmp_path, monkeypatch, whole):
    """A broken file somewhere in it, or all of them; before all is written or behind that."""
    shutil.copytree(kept, tmp_path / "out")
    folder = tmp_path / "out" / "training"
    files = sorted(folder.glob("shard-*"))
    assert len(files) > 1
    for file in files if whole else files[:1]:
        file.unlink()
    if not whole:
        data = json.loads((folder / "run.json").read_text())
        del data["notes"]["generated"]
        (folder / "run.json").write_text(json.dumps(data))
    monkeypatch.setattr(run._Job, "train", lambda self: None)
    monkeypatch.setattr(run._Job, "report", lambda self: None)
    assert run_train_draft(options(target, tmp_path / "out", resume=True)) == 0
    tag = Recipe(**json.loads((folder / "run.json").read_text())["recipe"]).tag
    for file, original in zip(files, sorted((kept / "training").glob("shard-*")), strict=True):
        for a, b in zip(Shard.load(file, tag).samples, Shard.load(original, tag).samples, strict=True):
            assert a.tokens.equal(b.tokens)
    assert sorted(folder.glob("shard-*")) == files


def test_samples_are_what_the_target_wrote(target, kept):
    """Classes tell the template and the given words from what was written, and every row has its hidden states."""
    data = json.loads((kept / "training" / "run.json").read_text())["recipe"]
    samples = RunFolder.open(kept, Recipe(**data), resume=True).samples()
    for sample in samples:
        assert len(sample.tokens) == len(sample.classes) == len(sample.features) + 1
        kinds = sample.classes.unique_consecutive().tolist()
        assert kinds in ([GIVEN, WRITTEN, GIVEN, ANSWER], [GIVEN, ANSWER]), kinds
        assert sample.features.isfinite().all()


def test_minutes_decide_once(target, tmp_path, monkeypatch):
    monkeypatch.setattr(run._Job, "report", lambda self: None)
    assert run_train_draft(options(target, tmp_path, tokens=None, minutes=0.15)) == 0
    notes = json.loads((tmp_path / "training" / "run.json").read_text())["notes"]
    assert notes["generated"] and notes["tokens"] > 0 and notes["steps"] >= 8


def test_going_on_keeps_the_number_of_threads(target, kept, tmp_path, monkeypatch):
    shutil.copytree(kept, tmp_path / "again")
    file = tmp_path / "again" / "training" / "run.json"
    data = json.loads(file.read_text())
    assert data["notes"]["threads"] == torch.get_num_threads()
    data["notes"]["threads"] = 2
    file.write_text(json.dumps(data))
    monkeypatch.setattr(run._Job, "train", lambda self: None)
    monkeypatch.setattr(run._Job, "report", lambda self: None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert run_train_draft(options(target, tmp_path / "again", resume=True)) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_prompts_of_a_file_are_answered(target, tmp_path, monkeypatch):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "One two three"}\n{"prompt": "Four"}\n')
    monkeypatch.setattr(run._Job, "train", lambda self: None)
    monkeypatch.setattr(run._Job, "report", lambda self: None)
    assert run_train_draft(options(target, tmp_path / "out", prompts=file, tokens=100)) == 0
    data = json.loads((tmp_path / "out" / "training" / "run.json").read_text())["recipe"]
    samples = RunFolder.open(tmp_path / "out", Recipe(**data), resume=True).samples()
    for text in (b"user\nOne two three\n", b"user\nFour\n"):
        given = [bytes(t for t in s.tokens[s.classes == GIVEN].tolist() if t < 256) for s in samples]
        [found, *more] = [s for s, prompt in zip(samples, given, strict=True) if text in prompt]
        assert WRITTEN not in found.classes and all(_prompt(s) == _prompt(found) for s in more)


def test_conversations_are_held_out_whole(target, kept):
    data = json.loads((kept / "training" / "run.json").read_text())["recipe"]
    samples = RunFolder.open(kept, Recipe(**data), resume=True).samples()
    grouped = conversations(samples)
    assert [s for group in grouped for s in group] == samples and 1 < len(grouped) < len(samples)
    assert all(len({tuple(_prompt(s)) for s in group}) == 1 for group in grouped)
    # an answer at temperature 0, and at most one at another
    assert {len(group) for group in grouped} == {1, 2}


def test_training_goes_on_with_a_head(target, kept, tmp_path, monkeypatch):
    """It begins as good as it was, with all of training-time test; here on the text that it knows."""
    out, file = tmp_path / "out", tmp_path / "out" / "training" / "run.json"
    shutil.copytree(kept / "training", out / "training")
    before = torch.load(out / "training" / "checkpoint.pt", weights_only=True)["checks"]
    (out / "training" / "checkpoint.pt").unlink()
    data = json.loads(file.read_text())
    own = data["recipe"]["start"] = hashlib.sha256((kept / "model.safetensors").read_bytes()).hexdigest()
    data["notes"] = {k: v for k, v in data["notes"].items() if k not in ("steps", "epoch", "checks")}
    file.write_text(json.dumps(data))
    settings = []
    monkeypatch.setattr(run, "Trainer", lambda *made: settings.append(made[2]) or Trainer(*made))
    monkeypatch.setattr(run, "_EPOCHS", 1)
    assert run_train_draft(options(target, out, resume=True, start=str(kept))) == 0
    (_, _, chain, loss), *_ = torch.load(out / "training" / "checkpoint.pt", weights_only=True)["checks"]
    assert (loss, chain) == pytest.approx((before[-1][3], before[-1][2]), rel=0.02)
    assert before[0][3] - loss > 5 * abs(before[-1][3] - loss), "no better than a head that begins with nothing"
    assert settings[-1].onset == (0.0, 0.0, 0.0, 0.0) and settings[-1].rate < Settings(1).rate
    assert json.loads((out / "report.json").read_text())["from"] == own
    assert json.loads((out / "config.json").read_text())["minispec_training"]["from"] == own
    assert drafted(target, out) > 0


def test_the_head_gone_on_with_is_part_of_the_run(target, kept, tmp_path, monkeypatch, caplog):
    for part in ("generate", "train", "report"):
        monkeypatch.setattr(run._Job, part, lambda self: None)
    with pytest.raises(ModelError, match="--from nonsuch: There is no model"):
        run_train_draft(options(target, tmp_path / "out", start="nonsuch"))
    assert run_train_draft(options(target, tmp_path / "out", start=str(kept))) == 0
    assert "was trained on the text that the target writes with --seed 0; another --seed" in caplog.text
    assert run_train_draft(options(target, tmp_path / "out", start=str(kept), resume=True)) == 0
    with pytest.raises(ConfigError, match=r"has another --from \('[0-9a-f]{64}', now None\)"):
        run_train_draft(options(target, tmp_path / "out", resume=True))
    with pytest.raises(ConfigError, match=r"has another --from \(None, now '"):
        run_train_draft(options(target, kept, resume=True, start=str(kept)))
    # a run from before there was such an option
    shutil.copytree(kept, tmp_path / "old")
    file = tmp_path / "old" / "training" / "run.json"
    data = json.loads(file.read_text())
    del data["recipe"]["start"]
    file.write_text(json.dumps(data))
    assert run_train_draft(options(target, tmp_path / "old", resume=True)) == 0


def test_what_cannot_be_is_said(target, tmp_path):
    with pytest.raises(ConfigError, match="give one of them"):
        run_train_draft(options(target, tmp_path, minutes=1))
    with pytest.raises(ModelError, match="There is no model 'nonsuch'"):
        run_train_draft(TrainOptions(target="nonsuch", out=tmp_path))
    with pytest.raises(ConfigError, match="no training run in"):
        run_train_draft(options(target, tmp_path, resume=True))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "fine"}\n{"text": "not"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        run_train_draft(options(target, tmp_path, prompts=bad))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        run_train_draft(options(target, file / "out"))


def test_another_run_is_neither_overwritten_nor_gone_on_with(target, kept, tmp_path):
    with pytest.raises(ConfigError, match="--resume to go on"):
        run_train_draft(options(target, kept))
    with pytest.raises(ConfigError, match=r"another seed \(0, now 5\)"):
        run_train_draft(options(target, kept, resume=True, seed=5))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="holds a head already; give another --out"):
        run_train_draft(options(target, tmp_path))

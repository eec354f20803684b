"""Which shipped head belongs to which model, and what ``--draft auto`` makes of it."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec.config import EngineConfig
from minispec.drafters import build, shipped
from minispec.load import load_engine
from minispec.model.llama import Llama
from minispec.train.head import TrainableHead
from minispec.train.shards import ANSWER, Sample
from tiny_folders import tiny_folder


@pytest.fixture
def target(tmp_path) -> Path:
    return tiny_folder(tmp_path / "model")


def ship(place: Path, target: Path, name: str = "model-eagle3") -> Path:
    """A head for ``target``, untrained."""
    model = Llama.load(target, device="cpu", dtype=torch.float32)
    features = torch.randn(64, 3 * 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    text = Sample(torch.arange(65) % 50, torch.full((65,), ANSWER, dtype=torch.uint8), features)
    head = TrainableHead.start(model, torch.arange(50), (0, 1), [text], seed=0)
    folder = place / name
    folder.mkdir(parents=True)
    head.save(folder, model.config, {shipped.KEY: {"name": "model", "fingerprint": shipped.fingerprint(target)}})
    return folder


def test_a_fingerprint_is_of_the_weights_not_of_how_they_are_stored(target, tmp_path):
    own = shipped.fingerprint(target)
    weights = load_file(target / "model.safetensors")
    copy = tiny_folder(tmp_path / "copy")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, copy / "model.safetensors")
    assert shipped.fingerprint(copy) == own
    tuned = dict(weights)
    tuned["model.layers.1.mlp.down_proj.weight"] = weights["model.layers.1.mlp.down_proj.weight"] * 1.1
    save_file(tuned, copy / "model.safetensors")
    assert shipped.fingerprint(copy) != own
    data = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**data, "num_attention_heads": 8, "head_dim": 4}))
    assert shipped.fingerprint(target) != own


@pytest.mark.parametrize("installed", [False, True])
def test_auto_is_the_head_of_this_model_beside_ngram(target, tmp_path, monkeypatch, installed):
    place = tmp_path / "prefix" / "share" / "minispec" / "heads" if installed else tmp_path / "weights"
    monkeypatch.setenv("MINISPEC_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    assert build.settled("auto", target) == "auto" and shipped.find(target) is None
    folder = ship(place, target)
    assert shipped.find(target) == folder
    assert build.settled("auto", target) == "model-eagle3,ngram"
    assert build.settled("none", target) == "none"
    build.check("auto", target, 64)
    engine = load_engine(EngineConfig(target=str(target), draft="auto"))
    assert [member.name for member in engine.drafter.members] == ["model-eagle3", "ngram"]
    assert load_engine(EngineConfig(target=str(target), draft="model-eagle3")).drafter.name == "model-eagle3"


def test_another_model_gets_ngram_alone(target, tmp_path, monkeypatch):
    monkeypatch.setenv("MINISPEC_WEIGHTS", str(tmp_path / "weights"))
    ship(tmp_path / "weights", target)
    other = tiny_folder(tmp_path / "other", seed=1)
    assert shipped.find(other) is None
    assert load_engine(EngineConfig(target=str(other), draft="auto")).drafter.name == "ngram"


def test_folders_that_are_no_heads_are_passed_over(target, tmp_path, monkeypatch):
    monkeypatch.setenv("MINISPEC_WEIGHTS", str(tmp_path / "weights"))
    for name, text in {"a": "{}", "b": "[", "c": '{"minispec_target": 3}', "d": '{"minispec_target": {}}'}.items():
        (tmp_path / "weights" / name).mkdir(parents=True)
        (tmp_path / "weights" / name / "config.json").write_text(text)
    assert shipped.find(target) is None
    folder = ship(tmp_path / "weights", target)
    assert shipped.find(target) == folder


SHIPPED = [path.parent for path in sorted((Path(__file__).parents[2] / "weights").glob("*-eagle3/config.json"))]


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_a_shipped_head_is_the_one_described(folder):
    file = folder / "model.safetensors"
    assert file.stat().st_size <= 40_000_000
    assert hashlib.sha256(file.read_bytes()).hexdigest() in (folder.parent / "README.md").read_text()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and len(config[shipped.KEY]["fingerprint"]) == 64
    tensors = load_file(file)
    ids = tensors["d2t"] + torch.arange(config["draft_vocab_size"])
    assert tensors["t2d"].nonzero()[:, 0].equal(ids) and tensors["t2d"].shape == (config["vocab_size"],)
    assert all(tensor.isfinite().all() for name, tensor in tensors.items() if name not in ("d2t", "t2d"))
    pyproject = (folder.parents[1] / "pyproject.toml").read_text()
    assert f"share/minispec/heads/{folder.name}" in pyproject, "an installed package would lack it"

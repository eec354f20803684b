"""Heads that training goes on with: what is kept of them, what is the target's, and which are refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec.drafters import shipped
from minispec.errors import ModelError
from minispec.train.data import choose_vocabulary
from minispec.train.head import TrainableHead
from minispec.train.origin import Origin
from minispec.train.trainer import Settings, Trainer
from tiny_folders import tiny_folder
from tiny_heads import eagle_folder, head_target
from tiny_training import TAPS, texts, trainer


@pytest.fixture(scope="module")
def made() -> tuple[Trainer, list]:
    """Training to its end, and what was held out."""
    result, held_out = trainer(Settings(steps=60, rate=4e-3, rows=256, negatives=16))
    while not result.done:
        result.advance()
    return result, held_out


@pytest.fixture
def folder(made, tmp_path) -> Path:
    (tmp_path / "head").mkdir()
    made[0].head.save(tmp_path / "head", head_target().config)
    return tmp_path / "head"


def load(folder: Path, **target) -> Origin:
    return Origin.load(str(folder), replace(head_target().config, **target), TAPS)


def change(folder: Path, config: dict | None = None, **tensors: torch.Tensor) -> None:
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, **(config or {})}))
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **tensors}, folder / "model.safetensors")


def test_a_head_that_nothing_is_done_to_is_the_same_checkpoint(made, folder, tmp_path):
    """Whatever the scale of the text at hand; the output layer is for the tokens of that text."""
    others = texts(seed=5)
    for sample in others:
        sample.features.mul_(3)
    ids = choose_vocabulary(others, head_target(), 60)
    head = TrainableHead.go_on(load(folder), head_target(), ids, others)
    assert not torch.allclose(head.scale, made[0].head.scale, rtol=0.5)
    (tmp_path / "again").mkdir()
    head.save(tmp_path / "again", head_target().config)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert before.keys() == after.keys() and after["lm_head.weight"].shape[0] == 60
    for name in before.keys() - {"lm_head.weight", "d2t", "t2d"}:
        assert after[name].equal(before[name]), name
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "again")]
    assert configs[1] == {**configs[0], "draft_vocab_size": 60}


def test_it_begins_as_good_as_it_was(made, folder):
    old, held_out = made
    head = TrainableHead.go_on(load(folder), head_target(), old.head.ids, texts(seed=5))
    assert all(p.dtype == torch.float32 and p.requires_grad for p in head.parameters.values())
    again = Trainer(head, old.examples, Settings(steps=4, rows=256, negatives=16))
    was, fresh = old.evaluate(held_out), trainer()[0].evaluate(held_out)
    begun = again.evaluate(held_out)
    assert begun.loss == pytest.approx(was.loss, rel=0.01) and begun.chain == pytest.approx(was.chain, rel=0.02)
    assert fresh.loss - was.loss > 10 * abs(begun.loss - was.loss)
    while not again.done:
        again.advance()
    assert again.evaluate(held_out).loss != begun.loss


def test_heads_of_any_target_of_like_sizes_will_do(folder):
    notes = {shipped.KEY: {"name": "base", "fingerprint": "ab"}, "minispec_training": {"seed": 7}}
    change(folder, notes, **{"embed_tokens.weight": torch.zeros(head_target().embedding.shape)})
    origin = load(folder)
    assert (origin.target, origin.seed) == ("ab", 7)
    change(folder, {shipped.KEY: "odd", "minispec_training": None})
    assert (load(folder).target, load(folder).seed) == (None, None)


def test_a_head_is_found_by_its_name(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MINISPEC_WEIGHTS", str(tmp_path))
    assert load(Path("head")).sha256 == load(folder).sha256
    change(folder, {shipped.KEY: {"name": "m", "fingerprint": "ab"}})
    place = tmp_path / "share" / "minispec" / "heads"
    place.mkdir(parents=True)
    folder.rename(place / "m-eagle3")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert load(Path("m-eagle3")).target == "ab"


@pytest.mark.parametrize(
    ("layout", "found"),
    [
        ("eagle1-sglang", "a head of kind EAGLE is there, and training goes on with EAGLE-3"),
        ("eagle3-authors", "layers 0, 1, 2 tapped instead of 0, 1, which"),
        ("eagle3-borrowing", r"tapped instead of 0, 1, biases \(fc.bias\)"),
        ("speculators", r"its norm before the residual \(norm_before_residual\), a norm before fc \(input_norm"),
    ],
)
def test_heads_of_other_makes_are_refused(tmp_path, layout, found):
    with pytest.raises(ModelError, match=f"--from .*{found}.*leave --from out"):
        load(eagle_folder(tmp_path / "head", layout))


@pytest.mark.parametrize(
    ("config", "tensor", "found"),
    [
        ({"num_hidden_layers": 2}, None, "has 2 layers instead of one, which cannot"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None, "RoPE of type linear"),
        ({}, "midlayer.self_attn.q_proj.bias", r"biases \(layers.0.self_attn.q_proj.bias\)"),
        ({}, "midlayer.self_attn.q_norm.weight", "norms of queries and keys"),
        ({"hidden_size": 32, "target_hidden_size": 64}, None, "the head is of size 32, the target of 64"),
        ({"hidden_size": 32, "target_hidden_size": 32}, None, "hidden states of size 32, the target's have 64"),
        ({"vocab_size": 500}, None, "vocabulary of 500, the target's is 512"),
        ({"eagle_config": [1]}, None, r"eagle_config in config.json must be an object, not \[1\]"),
        ({"eagle_aux_hidden_state_layer_ids": 1}, None, "layer_ids in config.json must be a list of layers, not 1"),
        ({"intermediate_size": 8}, None, r"mlp.gate_proj.weight is \[\d+, 64\] instead of \[8, 64\]"),
    ],
)
def test_what_a_head_in_training_cannot_be_is_said(folder, config, tensor, found):
    change(folder, config, **({tensor: torch.ones(64)} if tensor else {}))
    with pytest.raises(ModelError, match=found):
        load(folder)


def test_a_broken_head_is_no_beginning(folder):
    """No step of training would be finite."""
    change(folder, **{"norm.weight": torch.full((64,), float("nan"))})
    with pytest.raises(ModelError, match=r"not finite \(norm\).*leave --from out"):
        load(folder)


def test_a_model_is_no_head(tmp_path):
    with pytest.raises(ModelError, match="no draft head is there"):
        load(tiny_folder(tmp_path / "model"))

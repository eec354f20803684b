"""Folders of draft heads: which kind they are, what they may lack, and what is refused with a remedy."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec.drafters.eagle import EagleDrafter
from minispec.drafters.eagle_head import EagleConfig, load_eagle_head
from minispec.drafters.heads import EAGLE, EAGLE3, head_kind, load_head
from minispec.errors import ModelError
from minispec.model.llama import Llama
from minispec.sampling import Noise
from tiny_engine import VOCAB, tiny_model
from tiny_heads import DRAFT_VOCAB, EAGLE_LAYOUTS, HIDDEN, MEDUSA_LAYOUTS, eagle_folder, medusa_folder

LAYOUTS = pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
EAGLE3_LAYOUT = "eagle3-authors"


@LAYOUTS
def test_layouts_are_recognised(tmp_path, layout):
    folder = eagle_folder(tmp_path / "head", layout)
    assert head_kind(folder) == (EAGLE if layout.startswith("eagle1") else EAGLE3)
    drafter = load_head("some/head", folder, tiny_model(0), Noise(VOCAB), pages=8, page_size=16)
    assert isinstance(drafter, EagleDrafter) and drafter.name == "some/head"


def test_a_model_is_no_head(tmp_path):
    assert head_kind(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert head_kind(tmp_path) is None
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert head_kind(tmp_path) is None
    assert load_head("x", tmp_path, tiny_model(0), Noise(VOCAB), pages=8, page_size=16) is None


@pytest.mark.parametrize(
    ("data", "taps"),
    [
        ({}, (2, 15, 27)),
        ({"eagle_aux_hidden_state_layer_ids": [29, 1, 7]}, (1, 7, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}, (2, 15, 27)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 15, 27)),
    ],
)
def test_tapped_layers(data, taps):
    """The inner key names layers whose outputs are read, the outer one those whose inputs are."""
    target = tiny_model(0, layers=30).config
    base = EAGLE_LAYOUTS[EAGLE3_LAYOUT][0]
    data = {**{k: v for k, v in base.items() if not k.startswith("eagle_")}, **data}
    assert EagleConfig.from_json(data, 3, target).taps == taps


def test_what_the_folder_lacks_is_borrowed_and_said(tmp_path, caplog):
    caplog.set_level("INFO")
    target = tiny_model(0)
    folder = eagle_folder(tmp_path / "head", "eagle3-borrowing")
    head = load_eagle_head(folder, json.loads((folder / "config.json").read_text()), 3, target)
    assert head.weights.embedding is target.embedding
    assert "no embedding: the target's" in caplog.text and "no lm_head: the target's" in caplog.text


def test_a_tie_is_not_believed_against_the_weights(tmp_path):
    folder = eagle_folder(tmp_path / "head", EAGLE3_LAYOUT)
    data = {**EAGLE_LAYOUTS[EAGLE3_LAYOUT][0], "tie_word_embeddings": True}
    head = load_eagle_head(folder, data, 3, tiny_model(0))
    torch.testing.assert_close(head.output.weight, load_file(folder / "model.safetensors")["lm_head.weight"])


def test_padding_of_the_targets_vocabulary_is_not_drafted(tmp_path):
    folder = eagle_folder(tmp_path / "head", EAGLE3_LAYOUT)
    target = tiny_model(0)
    narrow = Llama.random(target.config, device="cpu", dtype=torch.float32)
    narrow.vocab_size = 300
    head = load_eagle_head(folder, EAGLE_LAYOUTS[EAGLE3_LAYOUT][0], 3, narrow)
    ids = load_file(folder / "model.safetensors")["d2t"] + torch.arange(DRAFT_VOCAB)
    assert head.vocabulary.size == int((ids < 300).sum()) == head.output.vocab_size < DRAFT_VOCAB


def changed(folder, change, name: str = "model.safetensors") -> None:
    weights = load_file(folder / name)
    change(weights)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / name)


def duplicate(weights) -> None:
    weights["d2t"][1] = weights["d2t"][0] - 1


def beyond(weights) -> None:
    weights["d2t"][-1] = VOCAB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: [w.pop(n) for n in ("fc.weight", "midlayer.hidden_norm.weight")], r"lack fc\.weight, layers"),
        (lambda w: w.pop("d2t"), r"100 rows, the target's vocabulary 512, and there is no d2t"),
        (duplicate, "d2t maps 1 ids to a token that another"),
        (beyond, r"outside the target's vocabulary of 512, the first 99 to 611"),
        (lambda w: w.update(d2t=w["d2t"][:50]), r"d2t is \[50\], but lm_head.weight has 100 rows"),
        (lambda w: w.update(d2t=w["d2t"].float()), "must hold whole numbers"),
        (lambda w: w.update({"fc.weight": w["fc.weight"][:, :128]}), r"is \[64, 128\] instead of \[64, 192\]"),
        (lambda w: w.update({"fc.weight": w["fc.weight"].to(torch.int8)}), r"fc\.weight \(I8\)"),
    ],
)  # fmt: skip
def test_broken_weights_are_refused(tmp_path, change, message):
    folder = eagle_folder(tmp_path / "head", EAGLE3_LAYOUT)
    changed(folder, change)
    with pytest.raises(ModelError, match=message):
        load_head("x", folder, tiny_model(0), Noise(VOCAB), pages=8, page_size=16)


def test_weights_without_a_place_are_named(tmp_path, caplog):
    folder = eagle_folder(tmp_path / "head", "eagle1-sglang")
    changed(folder, lambda w: w.update({"layers.0.input_layernorm.weight": torch.ones(HIDDEN)}))
    load_head("x", folder, tiny_model(0), Noise(VOCAB), pages=8, page_size=16)
    assert "no place for it: layers.0.input_layernorm.weight" in caplog.text


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (EAGLE3_LAYOUT, {"hidden_size": 128}, "size 128, the target's have 64"),
        (EAGLE3_LAYOUT, {"target_hidden_size": 32}, "size 32, the target's have 64"),
        ("eagle1-sglang", {"vocab_size": 640}, "vocabulary of 640, the target's is 512"),
        (EAGLE3_LAYOUT, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        (EAGLE3_LAYOUT, {"eagle_config": None}, "within 0 to 2"),
        (EAGLE3_LAYOUT, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 0]}}, "must differ"),
        ("speculators", {"speculators_model_type": "mlp"}, "'mlp' is not supported"),
    ],
)
def test_heads_for_another_target_are_refused(tmp_path, layout, change, message):
    folder = eagle_folder(tmp_path / "head", layout)
    (folder / "config.json").write_text(json.dumps({**EAGLE_LAYOUTS[layout][0], **change}))
    with pytest.raises(ModelError, match=message) as caught:
        load_head("x", folder, tiny_model(0), Noise(VOCAB), pages=8, page_size=16)
    assert str(folder) in str(caught.value)


def test_pickles_are_never_opened(tmp_path):
    folder = eagle_folder(tmp_path / "head", EAGLE3_LAYOUT)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert head_kind(folder) == EAGLE3
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model\.bin\).*save_file"):
        load_head("x", folder, tiny_model(0), Noise(VOCAB), pages=8, page_size=16)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("authors", lambda w: w.pop("1.0.linear.weight"), r"lack 1\.0\.linear\.weight"),
        ("authors", lambda w: w.pop("2.1.weight"), r"lack 2\.1\.weight"),
        ("authors", lambda w: w.update({"0.1.weight": torch.zeros(100, HIDDEN)}), "instead of"),
        ("vllm", lambda w: w.pop("token_map"), "100 rows, the target's vocabulary 512"),
        ("vllm", lambda w: w["token_map"].__setitem__(0, 600), "outside the target's vocabulary of 512"),
        ("named", lambda w: w.update({"medusa_lm_head.0.0.linear.weight": torch.zeros(32, 32)}), r"\[32, 32\] instead"),
    ],
)
def test_broken_medusa_weights_are_refused(tmp_path, layout, change, message):
    folder = medusa_folder(tmp_path / "head", layout)
    changed(folder, change, "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match=message):
        load_head("x", folder, tiny_model(0), Noise(VOCAB), pages=8, page_size=16)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("authors", {"medusa_num_heads": 0}, "number of heads"),
        ("authors", {"medusa_num_heads": 5}, r"lack 3\.0"),
        ("authors", {"medusa_num_layers": "1"}, "number of layers"),
        ("vllm", {"hidden_size": 128}, "size 128, the target's have 64"),
    ],
)
def test_medusa_heads_that_do_not_fit_are_refused(tmp_path, layout, change, message):
    folder = medusa_folder(tmp_path / "head", layout)
    (folder / "config.json").write_text(json.dumps({**MEDUSA_LAYOUTS[layout][0], **change}))
    with pytest.raises(ModelError, match=message) as caught:
        load_head("x", folder, tiny_model(0), Noise(VOCAB), pages=8, page_size=16)
    assert str(folder) in str(caught.value)


def test_medusa_outputs_that_are_missing_are_borrowed_and_said(tmp_path, caplog):
    caplog.set_level("INFO")
    load_head("x", medusa_folder(tmp_path / "head", "borrowing"), tiny_model(0), Noise(VOCAB), pages=8, page_size=16)
    assert "no output weights: the target's lm_head is used" in caplog.text

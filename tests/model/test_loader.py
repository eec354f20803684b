"""Broken, incomplete and unsafe checkpoints are refused from their headers, before anything is served."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minispec.batch import Span
from minispec.errors import ModelError
from minispec.model import Llama, ModelConfig, check_folder
from minispec.runner import ModelRunner
from tiny_models import build


def check(folder: Path) -> None:
    check_folder(folder, ModelConfig.from_folder(folder))


def logits(folder: Path, tokens: tuple[int, ...] = (1, 2, 3)) -> Tensor:
    model = Llama.load(folder, device="cpu", dtype=torch.float32)
    return ModelRunner(model, pages=4, page_size=4).forward([Span(tokens, [0], 0, (0, 1, 2), None, (0, 1, 2))])


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    """A copy of the plain model that a test may break."""
    return Path(shutil.copytree(tiny("default")[0], tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    build("Llama").save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) >= 3
    return tmp_path / "sharded"


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Replace or (None) delete tensors; ``__`` in a name stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def test_shards_load_like_one_file(folder: Path, sharded: Path) -> None:
    check(sharded)
    assert torch.equal(logits(sharded), logits(folder))


def test_an_absent_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name}.*Fetch"):
        check(sharded)


def test_a_broken_index_is_named(sharded: Path) -> None:
    for content in ("{", "[]", '{"weight_map": 3}'):
        (sharded / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ModelError, match=r"index\.json cannot be read"):
            check(sharded)


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors\.index\.json"):
        check(sharded)


def test_a_tensor_in_no_shard_is_named(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shard = sharded / index["weight_map"]["model.norm.weight"]
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    with pytest.raises(ModelError, match=r"lack model\.norm\.weight"):
        check(sharded)


@pytest.mark.parametrize("change", [-100, +16])
def test_a_file_of_the_wrong_size_is_named_with_both_sizes(folder: Path, change: int) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(ModelError, match=rf"model\.safetensors.*{len(data)}.*{len(data) + change}"):
        check(folder)


@pytest.mark.parametrize("kept", [0, 4, 8, 100])
def test_a_stump_is_named_with_its_size(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=rf"model\.safetensors.*expected, {kept} found"):
        check(folder)


def test_a_header_that_is_not_json_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"\xff{]}" + bytes(64))
    with pytest.raises(ModelError, match=r"model\.safetensors has a broken header"):
        check(folder)


def test_all_missing_tensors_are_counted(folder: Path) -> None:
    edit(folder, model__layers__0__mlp__up_proj__weight=None, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.up_proj\.weight, lm_head\.weight"):
        check(folder)


def test_unconsumed_tensors_are_listed(folder: Path) -> None:
    edit(folder, model__layers__1__self_attn__q_proj__bias=torch.ones(64))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.q_proj\.bias"):
        check(folder)


def test_computed_buffers_are_tolerated(folder: Path) -> None:
    before = logits(folder)
    edit(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert torch.equal(logits(folder), before)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit(folder, model__layers__0__mlp__down_proj__weight=torch.ones(64, 95))
    with pytest.raises(ModelError, match=r"down_proj\.weight is \[64, 95\] instead of \[64, 96\]"):
        check(folder)


def test_quantised_weights_are_refused(folder: Path) -> None:
    edit(folder, model__layers__0__mlp__down_proj__weight=torch.ones(64, 96, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"down_proj\.weight \(I8\)"):
        check(folder)


def test_half_precision_files_load_in_any_dtype(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, folder / "model.safetensors")
    half = logits(folder)
    save_file({name: tensor.half().float() for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(logits(folder), half)


def test_a_tied_model_may_hold_a_copy_of_its_embedding(tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("tied")[0], tmp_path / "model"))
    before = logits(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit(folder, lm_head__weight=embedding.clone())
    model = Llama.load(folder, device="cpu", dtype=torch.float32)
    assert model.head.weight.data_ptr() == model.embedding.data_ptr()
    assert torch.equal(logits(folder), before)


@pytest.mark.parametrize("rows", [128, 100])
def test_a_head_that_differs_is_used_although_the_config_says_tied(
    tiny, tmp_path: Path, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    untied, _ = tiny("default")
    expected = logits(untied)
    folder = Path(shutil.copytree(untied, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    edit(folder, lm_head__weight=load_file(folder / "model.safetensors")["lm_head.weight"][:rows].clone())
    torch.testing.assert_close(logits(folder), expected[:, :rows])
    assert "tie_word_embeddings" in caplog.text


class _Creates:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickles_are_refused_and_never_opened(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Creates(tmp_path / "created")))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*save_pretrained"):
        check(folder)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        Llama.load(folder, device="cpu", dtype=torch.float32)
    assert not (tmp_path / "created").exists()


def test_a_pickle_beside_safetensors_does_no_harm(folder: Path, tmp_path: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Creates(tmp_path / "created")))
    logits(folder)
    assert not (tmp_path / "created").exists()


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights.*Fetch"):
        check(folder)

"""What ``--draft`` may say, and what comes of it."""

from __future__ import annotations

import json
import logging

import pytest

from minispec.config import EngineConfig
from minispec.drafters import build
from minispec.drafters.draft_model import DraftModelDrafter
from minispec.drafters.layer_skip import LayerSkipDrafter
from minispec.drafters.ngram import NgramDrafter
from minispec.drafters.suffix import SuffixDrafter
from minispec.drafters.translate import TranslatingDrafter
from minispec.drafters.union import UnionDrafter
from minispec.errors import ConfigError, ModelError
from minispec.load import load_engine, preflight
from scripted import generate
from tiny_folders import tiny_folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    turned = tiny_folder(root / "turned", seed=1)
    path = turned / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"] = {text: 255 - i for text, i in data["model"]["vocab"].items()}
    path.write_text(json.dumps(data))
    return {
        "target": tiny_folder(root / "target", layers=3),
        "draft": tiny_folder(root / "draft", seed=1),
        "turned": turned,
    }


def config(models, draft, **settings):
    defaults = {"device": "cpu", "dtype": "float32", "max_context": 96, "max_slots": 2, "page_size": 8}
    for name, folder in models.items():
        draft = draft.replace(f"<{name}>", str(folder))
    return EngineConfig(target=str(models["target"]), draft=draft, **{**defaults, **settings})


@pytest.mark.parametrize(
    ("draft", "members"),
    [
        ("none", ()),
        ("auto", (build.AUTO,)),
        ("ngram", ("ngram",)),
        ("suffix, ngram", ("suffix", "ngram")),
        ("layers:10,suffix,some/model", ("layers:10", "suffix", "some/model")),
    ],
)
def test_names(draft, members):
    assert build.parse(draft) == members


def test_a_folder_may_have_a_comma_in_its_name(tmp_path):
    folder = tmp_path / "one,two"
    folder.mkdir()
    assert build.parse(str(folder)) == (str(folder),)


def test_models_to_pull():
    assert build.model_names("suffix,layers:3,org/head,tiny") == ("org/head", "tiny")
    assert build.model_names("auto") == build.model_names("none") == ()


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("", "empty name"),
        ("ngram,", "empty name"),
        ("ngram,,suffix", "empty name"),
        ("none,ngram", "'none' with others"),
        ("suffix,auto", "'auto' with others"),
        ("ngram,suffix,ngram", "'ngram' twice"),
        ("layers:8,layers:08", "'layers:8' twice"),
        ("layers", "write layers:N"),
        ("layers=4", "write layers:N"),
        ("layers:", "no whole number"),
        ("layers:-1", "no whole number"),
        ("layers:two", "'two' is no whole number"),
        ("layers:0", "target of 3 layers: 1 to 2"),
        ("layers:3", "target of 3 layers: 1 to 2"),
        ("suffix,layers:7", "layers:7 does not fit a target of 3 layers"),
    ],
)
def test_what_is_refused_before_weights_are_read(models, draft, message):
    with pytest.raises(ConfigError, match=message):
        preflight(config(models, draft))


@pytest.mark.parametrize(("draft", "meant"), [("sufix", "suffix"), ("n-gram", "ngram"), ("ngram,suffx", "suffix")])
def test_did_you_mean(models, draft, meant):
    with pytest.raises(ModelError, match=f"did you mean --draft {meant}"):
        preflight(config(models, draft))


@pytest.mark.parametrize(
    ("draft", "kinds"),
    [
        ("suffix", [SuffixDrafter]),
        ("layers:1", [LayerSkipDrafter]),
        ("<draft>", [DraftModelDrafter]),
        ("<turned>", [TranslatingDrafter]),
        ("ngram,suffix", [NgramDrafter, SuffixDrafter]),
        ("layers:2,<turned>,<draft>,suffix", [LayerSkipDrafter, TranslatingDrafter, DraftModelDrafter, SuffixDrafter]),
    ],
)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "sampled"])
def test_drafters_from_names_to_text(models, draft, kinds, params):
    plain = load_engine(config(models, "none"))
    engine = load_engine(config(models, draft, tree_budget=24))
    drafter = engine.drafter
    members = drafter.members if isinstance(drafter, UnionDrafter) else [drafter]
    assert [type(member) for member in members] == kinds
    assert engine.description["draft"] == drafter.name == ",".join(member.name for member in members)
    for prompt in ([1, 2, 3], [5, 6, 7, 8] * 4):
        expected = generate(plain, prompt, max_tokens=30, ignore_eos=True, **params)
        assert generate(engine, prompt, max_tokens=30, ignore_eos=True, **params).output == expected.output
    assert engine.stats.drafted > 0
    assert engine.pool.owned == 0
    for member in members:
        if isinstance(member, DraftModelDrafter):
            assert member._pool.owned == 0


def test_a_draft_with_another_tokenizer_is_announced(models, caplog):
    with caplog.at_level(logging.WARNING):
        load_engine(config(models, "<turned>"))
    assert "260 strings that both know, 100.0% of" in caplog.text


def test_drafts_share_the_kv_memory(models):
    """Per position: the target's three layers, and two for each draft model; layer skip takes none."""
    position = 2 * 2 * 8 * 4  # keys and values, KV heads, head_dim, float32
    memory = 8 * 8 * 3 * position / 2**30
    tokens = {
        draft: load_engine(config(models, draft, kv_memory=memory)).description["kv_tokens"]
        for draft in ("none", "layers:1", "suffix", "<draft>", "<draft>,<turned>")
    }
    assert list(tokens.values()) == [64, 64, 64, 32, 24]


def test_defaults_are_the_targets(models, tmp_path):
    """A draft folder's sampling defaults decide nothing."""
    draft = tiny_folder(tmp_path / "draft", seed=1, generation={"temperature": 1.0, "top_k": 5, "do_sample": True})
    engine = load_engine(config({**models, "draft": draft}, "<draft>"))
    assert engine.default_params == {}

"""Drafts with another tokenizer: what is shared, how text crosses over, and that only the speed depends on it."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec.drafters.base import NoDrafter
from minispec.drafters.translate import TranslatingDrafter, Translation, relate
from minispec.engine import Engine
from minispec.errors import ModelError
from minispec.kv_cache import PagePool
from minispec.model.llama import Llama
from minispec.request import SamplingParams
from minispec.runner import ModelRunner
from minispec.sampling import Noise
from minispec.tokenizer import Tokenizer
from scripted import run
from tiny_folders import tiny_folder
from tokenizers_fixture import BOS, BYTE_VOCAB_SIZE, IM_START, SP_BOS, byte_tokenizer_folder, sentencepiece_folder

MODES = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95}, {"temperature": 1.0, "top_k": 3}]


def renumber(folder, new_ids):
    """Give the tokens of a folder's tokenizer other ids."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"] = {text: new_ids.get(i, i) for text, i in data["model"]["vocab"].items()}
    path.write_text(json.dumps(data))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    shuffled = list(range(256))
    random.Random(0).shuffle(shuffled)
    twin = renumber(tiny_folder(root / "twin"), dict(enumerate(shuffled)))
    weights = load_file(twin / "model.safetensors")
    order = torch.tensor([*shuffled, *range(256, BYTE_VOCAB_SIZE)]).argsort()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][order].contiguous()
    save_file(weights, twin / "model.safetensors")

    other = tiny_folder(root / "other", seed=3)
    sentencepiece_folder(other)
    vocab = Tokenizer.from_folder(other).vocab_size
    tiny_folder(other, seed=3, vocab=vocab)
    sentencepiece_folder(other)
    return {"target": tiny_folder(root / "target"), "twin": twin, "other": other}


def tokenizers(folders, *names):
    return [Tokenizer.from_folder(folders[name]) for name in names]


def engine_for(folders, draft=None, *, pages=64, target="target", **settings):
    tokenizer, model = Tokenizer.from_folder(folders[target]), folders[target]
    runner = ModelRunner(
        Llama.load(model, device="cpu", dtype=torch.float32, vocab_size=tokenizer.vocab_size), pages=pages, page_size=8
    )
    noise = Noise(runner.vocab_size)
    drafter = None
    if draft:
        theirs = Tokenizer.from_folder(folders[draft])
        translation = relate(tokenizer, theirs, draft)
        assert translation is not None
        draft_model = Llama.load(folders[draft], device="cpu", dtype=torch.float32, vocab_size=theirs.vocab_size)
        drafter = TranslatingDrafter(
            draft, ModelRunner(draft_model, pages=pages, page_size=8), PagePool(pages), noise, translation
        )
    return Engine(runner, PagePool(pages), drafter or NoDrafter(), noise, max_context=100, **settings)


def test_shared_strings_map_one_to_one(folders):
    target, draft = tokenizers(folders, "target", "other")
    translation = Translation(target, draft)
    for t, d in translation.pairs:
        assert target.spelling(t) == draft.spelling(d)
        assert translation.encode(t) == (d,)
    assert len(dict(translation.pairs)) == len({d for _, d in translation.pairs}) == len(translation.pairs) == 256
    assert translation.overlap == pytest.approx(1.0)


def test_pieces_are_preferred_to_byte_tokens(folders):
    target, draft = tokenizers(folders, "target", "other")
    [piece] = Translation(target, draft).encode(ord("a"))
    assert draft._backend.id_to_token(piece) == "a"


def test_what_the_draft_lacks_is_cut_into_the_fewest_tokens(folders):
    draft, target = tokenizers(folders, "target", "other")  # the other way round: words to bytes
    translation = Translation(target, draft)
    for token in range(target.vocab_size):
        ids = translation.encode(token)
        assert len(ids) >= 1
        if token not in target.special_ids:
            assert b"".join(map(draft.token_bytes, ids)) == target.token_bytes(token)
    hello = target._backend.token_to_id("▁Hello")
    assert translation.encode(hello) == tuple(b" Hello")
    assert translation.encode(SP_BOS) == tuple(b"<s>"), "a control token that the draft lacks is read as it is written"


def test_the_fewest_tokens(folders):
    translation = Translation(*tokenizers(folders, "target", "other"))
    cut = translation._cut(" Hello world! 日本".encode())
    spelt = [translation._draft.token_bytes(i).decode() for i in cut]
    assert spelt == [" Hello", " world", "!", " ", "日本"]


def test_control_tokens_map_to_control_tokens_only(tmp_path, folders):
    folder = byte_tokenizer_folder(tmp_path / "t")
    target = Tokenizer.from_folder(folder)
    [_, draft] = tokenizers(folders, "target", "twin")
    translation = Translation(target, draft)
    assert translation.encode(BOS) == (BOS,) and translation.encode(IM_START) == (IM_START,)
    assert Translation(target, Tokenizer.from_folder(folders["other"])).encode(BOS) != (BOS,)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_model_under_other_ids_is_always_right(folders, mode):
    """Every token crosses over and back: drafts of depth 4 are all accepted."""
    engine = engine_for(folders, "twin")
    engine.drafter._width = engine.drafter._children = 1
    prompts = [[7, 200, 13], [99] * 12, [BOS, 50, 51]]
    params = [SamplingParams(**mode, max_tokens=41, seed=i, ignore_eos=True) for i in range(3)]
    for request in run(engine, prompts, params):
        stats = request.speculation
        assert (stats.steps, stats.drafted, stats.accepted) == (8, 32, 32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("target", "draft"), [("target", "twin"), ("target", "other"), ("other", "target")])
def test_the_text_is_the_targets(folders, target, draft, mode):
    rng = random.Random(1)
    prompts = [[rng.randrange(BYTE_VOCAB_SIZE) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
    params = [SamplingParams(**mode, max_tokens=30, seed=i) for i in range(4)]
    plain = run(engine_for(folders, target=target), prompts, params)
    for pages in (64, 22):  # the smaller pool preempts, and a text of bytes may outgrow the draft's
        engine = engine_for(folders, draft, target=target, pages=pages, max_slots=4)
        requests = run(engine, prompts, params)
        assert [r.output for r in requests] == [r.output for r in plain]
        assert engine.stats.drafted > 0 and engine.drafter._pool.owned == 0


def test_two_swapped_ids_are_an_error_that_names_the_first(tmp_path, folders):
    damaged = renumber(byte_tokenizer_folder(tmp_path / "d"), {97: 98, 98: 97})
    with pytest.raises(ModelError, match=r"token 97 is b'b' there and b'a' here, while 258 of 260 ids agree"):
        relate(Tokenizer.from_folder(folders["target"]), Tokenizer.from_folder(damaged), "d")


def test_the_same_vocabulary_needs_no_translation(folders):
    target = Tokenizer.from_folder(folders["target"])
    assert relate(target, target, "itself") is None


def test_too_little_in_common_is_refused_with_the_figure(tmp_path, folders):
    """A draft that knows letters only."""
    folder = byte_tokenizer_folder(tmp_path / "d")
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    letters = {text: i for text, i in data["model"]["vocab"].items() if text.isascii() and text.isalpha()}
    data["model"]["vocab"] = {text: n for n, text in enumerate(sorted(letters))}
    data["added_tokens"] = []
    data["post_processor"] = None
    path.write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"knows 20\.\d% of the target's tokens.*at least 50% are needed.*--draft ngram"
    ):
        relate(Tokenizer.from_folder(folders["target"]), Tokenizer.from_folder(folder), "d")

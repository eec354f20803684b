import json
import random
import threading

import pytest
import tokenizers

from minispec.errors import ModelError, RequestError
from minispec.tokenizer import Tokenizer
from tokenizers_fixture import (
    BOS,
    BYTE_VOCAB_SIZE,
    EOS,
    IM_END,
    SP_BOS,
    SP_EOS,
    SP_FIRST_BYTE,
    byte_tokenizer_folder,
    sentencepiece_folder,
)


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    return byte_tokenizer_folder(tmp_path_factory.mktemp("byte"))


@pytest.fixture(scope="module")
def sp_folder(tmp_path_factory):
    return sentencepiece_folder(tmp_path_factory.mktemp("sp"))


@pytest.fixture(scope="module")
def byte(byte_folder):
    return Tokenizer.from_folder(byte_folder)


@pytest.fixture(scope="module")
def sp(sp_folder):
    return Tokenizer.from_folder(sp_folder)


def piece_ids(tokenizer, folder, *pieces):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [backend.token_to_id(piece) for piece in pieces]


def stream(tokenizer, ids, prompt=()):
    decoder = tokenizer.decoder(prompt)
    return [decoder.feed(token_id) for token_id in ids], decoder.finish()


# Decoding


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_split_characters_come_out_whole(byte, step):
    text = "żółw🦉한"
    pieces, tail = stream(byte, byte.encode(text, add_special_tokens=False))
    chunks = ["".join(pieces[at : at + step]) for at in range(0, len(pieces), step)]
    assert "".join(chunks) + tail == text
    assert not any("\ufffd" in chunk for chunk in chunks)


@pytest.mark.parametrize(("count", "text"), [(1, ""), (2, ""), (3, ""), (4, "🦊")])
def test_character_cut_by_the_end_is_dropped(byte, count, text):
    ids = [240, 159, 166, 138][:count]
    pieces, tail = stream(byte, ids)
    assert "".join(pieces) + tail == text == byte.decode(ids)


def test_token_bytes(byte, sp, sp_folder):
    ids = byte.encode("🔥", add_special_tokens=False)
    assert [byte.token_bytes(i) for i in ids] == [b"\xf0", b"\x9f", b"\x94", b"\xa5"]
    assert [byte.token_bytes(i) for i in (BOS, IM_END, BYTE_VOCAB_SIZE, 10**6, -1)] == [b""] * 5
    assert [sp.token_bytes(SP_FIRST_BYTE + i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert sp.token_bytes(*piece_ids(sp, sp_folder, "▁cat")) == b" cat"


def test_byte_level_agrees_with_the_library(byte, byte_folder):
    oracle = tokenizers.Tokenizer.from_file(str(byte_folder / "tokenizer.json"))
    rng = random.Random(0)
    for _ in range(2000):
        ids = [rng.randrange(BYTE_VOCAB_SIZE) for _ in range(rng.randrange(20))] + [ord(".")]
        pieces, _ = stream(byte, ids)
        assert "".join(pieces) == byte.decode(ids) == oracle.decode(ids)


def test_sentencepiece_agrees_with_the_library(sp, sp_folder):
    oracle = tokenizers.Tokenizer.from_file(str(sp_folder / "tokenizer.json"))
    rng = random.Random(0)
    units = [[i] for i in range(sp.vocab_size) if not SP_FIRST_BYTE <= i < SP_FIRST_BYTE + 256]
    # Whole characters only: for broken ones the library's answer depends on what follows, and cannot be streamed.
    units += [[SP_FIRST_BYTE + b for b in char.encode()] for char in "é日🦊 \n<"] * 8
    for _ in range(2000):
        ids = [token_id for unit in rng.choices(units, k=rng.randrange(12)) for token_id in unit]
        pieces, tail = stream(sp, ids)
        assert "".join(pieces) + tail == sp.decode(ids) == oracle.decode(ids)


def test_sentencepiece_spaces(sp, sp_folder):
    pieces, _ = stream(sp, piece_ids(sp, sp_folder, "▁Hello", "▁world", "!"))
    assert pieces == ["Hello", " world", "!"]
    cat = piece_ids(sp, sp_folder, "▁cat")
    assert stream(sp, cat, sp.encode("The"))[0] == [" cat"]
    assert stream(sp, cat, [SP_BOS])[0] == ["cat"]
    assert sp.decode([SP_BOS, *cat], skip_special_tokens=False) == "<s> cat"


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decoder(tmp_path, scheme):
    folder = sentencepiece_folder(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.from_folder(folder)
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = piece_ids(tokenizer, folder, "▁Hello", "▁world", "!", "▁▁", "▁cat")
    assert tokenizer.decode(ids) == oracle.decode(ids)


def test_added_tokens_that_are_not_special_are_text(tmp_path):
    folder = byte_tokenizer_folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["<think>", "Ġé  "])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == BYTE_VOCAB_SIZE + 2
    assert tokenizer.decode([EOS, BYTE_VOCAB_SIZE, BYTE_VOCAB_SIZE + 1]) == "<think>Ġé  "
    # The copy without control tokens keeps their ids.
    assert tokenizer.encode("<think><|eos|>", parse_special=False)[1] == BYTE_VOCAB_SIZE


def test_unknown_decoder_is_named(tmp_path):
    folder = byte_tokenizer_folder(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    for decoder, name in [({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"), (None, "none")]:
        data["decoder"] = decoder
        (folder / "tokenizer.json").write_text(json.dumps(data))
        with pytest.raises(ModelError, match=name):
            Tokenizer.from_folder(folder)


# Encoding


def test_exactly_one_bos(byte, byte_folder, sp, tmp_path):
    assert byte.encode("ab") == [BOS, 97, 98]
    assert byte.encode("<|bos|>ab") == [BOS, 97, 98]
    assert byte.encode("ab", add_special_tokens=False) == [97, 98]
    assert byte.encode("") == [BOS]
    assert sp.encode("Hello").count(SP_BOS) == 1
    assert Tokenizer.from_folder(byte_tokenizer_folder(tmp_path / "no", add_bos_token=False)).encode("a") == [97]
    folder = byte_tokenizer_folder(tmp_path / "yes", add_bos_token=True, add_eos_token=True)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert Tokenizer.from_folder(folder).encode("a") == [BOS, 97, EOS]


@pytest.mark.parametrize("make", [byte_tokenizer_folder, sentencepiece_folder])
def test_control_tokens_are_parsed_or_kept_as_text(tmp_path, make):
    tokenizer = Tokenizer.from_folder(make(tmp_path))
    eos = tokenizer.encode(tokenizer.chat_template._special_tokens["eos_token"], add_special_tokens=False)
    text = "a" + tokenizer.decode(eos, skip_special_tokens=False) + "b"
    assert len(eos) == 1 and eos[0] in tokenizer.encode(text)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert not set(ids) & tokenizer.special_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, parse_special=False)[1:] == ids


def test_merges_cannot_build_a_control_token(tmp_path):
    folder = sentencepiece_folder(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"]["</"] = 1000
    data["model"]["vocab"]["</s"] = 1001
    data["model"]["merges"] += [["<", "/"], ["</", "s"], ["</s", ">"]]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.from_folder(folder)
    assert SP_EOS in tokenizer.encode("a</s>")
    assert SP_EOS not in tokenizer.encode("a</s>", parse_special=False)


def test_saved_truncation_and_padding_are_ignored(tmp_path):
    folder = byte_tokenizer_folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert len(tokenizer.encode("a")) == 2
    assert len(tokenizer.encode("a" * 100_000)) == 100_001


def test_lone_surrogate_is_a_bad_request(byte):
    with pytest.raises(RequestError, match=r"U\+D83E.*character 1") as caught:
        byte.encode("a\ud83e")
    str(caught.value).encode("utf-8")
    with pytest.raises(RequestError):
        byte.apply_chat_template([{"role": "user", "content": "\ud83e"}])


# Loading


def test_every_eos_source_counts(tmp_path):
    folder = byte_tokenizer_folder(tmp_path, eos_token="<|im_end|>")
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    assert Tokenizer.from_folder(folder).eos_ids == {1, IM_END}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 90]}')
    assert Tokenizer.from_folder(folder).eos_ids == {1, 90, IM_END}
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ModelError, match="eos_token_id"):
        Tokenizer.from_folder(folder)


def test_special_tokens(byte, sp, tmp_path):
    assert (byte.bos_id, byte.eos_ids, byte.vocab_size) == (BOS, {EOS}, BYTE_VOCAB_SIZE)
    assert byte.special_ids == set(range(256, 260))
    assert (sp.bos_id, sp.eos_ids, sp.special_ids) == (SP_BOS, {SP_EOS}, {0, 1, 2})
    assert Tokenizer.from_folder(byte_tokenizer_folder(tmp_path, bos_token={"content": "<|bos|>"})).bos_id == BOS


def test_tokens_named_special_only_in_the_config(tmp_path):
    folder = sentencepiece_folder(tmp_path, pad_token="▁▁", added_tokens_decoder={"40": {"special": True}})
    tokenizer = Tokenizer.from_folder(folder)
    pad = piece_ids(tokenizer, folder, "▁▁")[0]
    assert {pad, 40} <= tokenizer.special_ids
    assert tokenizer.token_bytes(pad) == b""


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*convert"):
        Tokenizer.from_folder(tmp_path)
    folder = byte_tokenizer_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match="tokenizer_config"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer_config"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="Download the model again"):
        Tokenizer.from_folder(folder)


def test_shared_by_threads(byte_folder):
    tokenizer = Tokenizer.from_folder(byte_folder)
    text = "a<|im_end|>żółw" * 50
    plain = tokenizer.encode(text, parse_special=False)
    parsed = tokenizer.encode(text)
    wrong = []

    def work():
        for _ in range(50):
            if tokenizer.encode(text) != parsed or tokenizer.encode(text, parse_special=False) != plain:
                wrong.append("ids")
            if tokenizer.decode(plain) != text:
                wrong.append("text")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

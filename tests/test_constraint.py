"""Grammars: what they allow after each node, over every kind of tokenizer, and what they refuse."""

from __future__ import annotations

import json
import random
import re
import tempfile
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minispec.constraint import MAX_CHARACTERS, Constraint, Grammars, OutputFormat
from minispec.errors import RequestError
from minispec.gguf_tokenizer import write_tokenizer
from minispec.tokenizer import Tokenizer
from minispec.tree import DraftTree
from tokenizers_fixture import EOS, IM_END, SP_EOS, SP_FIRST_BYTE, SP_WORDS, byte_tokenizer_folder, sentencepiece_folder

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cat"]}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{2}[A-C]?$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
CHOICES = ("Hello world!", "Hello", "cat日本", 'é\n"quoted" 🔥', "Hell")
EXPRESSION = r"(ab|a|[x-z]{2} c)*q?( [0-9]{1,3}){0,2}"
FORMATS = {
    "schema": OutputFormat("json_schema", PERSON),
    "regex": OutputFormat("regex", EXPRESSION),
    "choice": OutputFormat("choice", CHOICES),
    "grammar": OutputFormat("grammar", 'start: item ("," item)*\nitem: "x" | "(" start ")"'),
}
RECURSIVE = {
    "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}},
    "$ref": "#/$defs/n",
}
PADDING = 37  # rows of logits past the tokenizer's ids


class _GgufKeys:
    """The tokenizer of a GGUF file: SentencePiece pieces with scores."""

    path = Path("tiny.gguf")

    def __init__(self) -> None:
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SP_WORDS, *'abcdefg{}":,']
        kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
        self.values = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.scores": [-float(i) for i in range(len(pieces))],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }

    def get(self, key, default=None):
        return self.values.get(key, default)

    def need(self, key):
        return self.values[key]


@cache
def tokenizer(kind: str) -> Tokenizer:
    """``bytes``, ``sentencepiece``, or ``gguf``: the latter as rebuilt from a GGUF file."""
    folder = Path(tempfile.mkdtemp(prefix="minispec-tokenizer-"))
    if kind == "bytes":
        byte_tokenizer_folder(folder)
    elif kind == "sentencepiece":
        sentencepiece_folder(folder)
    else:
        write_tokenizer(_GgufKeys(), folder, context_length=64)
    return Tokenizer.from_folder(folder)


@cache
def grammars(kind: str) -> Grammars:
    own = tokenizer(kind)
    return Grammars(own, own.vocab_size + PADDING, own.eos_ids)


def constraint(name: str = "schema", kind: str = "bytes", **settings) -> Constraint:
    return grammars(kind).constraint(FORMATS[name], **settings)


def sets(masks: torch.Tensor) -> list[set[int]]:
    """The tokens of each row of masks."""
    bits = np.unpackbits(masks.contiguous().numpy().view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def allowed(one: Constraint) -> set[int]:
    """What may follow the committed text."""
    return sets(one.masks(DraftTree.root(0)))[0]


def walk(one: Constraint, own: Tokenizer, rng: random.Random, most: int = 400) -> tuple[list[int], bool]:
    """A random text that the masks allow, and whether it came to an end by itself. Ends are taken when they come."""
    text: list[int] = []
    while len(text) < most:
        choice = allowed(one)
        assert choice and max(choice) < own.vocab_size
        token = min(choice & own.eos_ids, default=None)
        if token is None or (rng.random() < 0.7 and choice - own.eos_ids):
            token = rng.choice(sorted(choice - own.eos_ids))
            text.append(token)
        assert one.accept(token), one.error
        if one.done:
            return text, True
    return text, False


KINDS = ["bytes", "sentencepiece", "gguf"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_what_the_masks_allow_is_of_the_language(name: str, kind: str) -> None:
    rng = random.Random(1)
    own = tokenizer(kind)
    ended = 0
    for _ in range(8):
        tokens, end = walk(constraint(name, kind), own, rng)
        assert not own.special_ids & set(tokens)
        text = b"".join(map(own.token_bytes, tokens)).decode()
        ended += end
        if not end:
            continue
        if name == "schema":
            jsonschema.validate(json.loads(text), PERSON)
            assert text == json.dumps(json.loads(text), ensure_ascii=False) or "\\" in text
        elif name == "regex":
            assert re.fullmatch(EXPRESSION, text)
        elif name == "choice":
            assert text in CHOICES
        else:
            assert re.fullmatch(r"[x(),]+", text) and text.count("(") == text.count(")")
    assert ended >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_can_be_said(kind: str) -> None:
    """Along the longest pieces as well as byte by byte: whatever spells a beginning of a choice is allowed."""
    own = tokenizer(kind)
    for text in CHOICES:
        for longest in (True, False):
            one, rest = constraint("choice", kind), text.encode()
            while rest:
                fits = [t for t in allowed(one) - own.eos_ids if rest.startswith(own.token_bytes(t))]
                token = (max if longest else min)(fits, key=lambda t: (len(own.token_bytes(t)), t))
                assert one.accept(token)
                rest = rest[len(own.token_bytes(token)) :]
            assert one.done or own.eos_ids <= allowed(one)


@pytest.mark.parametrize("kind", KINDS)
def test_choices_allow_exactly_what_begins_one(kind: str) -> None:
    """Where more than one byte may come next; where only one may, the tokenizer's own cut is the only one allowed."""
    own = tokenizer(kind)
    first = {text[:n] for text in (c.encode() for c in CHOICES) for n in range(1, len(text) + 1)}
    assert allowed(constraint("choice", kind)) == {
        t for t in range(own.vocab_size) if t not in own.special_ids and own.token_bytes(t) in first
    }


def test_spaces_of_sentencepiece_count() -> None:
    """A piece that begins with a space does not begin a text that must not."""
    own = tokenizer("sentencepiece")
    spelt = {own.token_bytes(t) for t in allowed(constraint("choice", "sentencepiece"))}
    assert b"H" in spelt and b" Hello" not in spelt
    one = grammars("sentencepiece").constraint(OutputFormat("choice", [" Hello", " The"]))
    assert b" Hello" in {own.token_bytes(t) for t in allowed(one)}


def test_end_of_text_exactly_where_it_may_end() -> None:
    one = constraint("regex")
    for token, may_end in zip(b"xx c", [True, False, False, False], strict=True):
        assert (EOS in allowed(one)) == may_end
        assert one.accept(token)
    assert EOS in allowed(one) and not one.done
    assert not {IM_END, EOS + PADDING} & allowed(one)
    assert one.accept(EOS) and one.done


def test_a_text_with_no_way_on_is_done_at_once() -> None:
    one = constraint("grammar")
    for token in b"(x)":
        assert not one.done and one.accept(token)
    assert not one.done  # a comma may follow
    one = grammars("bytes").constraint(OutputFormat("json_schema", {"const": 12}))
    assert [one.accept(token) and one.done for token in b"12"] == [False, True]


def test_ignore_eos_holds_the_end_back_as_long_as_anything_else_may_follow() -> None:
    tree = DraftTree((0, *b"abab"), (-1, 0, 1, 2, 3), (0.0,) * 5)
    assert all(EOS in row for row in sets(constraint("regex").masks(tree)))
    assert not any(EOS in row for row in sets(constraint("regex", ignore_eos=True).masks(tree)))
    one = grammars("bytes").constraint(OutputFormat("regex", "()"), ignore_eos=True)
    assert allowed(one) == {EOS}
    assert one.accept(EOS) and one.done


def test_a_model_without_an_end_of_text_token() -> None:
    own = tokenizer("bytes")
    one = Grammars(own, own.vocab_size, frozenset()).constraint(FORMATS["regex"])
    assert ord("a") in allowed(one) and not own.special_ids & allowed(one)
    stuck = Grammars(own, own.vocab_size, frozenset()).constraint(OutputFormat("regex", "()"))
    assert len(allowed(stuck)) == 256
    assert not stuck.accept(ord("a")) and stuck.error is not None


def test_several_end_tokens_and_fewer_logits_than_ids() -> None:
    own = tokenizer("sentencepiece")
    rows = SP_FIRST_BYTE + 256 + 5
    one = Grammars(own, rows, frozenset({SP_EOS, 1, 10_000})).constraint(OutputFormat("regex", "(a|é)*"))
    masks = one.masks(DraftTree.root(0))
    assert masks.shape == (1, -(-rows // 32)) and masks.dtype == torch.int32
    assert sets(masks) == [{SP_EOS, 1, SP_FIRST_BYTE + ord("a"), SP_FIRST_BYTE + 0xC3}]


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Trees over tokens that are mostly of the language of ``FORMATS["regex"]``."""
    tokens, parents, seen = [0], [-1], set()
    for _ in range(draw(st.integers(0, 14))):
        parent = draw(st.integers(0, len(tokens) - 1))
        token = draw(st.sampled_from([*b"aabbqxz c 19", EOS, IM_END, EOS + PADDING]))
        if (parent, token) not in seen:
            seen.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(trees(), st.integers(0, 3)), min_size=1, max_size=5), st.integers(0, 2**31))
def test_drafts_leave_no_trace(rounds: list[tuple[DraftTree, int]], seed: int) -> None:
    """Masks behind each node of a tree are those after its path was accepted, and the committed text stays put."""
    rng, drafted, text = random.Random(seed), constraint("regex"), []
    for tree, steps in rounds:
        if drafted.done:  # the request has ended
            break
        pruned = drafted.prune(tree)
        forced = drafted.forced(50)
        rows = sets(drafted.masks(pruned))
        for node in range(len(tree)):
            fresh = constraint("regex")
            for token in text:
                assert fresh.accept(token)
            assert fresh.forced(50) == forced
            path = [tree.tokens[i] for i in tree.path(node)[1:]]
            ok = all(not fresh.done and fresh.accept(token) for token in path)
            found = _find(pruned, path)
            assert (found is not None) == ok
            if found is not None and not (path and path[-1] == EOS):
                assert rows[found] == allowed(fresh)
        for _ in range(steps):
            choice = sorted(allowed(drafted) - {EOS})
            if drafted.done or not choice:
                break
            text.append(rng.choice(choice))
            assert drafted.accept(text[-1])


def test_nothing_is_drafted_behind_a_complete_text() -> None:
    one = constraint("regex")
    for token in b" 123 12":
        assert one.accept(token)
    tree = DraftTree((0, ord("3"), EOS, EOS), (-1, 0, 1, 0), (0.0,) * 4)
    assert one.prune(tree) == tree.keep([0, 1, 3])  # 12 may end as well, behind 123 the request has ended


def _find(tree: DraftTree, path: list[int]) -> int | None:
    node: int | None = 0
    for token in path:
        node = None if node is None else tree.children[node].get(token)
    return node


@pytest.mark.parametrize("kind", KINDS)
def test_forced_tokens_are_the_only_ones_allowed(kind: str) -> None:
    own, one = tokenizer(kind), constraint("schema", kind)
    forced = one.forced(100)
    assert b"".join(map(own.token_bytes, forced)) == b'{"name": "'
    assert one.forced(3) == forced[:3] and one.forced(0) == ()
    chain = DraftTree((0, *forced), (-1, *range(len(forced))), (0.0,) * (len(forced) + 1))
    rows = sets(one.masks(chain))
    assert rows[:-1] == [{token} for token in forced] and len(rows[-1]) > 50
    assert one.prune(chain) == chain


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (("json_schema", [1]), "must be an object"),
        (("json_schema", "{"), "not JSON"),
        (("json_schema", {"type": "strin"}), "Invalid type: strin"),
        (("json_schema", {"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
        (("json_schema", {"$ref": "#/nowhere"}), "'/nowhere' does not exist"),
        (("json_schema", {"$ref": "http://example.com/schema"}), "http://example.com/schema"),
        (("json_schema", {"enum": []}), "anyOf is empty"),
        (("json_schema", {"oneOf": [{"type": "string"}, {"minLength": 2}]}), "oneOf"),
        (("json_schema", {"type": "string", "pattern": "(?=a)"}), "look-around"),
        (("json_schema", {"const": "\ud83e"}), "unexpected end of hex escape"),
        (("json_schema", {"const": "a" * MAX_CHARACTERS}), f"may have {MAX_CHARACTERS} characters"),
        (("json_object", {"type": "object"}), "takes no value"),
        (("regex", ""), "non-empty string"),
        (("regex", "(a"), "unclosed group"),
        (("regex", r"(a)\1"), "backreferences are not supported"),
        (("regex", r"\bword"), "not supported"),
        (("regex", "\ud83e"), "surrogates not allowed"),
        (("regex", 5), "non-empty string"),
        (("choice", []), "at least one"),
        (("choice", "yes"), "list of strings"),
        (("choice", ["yes", ""]), "non-empty"),
        (("choice", ["yes", 1]), "non-empty strings"),
        (("grammar", "start: nothing"), 'unknown name: "nothing"'),
        (("grammar", 'word: "a"'), "no start rule"),
        (("grammar", 'start: "a" <|im_end|>'), "cannot be used"),
        (("regex", r"[^\x00-\x{10FFFF}]"), "no text matches it"),
        (("json_schema", {"$ref": "#"}), "no text matches it"),
        (("grammar", f"start: <[{IM_END}]>"), "no text of this model's tokens"),
        (("grammar", 'start: "a"{1000000}'), "Too many items"),
        (("regex", "(a?){3000}a{3000}"), "too many expressions"),
        (("json_schema", RECURSIVE), "Too many items"),
        (("json_schema", {"properties": {f"p{i}": {} for i in range(2500)}, "type": "object"}), "max is 2000"),
        (("xml", "a"), "there is no output format 'xml'; there are json_object"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(value: tuple[str, object], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars("bytes").constraint(OutputFormat(*value))
    assert message in str(caught.value) and caught.value.param == "response_format" and caught.value.status == 400
    assert "\n" not in str(caught.value)


def test_refusals_do_not_quote_the_grammar() -> None:
    with pytest.raises(RequestError) as caught:
        grammars("bytes").constraint(OutputFormat("regex", "(a"))
    assert "start:" not in str(caught.value) and " | " not in str(caught.value)


def test_thousands_of_choices_of_any_character() -> None:
    choices = [*(f"c{i}" for i in range(9000)), "\x7f", "\x00\x85", "\u2028"]
    for choice in ("c8999", "c7", "\x7f", "\x00\x85", "\u2028"):
        one = grammars("bytes").constraint(OutputFormat("choice", choices))
        assert all(one.accept(byte) for byte in choice.encode())
        assert one.done or one.accept(EOS)
    other = grammars("bytes").constraint(OutputFormat("choice", choices))
    assert other.accept(ord("c")) and not other.accept(EOS) and not other.done


def test_deep_schemas_are_refused() -> None:
    schema: dict[str, object] = {"type": "string"}
    for depth in range(3000):
        schema = {"type": "array", "items": schema}
        if depth == 400:
            with pytest.raises(RequestError, match="recursion limit"):
                grammars("bytes").constraint(OutputFormat("json_schema", schema))
    with pytest.raises(RequestError, match="recursion"):
        OutputFormat("json_schema", schema)


def test_property_order_of_the_schema_is_that_of_the_text() -> None:
    schema = {
        "type": "object",
        "properties": {"z": {"const": 1}, "a": {"const": 2}},
        "required": ["a", "z"],
        "additionalProperties": False,
    }
    one = grammars("bytes").constraint(OutputFormat("json_schema", schema))
    assert bytes(one.forced(100)) == b'{"z": 1, "a": 2}'


def test_a_grammar_that_became_too_complex_is_made_anew_for_the_next_request() -> None:
    """Copies of a grammar share a lexer, and one that failed fails for all of them."""
    wanted = OutputFormat("regex", "[bc]d(a?){3000}a{3000}")
    for _ in range(2):
        first = grammars("bytes").constraint(wanted)
        first.masks(DraftTree.root(0))
        assert first.accept(ord("b"))
        first.masks(DraftTree.root(0))
        assert not first.accept(ord("d")) and first.error is not None and "too complex" in first.error
        assert grammars("bytes").constraint(wanted).accept(ord("c"))


def test_control_tokens_are_never_part_of_a_text() -> None:
    """A grammar may name them; then it leads nowhere, and the request ends rather than says something else."""
    one = grammars("bytes").constraint(OutputFormat("grammar", f'start: "a" <[{IM_END}]>'))
    assert one.accept(ord("a"))
    [row] = one.masks(DraftTree.root(0))
    assert row.any()  # never empty
    assert IM_END not in allowed(one) and not one.accept(ord("b"))
    assert one.error is not None and "form" in one.error and "no token" in one.error


def test_what_becomes_too_complex_ends_with_an_error_and_not_as_if_complete() -> None:
    one = grammars("bytes").constraint(OutputFormat("regex", "[bc]d(a?){3000}a{3000}"))
    assert one.accept(ord("b"))
    tree = DraftTree((0, ord("d"), ord("b")), (-1, 0, 0), (0.0,) * 3)
    assert one.masks(one.prune(tree)).shape[0] == 2
    assert not one.accept(ord("d")) and not one.done
    assert one.error is not None and "too complex" in one.error and "<" not in one.error

"""Reasoning told from the answer, wherever the text is cut (failure case c12)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minispec.server.reasoning import ReasoningSplitter, is_opened


def split(pieces, **settings):
    splitter = ReasoningSplitter(**settings)
    parts = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    assert all(not answer or not later for i, (_, answer) in enumerate(parts) for later, _ in parts[i + 1 :])
    return tuple("".join(part[kind] for part in parts) for kind in (0, 1))


CASES = [
    ("<think>ab</think>cd", False, ("ab", "cd")),
    ("<think>\nab c\n</think>\n\ncd e\n", False, ("ab c", "cd e\n")),
    ("ab</think>cd", True, ("ab", "cd")),
    (" <think></think>cd", False, ("", "cd")),
    ("<think>a < b </thin k> c", False, ("a < b </thin k> c", "")),
    ("<think>cut </thi", False, ("cut </thi", "")),
    ("  <thi", False, ("", "  <thi")),
    ("  plain <think>x</think>", False, ("", "  plain <think>x</think>")),
    ("<think>a</think> b <think>c</think>", False, ("a", "b <think>c</think>")),
    ("", False, ("", "")),
    ("", True, ("", "")),
]


@pytest.mark.parametrize("size", range(1, 20))
@pytest.mark.parametrize(("text", "inside", "parts"), CASES)
def test_every_cut_gives_the_same(text, inside, parts, size):
    assert split([text[i : i + size] for i in range(0, len(text), size)], inside=inside) == parts


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "think", "/", ">", " ", "\n", "a"]), max_size=12))
def test_random_cuts_give_the_same(pieces):
    assert split(pieces) == split(["".join(pieces)]) == split("".join(pieces))


def test_a_prompt_may_open_the_reasoning():
    assert is_opened("<|assistant|><think>\n")
    assert not is_opened("<|assistant|>\n<think>\n\n</think>\n\n")
    assert not is_opened("about <think> tags<|im_end|>") and not is_opened("")

"""Ends of answers when a step brings several tokens, as HTTP clients see them (failure cases b1-b12, b14, b15)."""

import pytest

from fake_worker import Script, events_of
from tokenizers_fixture import EOS

DRAFTS = [0, 1, 3, 7]


def both(server, prompt="hi", **fields):
    """(text, finish reason, completion tokens, pieces) of a completion; whole and streamed must agree."""
    whole = server.complete(prompt, **fields).json()
    [choice] = whole["choices"]
    response = server.complete(prompt, stream=True, stream_options={"include_usage": True}, **fields)
    *chunks, last, done = events_of(response.text)
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert done == "[DONE]" and "".join(pieces) == choice["text"] and "\ufffd" not in choice["text"]
    assert all(pieces[:-1]), "only the last chunk may be without text"
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    return choice["text"], choice["finish_reason"], whole["usage"]["completion_tokens"], pieces


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize(
    ("reply", "fields", "result"),
    [
        ("ab", {"max_tokens": 4}, ("ab", "stop", 3)),  # b1: the end comes before the limit
        ("abcdefg", {"max_tokens": 4}, ("abcd", "length", 4)),
        ("abc", {"max_tokens": 4}, ("abc", "stop", 4)),  # b15: the end is the fourth token
        ("abcdef", {}, ("abcdef", "stop", 7)),
        ("ab##cdefghijklmn", {"stop": "##"}, ("ab", "stop", 4)),  # b3
        ("0123456789", {"stop": "3456"}, ("012", "stop", 7)),  # b6
        ("hi <|", {"stop": "<|end|>"}, ("hi <|", "stop", 6)),  # b7
        ("hi <|end", {"stop": "<|end|>", "max_tokens": 5}, ("hi <|", "length", 5)),
        ("a\n\nb", {"stop": "\n\n"}, ("a", "stop", 3)),  # b14
        (".\n\nc", {"stop": "\n\n"}, (".", "stop", 3)),
        ("a\nbcd\nef", {"stop": "\n", "min_tokens": 3}, ("a\nbcd", "stop", 6)),  # b9
        ("🦊x", {"max_tokens": 3}, ("", "length", 3)),  # c2
        ("🦊x", {"max_tokens": 4}, ("🦊", "length", 4)),
    ],
    ids=str,
)
def test_an_answer_ends_where_it_would_token_by_token(serve, drafts, reply, fields, result):
    server = serve(Script(reply=lambda prompt: reply, drafts=drafts))
    assert both(server, **fields)[:3] == result


@pytest.mark.parametrize("drafts", DRAFTS)
def test_nothing_is_held_back_without_need(serve, drafts):
    """Failure case b8."""
    server = serve(Script(reply=lambda prompt: "abcdefgh", drafts=drafts))
    *_, pieces = both(server, stop=["ZZZZZZZZ"])
    steps = [1] + [drafts + 1] * 9  # the first token comes from the prompt
    expected, rest = [], "abcdefgh"
    for count in steps:
        expected += [rest[:count]] if rest else []
        rest = rest[count:]
    # the end token comes with the last piece, or in a step of its own
    assert [piece for piece in pieces if piece] == expected


@pytest.mark.parametrize("drafts", [0, 2, 5])
@pytest.mark.parametrize("limit", [1, 2, 7, 20])
def test_exactly_the_budget(serve, drafts, limit):
    """Failure case b5."""
    server = serve(Script(reply=lambda prompt: None, drafts=drafts))
    text, reason, count, _ = both(server, max_tokens=limit, ignore_eos=True)
    assert (len(text), reason, count) == (limit, "length", limit)


def test_end_tokens_do_not_end_what_ignores_them(serve):
    """Failure case b10."""
    server = serve(Script(reply=lambda prompt: "ab", drafts=3))
    for fields, count in (({}, 3), ({"ignore_eos": True}, 9), ({"ignore_eos": True, "stop_token_ids": [EOS]}, 3)):
        text, reason, tokens, _ = both(server, max_tokens=9, **fields)
        assert (text, tokens) == ("ab", count) and reason == ("stop" if count == 3 else "length")


def test_emitted_tokens_do_not_count_what_was_cut(serve):
    """Failure case b12: of a run of five, two were emitted."""
    server = serve(Script(reply=lambda prompt: "xy", drafts=4))
    usage = server.complete().json()["usage"]
    # "x" comes from the prompt, then "y" and the end token in one step
    assert usage["completion_tokens"] == 3 and usage["speculation"]["acceptance_length"] == 2

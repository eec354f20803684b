"""Tool calls found in text, wherever it is cut (failure case c13)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minispec.server.tool_parser import HERMES, LLAMA3, ToolParser, detect_format


def parse(pieces, tool_format, **settings):
    """(content, [(name, arguments), …]) of an answer, its deltas checked and joined as clients do it."""
    parser = ToolParser(tool_format, ["weather", "add"], **settings)
    content, calls = "", []
    for deltas in [*map(parser.feed, pieces), parser.finish()]:
        for delta in deltas:
            content += delta.get("content", "")
            assert delta.get("content", "x"), "an empty content delta"
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(calls) and call["type"] == "function"
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
    assert parser.num_calls == len(calls)
    return content, [tuple(call) for call in calls]


PARIS = '{"city": "Paris", "unit": "a \\"b\\" }{ \\\\"}'
ADD = '{"numbers": [1, {"x": 2}], "t": true}'


def hermes(name, arguments, keys="name first"):
    name, arguments = f'"name": "{name}"', f'"arguments": {arguments}'
    pair = (name, arguments) if keys == "name first" else (arguments, name)
    return "<tool_call>\n{" + ", ".join(pair) + "}\n</tool_call>"


CASES = [
    (HERMES, "no call at all, a < b\n", ("no call at all, a < b\n", [])),
    (HERMES, hermes("weather", PARIS), ("", [("weather", PARIS)])),
    (HERMES, hermes("weather", PARIS, "arguments first"), ("", [("weather", PARIS)])),
    (HERMES, "Let me see.\n" + hermes("add", ADD), ("Let me see.", [("add", ADD)])),
    (HERMES, hermes("weather", PARIS) + "\n" + hermes("add", ADD), ("", [("weather", PARIS), ("add", ADD)])),
    (
        HERMES,
        hermes("weather", PARIS) + hermes("add", "{}") + "\n Done.",
        ("Done.", [("weather", PARIS), ("add", "{}")]),
    ),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', ("", [("add", "{}")])),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', ("", [("add", "{}")])),
    (HERMES, hermes("add", json.dumps(ADD)), ("", [("add", ADD)])),  # JSON in a string
    (HERMES, "use " + hermes("unknown", "{}") + " so", ("use " + hermes("unknown", "{}") + " so", [])),
    (HERMES, "<tool_call> is a tag", ("<tool_call> is a tag", [])),
    (HERMES, "<tool_call>\n{}\n</tool_call>", ("<tool_call>\n{}\n</tool_call>", [])),
    (HERMES, "cut <tool_ca", ("cut <tool_ca", [])),
    (HERMES, 'cut <tool_call>{"na', ('cut <tool_call>{"na', [])),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}, oops</tool_call>ok', ("ok", [("add", '{"a": 1}')])),
    (LLAMA3, '{"name": "weather", "parameters": ' + PARIS + "}", ("", [("weather", PARIS)])),
    (LLAMA3, '<|python_tag|>{"name": "add", "parameters": ' + ADD + "}", ("", [("add", ADD)])),
    (
        LLAMA3,
        '{"name": "add", "parameters": {}}; {"name": "weather", "parameters": ' + PARIS + "}",
        ("", [("add", "{}"), ("weather", PARIS)]),
    ),
    (LLAMA3, '{"type": "function", "name": "add", "parameters": {}}', ("", [("add", "{}")])),
    (LLAMA3, ' {"answer": 5}', (' {"answer": 5}', [])),
    (LLAMA3, 'Use {"name": "add", "parameters": {}}', ('Use {"name": "add", "parameters": {}}', [])),
    (LLAMA3, '{"name": "nobody", "parameters": {}} x', ('{"name": "nobody", "parameters": {}} x', [])),
    (LLAMA3, '{"name": ["add"]}', ('{"name": ["add"]}', [])),
]


@pytest.mark.parametrize(("tool_format", "text", "result"), CASES, ids=lambda value: str(value)[:30])
def test_every_cut_gives_the_same(tool_format, text, result):
    for size in range(1, len(text) + 1):
        assert parse([text[i : i + size] for i in range(0, len(text), size)], tool_format) == result


def test_two_calls_in_one_delta_and_in_tokens_of_three_characters():
    text = hermes("weather", PARIS) + "\n" + hermes("add", ADD)
    for pieces in ([text], [text[i : i + 3] for i in range(0, len(text), 3)]):
        content, calls = parse(pieces, HERMES)
        assert content == "" and [json.loads(arguments) for _, arguments in calls] == [
            json.loads(PARIS),
            json.loads(ADD),
        ]


def test_arguments_come_as_they_are_written():
    parser = ToolParser(HERMES, ["add"])
    text = hermes("add", '{"a": 12}')
    at = text.index("{", text.index("arguments"))
    [start] = parser.feed(text[: at + 1])
    assert start["tool_calls"][0]["function"] == {"name": "add", "arguments": "{"}
    assert [parser.feed(c)[0]["tool_calls"][0]["function"]["arguments"] for c in '"a": 12}'] == list('"a": 12}')
    assert parser.feed("}\n</tool_call>") == [] == parser.finish()


def test_an_answer_cut_in_a_call_keeps_what_there_is():
    text = hermes("weather", PARIS)
    end = text.index("Paris") + 3
    assert parse([text[:end]], HERMES) == ("", [("weather", '{"city": "Par')])


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3])
def test_one_call_only(tool_format):
    text = (hermes("add", ADD) * 2) if tool_format is HERMES else '{"name": "add", "parameters": ' + ADD + "}; {}"
    for pieces in ([text], text):
        assert parse(pieces, tool_format, parallel=False) == ("", [("add", ADD)])


PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"name": ',
    '"add"',
    ', "arguments": ',
    "{",
    "}",
    '"',
    "\\",
    "a",
    " ",
    "\n",
    ";",
]


@given(st.lists(st.sampled_from([*PIECES, '{"name": "add", "arguments": {"a": [1]}}', "<|python_tag|>"]), max_size=14))
def test_random_texts_never_fail_and_cuts_do_not_matter(pieces):
    for tool_format in (HERMES, LLAMA3):
        assert (
            parse(pieces, tool_format) == parse(["".join(pieces)], tool_format) == parse("".join(pieces), tool_format)
        )


def test_formats_are_recognised_in_templates():
    assert detect_format("{% if tools %}… return a JSON object within <tool_call></tool_call>") is HERMES
    assert detect_format('Respond in the format {"name": function name, "parameters": dictionary') is LLAMA3
    assert detect_format("{% for tool in tools %}[TOOL_CALLS]") is None

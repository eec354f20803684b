"""How a model's way of writing is read off its files, and markers that are control tokens."""

import pytest

from minispec.errors import ModelError
from minispec.request import Request, SamplingParams
from minispec.server.answer import Answers, ChatStyle, message_of
from minispec.server.tool_parser import HERMES, LLAMA3
from minispec.server.tools import ToolUse
from minispec.tokenizer import Tokenizer
from tiny_folders import tiny_folder
from tokenizers_fixture import BYTE_VOCAB_SIZE, byte_tokenizer_folder

THINK, END_THINK = BYTE_VOCAB_SIZE, BYTE_VOCAB_SIZE + 1
NO_TOOLS = ToolUse(None, None, None)


def style_of(path, template, **options):
    return ChatStyle.of(Tokenizer.from_folder(byte_tokenizer_folder(path, chat_template=template)), **options)


def test_styles(tmp_path):
    assert style_of(tmp_path / "a", "{{ messages }}") == ChatStyle(None, False, False)
    assert style_of(tmp_path / "b", "{{ tools }} <tool_call>") == ChatStyle(HERMES, True, False)
    assert style_of(tmp_path / "c", "{{ tools }} <|python_tag|>") == ChatStyle(LLAMA3, True, False)
    assert style_of(tmp_path / "d", "{{ messages[0].content.split('</think>') }}").reasons
    named = [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "{{ tools }}<tool_call>"},
    ]
    assert style_of(tmp_path / "e", named) == ChatStyle(HERMES, True, False)
    assert style_of(tmp_path / "f", None) == ChatStyle(None, False, False)
    options = {"tool_parser": "llama3", "reasoning_parser": "think"}
    assert style_of(tmp_path / "g", "{{ tools }} <tool_call>", **options) == ChatStyle(LLAMA3, True, True)
    options = {"tool_parser": "none", "reasoning_parser": "none"}
    assert style_of(tmp_path / "h", "{{ tools }} <tool_call></think>", **options) == ChatStyle(None, True, False)


@pytest.mark.parametrize("inside", [False, True])
def test_markers_that_are_control_tokens(tmp_path, inside):
    """They are spelt out for the parser, though control tokens are no text otherwise."""
    tokenizer = Tokenizer.from_folder(tiny_folder(tmp_path, vocab=280, extra_tokens=("<think>", "</think>")))
    assert {THINK, END_THINK} <= tokenizer.special_ids
    prompt = [104, THINK, 10] if inside else [104]
    output = [*([] if inside else [THINK]), *b"ab", END_THINK, *b"cd"]
    answers = Answers(ChatStyle(None, False, True), NO_TOOLS, tokenizer, prompt)
    request = Request(
        id="r", prompt=tuple(prompt), params=SamplingParams(), decoder=tokenizer.decoder(prompt), limit=len(output)
    )
    answers.prepare(request)
    request.append(output)
    message = message_of(request.text, answers.parser())
    assert (message["reasoning_content"], message["content"]) == ("ab", "cd")
    assert answers.reasoning_tokens(request) == output.index(END_THINK) + 1


def test_a_broken_template_is_found_before_loading(tmp_path):
    with pytest.raises(ModelError, match="line 2"):
        Tokenizer.from_folder(byte_tokenizer_folder(tmp_path, chat_template="{{ messages }}\n{% if %}"))

"""What a model's text means: reasoning, answer, tool calls. How a model writes them is read off its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minispec.constraint import OutputFormat
from minispec.errors import RequestError
from minispec.request import Request
from minispec.server.formats import lark_rule
from minispec.server.reasoning import CLOSE, OPEN, ReasoningSplitter, is_opened
from minispec.server.tool_parser import FORMATS, ToolFormat, ToolParser, detect_format
from minispec.server.tools import ToolUse, with_reasoning
from minispec.tokenizer import Tokenizer

_PROMPT_END = 16  # tokens of a prompt in which a marker at its end stands


@dataclass(frozen=True)
class ChatStyle:
    """How the served model writes what is not plain text.

    Attributes:
        tools: the format of its tool calls, None if it has none or it is unknown.
        knows_tools: its chat template shows it the tools.
        reasons: it may reason between markers first.
    """

    tools: ToolFormat | None
    knows_tools: bool
    reasons: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, tool_parser: str = "auto", reasoning_parser: str = "auto") -> ChatStyle:
        """The style of a model, as its chat template tells or as the options of those names say."""
        template = tokenizer.chat_template
        source = template.source_for(tools=True)
        tools = detect_format(source) if tool_parser == "auto" else FORMATS.get(tool_parser)
        marked = CLOSE in template.source_for(tools=False)
        reasons = marked if reasoning_parser == "auto" else reasoning_parser != "none"
        return cls(tools, template.mentions("tools"), reasons)

    def check(self, use: ToolUse) -> None:
        """Raises RequestError if this model cannot be given tools."""
        if not use:
            return
        if not self.knows_tools:
            raise RequestError(
                "This model's chat template knows no tools, so it would never hear of them; leave tools out, or put a "
                "chat_template.jinja that shows them in the model folder.",
                param="tools",
                code="unsupported_parameter",
            )
        if self.tools is None:
            raise RequestError(
                "How this model writes tool calls is not known; start the server with --tool-parser "
                f"{' or '.join(FORMATS)}, or leave tools out.",
                param="tools",
                code="unsupported_parameter",
            )


class Answers:
    """How the answers to one prompt are read.

    Args:
        style: of the model.
        use: the tools that the request has.
        prompt: token ids.
    """

    def __init__(self, style: ChatStyle, use: ToolUse, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._style = style
        self._use = use
        self._tokenizer = tokenizer
        self._inside = style.reasons and is_opened(tokenizer.spell(prompt[-_PROMPT_END:]))
        markers = [style.tools.opening, style.tools.closing] if use and style.tools else []
        self._spelt = tokenizer.ids_of([*markers, *([OPEN, CLOSE] if style.reasons else [])])

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        tools = None
        if self._use and self._style.tools is not None:
            tools = ToolParser(self._style.tools, self._use.names, parallel=self._use.parallel)
        return AnswerParser(ReasoningSplitter(inside=self._inside) if self._style.reasons else None, tools)

    def prepare(self, request: Request) -> None:
        """Let the request's text hold the markers, even if they are control tokens."""
        if self._spelt & self._tokenizer.special_ids:
            request.decoder = self._tokenizer.decoder(request.prompt, spelt=self._spelt)

    def output_format(self, wanted: OutputFormat | None) -> OutputFormat | None:
        """What the whole text must be, where the answer itself must be ``wanted``."""
        use, reasons, inside = self._use, self._style.reasons, self._inside
        if use and self._style.tools is not None:
            answer = None if wanted is None or use.is_forced else lark_rule(wanted)
            grammar = use.grammar(self._style.tools, answer=answer, reasons=reasons, inside=inside)
            return None if grammar is None else OutputFormat("grammar", grammar)
        if wanted is None or not reasons:
            return wanted
        return OutputFormat("grammar", with_reasoning("answer", [f"answer: {lark_rule(wanted)}"], True, inside))

    def reasoning_tokens(self, request: Request) -> int:
        """How many of the request's tokens are reasoning, the markers included."""
        if not self._style.reasons:
            return 0
        splitter = ReasoningSplitter(inside=self._inside)
        decoder = self._tokenizer.decoder(request.prompt, spelt=self._spelt)
        output = request.output
        for count, token in enumerate(output, 1):
            splitter.feed(decoder.feed(token))
            if splitter.ended:
                return count
        return len(output) if splitter.begun else 0


class AnswerParser:
    """Reads one answer as it comes: text in, deltas of an assistant message out."""

    def __init__(self, reasoning: ReasoningSplitter | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def reasons(self) -> bool:
        return self._reasoning is not None

    @property
    def num_calls(self) -> int:
        """Tool calls found so far."""
        return 0 if self._tools is None else self._tools.num_calls

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Deltas, none of them empty, each with ``reasoning_content``, ``content`` or ``tool_calls``."""
        reasoning, answer = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        return self._deltas(reasoning, self._answer(answer))

    def finish(self) -> list[dict[str, Any]]:
        """What was held back, once the text has ended."""
        reasoning, answer = ("", "") if self._reasoning is None else self._reasoning.finish()
        return self._deltas(reasoning, self._answer(answer) + ([] if self._tools is None else self._tools.finish()))

    def _answer(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        return [{"content": text}] if self._tools is None else self._tools.feed(text)

    def _deltas(self, reasoning: str, answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"reasoning_content": reasoning}, *answer] if reasoning else answer


def message_of(text: str, parser: AnswerParser) -> dict[str, Any]:
    """The whole message of an answer: its deltas joined, as a client joins those of a stream."""
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for delta in [*parser.feed(text), *parser.finish()]:
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({key: value for key, value in call.items() if key != "index"})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if parser.reasons:
        message["reasoning_content"] = reasoning or None
    return {**message, "tool_calls": calls} if calls else message

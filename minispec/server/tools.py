"""Tools of a chat request: what may be given, who decides on a call, and the grammar that holds the model to it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from minispec.errors import RequestError
from minispec.server.formats import LAYOUT
from minispec.server.json_body import short
from minispec.server.reasoning import CLOSE, OPEN
from minispec.server.tool_parser import ToolFormat

MAX_TOOLS = 128

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}\Z")


class Function(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str = Field(json_schema_extra={"pattern": "^[a-zA-Z0-9_.-]{1,64}$"})
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments, an object.")
    strict: bool | None = Field(
        default=None, description="Hold the arguments to the schema, also where a call is free."
    )


class Tool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: Function


CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
        {"type": "null"},
    ]
}


class ToolUse:
    """The tools that a request really has.

    Attributes:
        tools: what the chat template gets to see; none with ``tool_choice`` none.
        names: of their functions.
        choice: who decides: "none", "auto", "required", or the name of the one function to call.
        parallel: more than one call is welcome.
    """

    def __init__(self, tools: Sequence[Tool] | None, choice: Any, parallel: bool | None) -> None:
        """
        Args:
            choice: ``tool_choice`` as it was given.

        Raises:
            RequestError: a bad choice, or tools that contradict it or each other.
        """
        given = tools or []
        if len(given) > MAX_TOOLS:
            raise RequestError(f"at most {MAX_TOOLS} tools are allowed, {len(given)} given", param="tools")
        names = [tool.function.name for tool in given]
        for index, name in enumerate(names):
            where = f"tools[{index}].function.name"
            if not _NAME.match(name):
                raise RequestError(
                    f"{where} must be 1 to 64 letters, digits, dots, dashes or underscores, not {name[:80]!r}",
                    param=where,
                )
            if name in names[:index]:
                raise RequestError(f"{where} is {name!r} a second time; names must differ", param=where)
            kind = (given[index].function.parameters or {}).get("type", "object")
            if kind != "object":
                where = f"tools[{index}].function.parameters"
                raise RequestError(f'{where} must be of "type": "object", not {short(kind)}', param=f"{where}.type")
        self.is_named = isinstance(choice, dict)
        self.choice = _choice(choice) or ("auto" if given else "none")
        if self.is_named and self.choice not in names:
            known = ", ".join(names) or "there are none"
            raise RequestError(
                f"tool_choice names {self.choice!r}, which is not among the tools: {known}", param="tool_choice"
            )
        if choice == "required" and not given:
            raise RequestError('tool_choice is "required", but no tools are given', param="tool_choice")
        self._given = given if self.is_named or self.choice != "none" else []
        self.names = [tool.function.name for tool in self._given]
        self.tools = [tool.model_dump(exclude_none=True) for tool in self._given]
        self.parallel = parallel is not False and not self.is_named

    def __bool__(self) -> bool:
        return bool(self.tools)

    @property
    def is_forced(self) -> bool:
        """The answer has to be a call."""
        return self.is_named or self.choice == "required"

    def grammar(
        self, tool_format: ToolFormat, *, answer: str | None = None, reasons: bool = False, inside: bool = False
    ) -> str | None:
        """The grammar (Lark, as llguidance reads it) of the answers allowed; None where any text is.

        Args:
            answer: Lark rule of an answer that is no call, where the request demands a format; None for any text.
            reasons: the answer may begin with reasoning.
            inside: it begins inside the reasoning, which the prompt has opened.
        """
        if not self.is_forced and answer is None and not any(tool.function.strict for tool in self._given):
            return None
        chosen = [tool for tool in self._given if not self.is_named or tool.function.name == self.choice]
        calls = {"anyOf": [_call_schema(tool, tool_format) for tool in chosen], "x-guidance": LAYOUT}
        rules = [f"body: %json {json.dumps(calls)}"]
        # A marker that may be left out is: it may be a special token, and those are no text to a grammar.
        begin, end, between = "", "", "; "
        if tool_format.closing:
            begin, end, between = f"{tool_format.opening}\n", f"\n{tool_format.closing}", "\n"
        more = f"({json.dumps(between + begin)} body {json.dumps(end)})*" if self.parallel else ""
        rest = f"body {json.dumps(end)} {more}"
        first = f"{json.dumps(begin)} {rest}"
        if self.is_forced or answer is not None:
            rules += [f"answer: {answer}"] if not self.is_forced else []
            start = first if self.is_forced else f"{first} | answer"
            return with_reasoning(start, rules, reasons, inside)
        # The text before a call ends with the marker that begins the call.
        if tool_format.anywhere:
            marker = json.dumps(begin.strip())
            rules += [
                f"before[suffix={marker}]: /(?s:.*)/",
                f"TEXT: /(?s:.*)/ & ~/(?s:.*){re.escape(begin.strip())}(?s:.*)/",
            ]
            start = f'before "\\n" {rest} | TEXT'
        else:
            rules.append(r"TEXT: /([^{](?s:.*))?/")
            start = f"{first} | TEXT"
        # without an opened one, reasoning is text like any other
        return with_reasoning(start, rules, reasons and inside, inside)


def with_reasoning(start: str, rules: Sequence[str], reasons: bool, inside: bool) -> str:
    """The grammar whose answers are ``start``, possibly after reasoning; see `ToolUse.grammar` for the arguments."""
    if not reasons:
        return "\n".join([f"start: {start}", *rules])
    reasoning = [f"reasoning[suffix={json.dumps(CLOSE)}]: /(?s:.*)/", r"BLANK: /\s{1,4}/"]
    first = "reasoning BLANK? main" if inside else f"{json.dumps(OPEN)} reasoning BLANK? main | main"
    return "\n".join([f"start: {first}", f"main: {start}", *rules, *reasoning])


def _call_schema(tool: Tool, tool_format: ToolFormat) -> dict[str, Any]:
    # With an id of its own a schema is a document of its own: `#/$defs/…` in it means its definitions, not ours.
    own = {"$id": f"tool:///{tool.function.name}", "type": "object"}
    parameters = {**own, **(tool.function.parameters or {})}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, tool_format.arguments: parameters},
        "required": ["name", tool_format.arguments],
        "additionalProperties": False,
    }


def _choice(value: Any) -> str | None:
    """Who decides, or the name of the function to call; None where nothing is said."""
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise RequestError(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}, not '
        f"{short(value)}.",
        param="tool_choice",
    )

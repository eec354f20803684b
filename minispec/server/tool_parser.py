"""Tool calls in the text that a model writes, found as the text comes.

    Hermes   <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>, as often as wanted, after text or without
    Llama 3  {"name": "f", "parameters": {…}}, several with "; " between, nothing else; <|python_tag|> may stand before

A call is passed on while it is being written: its name as soon as it is known, its arguments character by character as
the model spells them. What looks like a call and is none (no JSON, an unknown name) is text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from minispec.server.reasoning import without_marker_start


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        opening, closing: markers around a call; no closing marker where it is empty.
        anywhere: calls may follow text. Otherwise a call is the first thing of an answer, the marker being optional.
        arguments: key of the arguments.
    """

    name: str
    opening: str
    closing: str = ""
    anywhere: bool = False
    arguments: str = "arguments"


HERMES = ToolFormat(name="hermes", opening="<tool_call>", closing="</tool_call>", anywhere=True)
LLAMA3 = ToolFormat(name="llama3", opening="<|python_tag|>", arguments="parameters")
FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA3)}
PARSERS = ("auto", "none", *FORMATS)
"""Values of ``--tool-parser``; auto recognises the format in the chat template."""


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches, None if it is none of those known here."""
    if HERMES.opening in template:
        return HERMES
    if LLAMA3.opening in template or '{"name": function name, "parameters"' in template:
        return LLAMA3
    return None


class _At(Enum):
    """Where in the JSON object of a call the next character stands."""

    START = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()
    END = auto()


_NEXT = {(_At.START, "{"): _At.KEY, (_At.COLON, ":"): _At.VALUE, (_At.COMMA, ","): _At.KEY, (_At.COMMA, "}"): _At.END}
_BLANK = " \t\r\n"
_PAIRS = {"{": 1, "[": 1, "}": -1, "]": -1}


class CallScanner:
    """Reads one object ``{"name": …, "arguments": {…}}``, its keys in any order, character by character.

    Attributes:
        name: once it is known.
        closed: the object has ended.
        broken: this is no call; what follows does not matter.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.closed = False
        self.broken = False
        self._at = _At.START
        self._key = ""
        self._raw = ""  # the key or value being read
        self._depth = 0
        self._in_string = self._escaped = False
        self._arguments = ""  # read, and not taken yet
        self._has_arguments = False

    def feed(self, character: str) -> None:
        if self.closed or self.broken:
            return
        if self._at in (_At.IN_KEY, _At.IN_VALUE):
            self._read(character)
        elif character not in _BLANK:
            self._begin(character)

    def take(self) -> str:
        """The text of the arguments read since the last time."""
        taken, self._arguments = self._arguments, ""
        return taken

    def _begin(self, character: str) -> None:
        following = _NEXT.get((self._at, character))
        if self._at is _At.KEY and character == '"':
            self._at, self._raw, self._in_string, self._depth = _At.IN_KEY, character, True, 0
        elif self._at is _At.VALUE and character not in ",:}]":
            self._at, self._raw, self._depth = _At.IN_VALUE, character, _PAIRS.get(character, 0)
            self._in_string = character == '"'
            if self._is_arguments and self._depth:
                self._has_arguments = True
                self._arguments += character
        elif following is not None:
            self._at = following
            if following is _At.END:
                self._close()
        else:
            self.broken = True

    def _read(self, character: str) -> None:
        """One more character of a key or of a value."""
        is_scalar = self._at is _At.IN_VALUE and self._raw[0] not in '"{['
        if is_scalar and character in ",}" + _BLANK:
            self._end_value()
            self.feed(character)
            return
        self._raw += character
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = character == "\\"
            self._in_string = character != '"'
        else:
            self._in_string = character == '"'
            self._depth += _PAIRS.get(character, 0)
        if self._at is _At.IN_VALUE and self._is_arguments and self._raw[0] in "{[":
            self._arguments += character
        if not self._in_string and not self._depth and not is_scalar:
            if self._at is _At.IN_KEY:
                self._key, self._at = self._raw[1:-1], _At.COLON
            else:
                self._end_value()

    @property
    def _is_arguments(self) -> bool:
        # Models mix the two up; a call has one of them.
        return self._key in ("arguments", "parameters")

    def _end_value(self) -> None:
        self._at = _At.COMMA
        if self._key == "name":
            value = _loads(self._raw)
            self.name = value if isinstance(value, str) else None
            self.broken = self.name is None
        elif self._is_arguments and self._raw[0] == '"':  # some models write them as a string that holds JSON
            value = _loads(self._raw)
            self._arguments += value if isinstance(value, str) else self._raw
            self._has_arguments = True

    def _close(self) -> None:
        self.closed = True
        self.broken = self.name is None
        if not self._has_arguments:  # left out, or null
            self._arguments += "{}"


def _loads(raw: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


class _State(Enum):
    TEXT = auto()
    CALL = auto()
    BETWEEN = auto()  # a call has ended, its closing marker or the next call may follow
    BROKEN = auto()  # a call that was passed on stopped being JSON: up to its closing marker nothing is text
    DROP = auto()  # whatever comes is left out
    PLAIN = auto()  # no call can come any more


class ToolParser:
    """Finds the calls in one growing answer. What it gives, joined, does not depend on where the pieces are cut.

    Args:
        tool_format: how the model writes calls.
        names: the functions there are.
        parallel: False keeps the first call only.

    Attributes:
        num_calls: calls found so far.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str], *, parallel: bool = True) -> None:
        self.num_calls = 0
        self._format = tool_format
        self._names = frozenset(names)
        self._parallel = parallel
        self._state = _State.TEXT
        self._buffer = ""
        self._scanner = CallScanner()
        self._raw = ""  # of the call being read, as long as it may turn out to be text
        self._is_passed_on = False  # the call being read
        self._deltas: list[dict[str, Any]] = []

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Deltas of an assistant message, each with ``content`` or with ``tool_calls``."""
        self._buffer += text
        while self._advance():
            pass
        return self._taken()

    def finish(self) -> list[dict[str, Any]]:
        """What was held back, once the text has ended."""
        if self._state is _State.CALL and not self._is_passed_on:
            self._text(self._raw)
        elif self._state in (_State.TEXT, _State.PLAIN):
            self._text(self._buffer)
        return self._taken()

    def _taken(self) -> list[dict[str, Any]]:
        taken, self._deltas = self._deltas, []
        return taken

    def _advance(self) -> bool:
        """Go on by one state; False if the rest of the buffer has to wait for more."""
        match self._state:
            case _State.TEXT:
                return self._find_call()
            case _State.CALL:
                return self._read_call()
            case _State.BETWEEN:
                return self._find_next()
            case _State.BROKEN:
                _, closing, rest = self._buffer.partition(self._format.closing)
                if not closing:
                    return False
                self._go(_State.TEXT, rest)
                return True
            case _State.DROP:
                self._buffer = ""
            case _State.PLAIN:
                self._text(self._buffer)
                self._buffer = ""
        return False

    def _go(self, state: _State, buffer: str, raw: str = "") -> None:
        self._state, self._buffer = state, buffer
        if state is _State.CALL:
            self._scanner, self._raw, self._is_passed_on = CallScanner(), raw, False

    def _find_call(self) -> bool:
        opening, start = self._format.opening, self._buffer.lstrip()
        if self._format.anywhere:
            before, marker, rest = self._buffer.partition(opening)
            if marker:
                self._text(before.rstrip())
                self._go(_State.CALL, rest, before[len(before.rstrip()) :] + opening)
                return True
            safe = len(without_marker_start(self._buffer, opening))
            self._text(self._buffer[:safe])
            self._buffer = self._buffer[safe:]
            return False
        if start.startswith(("{", opening)):
            rest = start.removeprefix(opening)
            self._go(_State.CALL, rest, self._buffer[: len(self._buffer) - len(rest)])
            return True
        if opening.startswith(start):
            return False
        self._state = _State.PLAIN
        return True

    def _read_call(self) -> bool:
        scanner = self._scanner
        for at, character in enumerate(self._buffer):
            scanner.feed(character)
            self._raw += character
            is_call = scanner.name in self._names
            if scanner.broken or (scanner.name is not None and not is_call):
                rest = self._buffer[at + 1 :]
                if self._is_passed_on:
                    self._go(_State.BROKEN if self._format.closing else _State.DROP, rest)
                else:
                    self._text(self._raw)
                    self._go(_State.TEXT if self._format.anywhere else _State.PLAIN, rest)
                return True
            if is_call and not self._is_passed_on:
                self._is_passed_on = True
                self._call(name=scanner.name, arguments="")
                self.num_calls += 1
            if self._is_passed_on and (arguments := scanner.take()):
                self._call(arguments=arguments)
            if scanner.closed:
                self._go(_State.BETWEEN if self._parallel else _State.DROP, self._buffer[at + 1 :])
                return True
        self._buffer = ""
        return False

    def _find_next(self) -> bool:
        opening, closing = self._format.opening, self._format.closing
        if closing:
            rest = self._buffer.lstrip()
            if rest.startswith(closing):
                # what separates this call from the next, or from a text, is no text
                rest = rest.removeprefix(closing).lstrip()
                if not rest:
                    self._buffer = closing
                    return False
            elif closing.startswith(rest):
                return False
            self._go(_State.TEXT, rest)
            return True
        rest = self._buffer.lstrip(_BLANK + ";")
        if not rest or (opening.startswith(rest) and rest != opening):
            return False
        if rest.startswith(("{", opening)):
            rest = rest.removeprefix(opening)
            self._go(_State.CALL, rest, self._buffer[: len(self._buffer) - len(rest)])
        else:
            self._go(_State.PLAIN, rest)
        return True

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._deltas and "content" in self._deltas[-1]:
            self._deltas[-1]["content"] += text
        else:
            self._deltas.append({"content": text})

    def _call(self, *, arguments: str, name: str | None = None) -> None:
        if name is not None:
            head = {"index": self.num_calls, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            self._deltas.append({"tool_calls": [{**head, "function": {"name": name, "arguments": arguments}}]})
            return
        last = self._deltas[-1].get("tool_calls") if self._deltas else None
        if last:
            last[0]["function"]["arguments"] += arguments
        else:
            self._deltas.append({"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": arguments}}]})

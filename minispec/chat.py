"""`minispec chat`: a conversation in the terminal.

run_chat ── Chat (history, commands, totals) ── ChatBackend ─┬─ LocalBackend: an Engine, stepped in this thread
                                                             └─ HttpBackend: any OpenAI-compatible server
"""

from __future__ import annotations

import difflib
import logging
import re
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from minispec.chat_backends import (
    CONTEXT_EXCEEDED,
    ChatBackend,
    ChatDelta,
    ChatError,
    HttpBackend,
    LocalBackend,
    Usage,
)
from minispec.chat_terminal import StreamWriter, clean, keys_unseen, line_reader
from minispec.errors import MinispecError, RequestError
from minispec.request import FinishReason, SpeculationStats

__all__ = ["ChatBackend", "ChatDelta", "ChatError", "HttpBackend", "LocalBackend", "Usage", "run_chat"]

logger = logging.getLogger(__name__)

COMMANDS = {
    "help": "show this",
    "reset": "forget the conversation; the system prompt stays",
    "system": "set the system prompt: /system TEXT; /system shows it, /system - removes it",
    "stats": "show the totals of this session",
    "exit": "leave, as Ctrl-D does",
}
KEYS = {
    "Enter": "send",
    "Alt-Enter": "start a new line",
    "Space": "before a / makes it part of a message",
    "Ctrl-C": "stop the answer; what came so far stays in the conversation",
}

_COMMAND = re.compile(r"/([A-Za-z]*)(?:\s+(.*))?$", re.DOTALL)  # `/usr/bin` is none


@dataclass
class Answer:
    """One answer and the clock over it."""

    text: str = ""
    usage: Usage | None = None
    finish_reason: str | None = None
    interrupted: bool = False
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    first_tokens: int = 1

    def add(self, delta: ChatDelta) -> None:
        if delta.text or delta.tokens:
            self.last = time.perf_counter()
            if self.first is None:
                self.first, self.first_tokens = self.last, max(1, delta.tokens)
        self.text += clean(delta.text)
        self.usage = delta.usage or self.usage
        self.finish_reason = delta.finish_reason or self.finish_reason

    @property
    def timed(self) -> tuple[int, float]:
        """Tokens after the first arrival, and the seconds they took."""
        if self.usage is None or self.first is None:
            return 0, 0.0
        return max(0, self.usage.completion_tokens - self.first_tokens), self.last - self.first

    def summary(self) -> str:
        parts = ["interrupted"] if self.interrupted else []
        if self.usage is not None:
            parts.append(_count(self.usage.completion_tokens, "token"))
        parts += _rate(*self.timed)
        if self.first is not None:
            parts.append(f"first token {self.first - self.started:.2f} s")
        parts += _acceptance(self.usage.speculation if self.usage else None)
        if self.finish_reason == FinishReason.LENGTH:
            parts.append("cut at the length limit")
        return f"[{' · '.join(parts)}]"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _rate(tokens: int, seconds: float) -> list[str]:
    return [f"{tokens / seconds:.1f} tok/s"] if tokens and seconds > 0 else []


def _acceptance(stats: SpeculationStats | None) -> list[str]:
    """Empty without speculation, where the length is 1 and says nothing."""
    if stats is None or not stats.drafted or stats.acceptance_length is None:
        return []
    return [f"acceptance length {stats.acceptance_length:.2f}"]


@dataclass
class Totals:
    """Sums over the answers of a session."""

    answers: int = 0
    interrupted: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    timed_tokens: int = 0
    seconds: float = 0.0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, answer: Answer) -> None:
        self.answers += 1
        self.interrupted += answer.interrupted
        tokens, seconds = answer.timed
        self.timed_tokens += tokens
        self.seconds += seconds
        if answer.usage is None:
            return
        self.prompt_tokens += answer.usage.prompt_tokens
        self.completion_tokens += answer.usage.completion_tokens
        if (stats := answer.usage.speculation) is not None:
            self.speculation.steps += stats.steps
            self.speculation.drafted += stats.drafted
            self.speculation.accepted += stats.accepted
            self.speculation.emitted += stats.emitted

    def rows(self) -> dict[str, str]:
        stats = self.speculation
        rows = {
            "answers": f"{self.answers:,}" + (f", {self.interrupted:,} interrupted" if self.interrupted else ""),
            "tokens": f"{self.prompt_tokens:,} read, {self.completion_tokens:,} written",
            "speed": " · ".join(_rate(self.timed_tokens, self.seconds)),
            "speculation": " · ".join(_acceptance(stats)),
        }
        if rows["speculation"]:
            share = f"{stats.accepted:,} of {stats.drafted:,} draft tokens accepted in {_count(stats.steps, 'step')}"
            rows["speculation"] += f" · {share}"
        return {label: value for label, value in rows.items() if value}


class Chat:
    """A conversation and what has been said in it.

    Args:
        params: see ChatBackend.stream.
        console: where answers go.
        notes: where everything else goes; another stream than the answers' where those are piped on.
        interactive: a person reads along: show timings, and let Ctrl-C end the answer only.
    """

    def __init__(
        self,
        backend: ChatBackend,
        params: dict[str, Any],
        *,
        system: str | None,
        console: Console,
        notes: Console,
        interactive: bool,
    ) -> None:
        self.backend = backend
        self.params = params
        self.system = clean(system) if system else None
        self.history: list[dict[str, str]] = []  # user and assistant in turn, always ending with the assistant
        self.totals = Totals()
        self.failed = False  # any error in the session
        self._console = console
        self._notes = notes
        self._interactive = interactive

    def handle(self, line: str) -> bool:
        """Run a command or ask the model; False to leave."""
        line = clean(line).rstrip()
        if not line.strip():
            return True
        command = _COMMAND.match(line)
        if command is None:
            self.ask(line.strip())
            return True
        return self._command(command[1].lower(), (command[2] or "").strip())

    def ask(self, text: str) -> None:
        """One turn: stream the answer, then add both to the history, unless there is no answer to keep."""
        answer = Answer()
        error: str | None = None
        writer = StreamWriter(self._console)
        user = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            with keys_unseen(), closing(self.backend.stream([*system, *self.history, user], self.params)) as deltas:
                for delta in deltas:
                    answer.add(delta)
                    writer.write(clean(delta.text))
        except KeyboardInterrupt:
            answer.interrupted = True
        except MinispecError as exc:
            error = str(exc)
            if isinstance(exc, RequestError) and exc.code == CONTEXT_EXCEEDED:
                error += (
                    "\nThe conversation has outgrown the context. /reset starts a new one; a shorter message may fit."
                )
        except Exception as exc:  # a bug ends the answer, not the conversation
            logger.debug("the chat backend failed", exc_info=True)
            error = f"{type(exc).__name__}: {exc}"
        if answer.text or error is None:
            writer.finish()
        # What has been read is part of the conversation, whole or not. Nothing at all is not: many chat templates
        # insist on user and assistant taking turns.
        kept = bool(answer.text) or (error is None and not answer.interrupted)
        if kept:
            self.history += [user, {"role": "assistant", "content": answer.text}]
        if kept or answer.interrupted:
            self.totals.add(answer)
        if error is not None:
            self._error(error if kept else f"{error}\nYour message was not kept.")
        elif self._interactive:
            self._note(answer.summary() + ("" if kept else " your message was not kept"))
        if answer.interrupted and not self._interactive:
            raise KeyboardInterrupt

    def _command(self, name: str, argument: str) -> bool:
        match name:
            case "exit":
                return False
            case "help":
                self._table({f"/{command}": text for command, text in COMMANDS.items()} | KEYS)
            case "reset":
                self.history.clear()
                self._note("The conversation is forgotten.")
            case "stats":
                self._table(self.totals.rows())
            case "system" if argument == "-":
                self.system = None
                self._note("The system prompt is removed.")
            case "system" if argument:
                self.system = argument
                self._note("The system prompt is set, from your next message on.")
            case "system":
                self._note(self.system or "There is no system prompt; /system TEXT sets one.")
            case _:
                close = [c for c in COMMANDS if name and c.startswith(name)]
                close = close or difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
                hint = f"Did you mean /{close[0]}?" if close else "/help lists the commands."
                self._error(f"There is no command /{name}. {hint}")
        return True

    def _note(self, text: str) -> None:
        self._notes.print(Text(clean(text), style="dim"), soft_wrap=not self._interactive)

    def _error(self, text: str) -> None:
        self.failed = True
        self._notes.print(Text(clean(text), style="red"), soft_wrap=not self._interactive)

    def _table(self, rows: dict[str, str]) -> None:
        width = max(map(len, rows))
        for label, text in rows.items():
            self._notes.print(Text.assemble("  ", (label.ljust(width), "bold"), "  ", (clean(text), "dim")))


# ---------------------------------------------------------------------------------------------------- the terminal


def run_chat(
    backend: ChatBackend,
    *,
    system: str | None = None,
    console: Console | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
) -> int:
    """Chat until the person leaves; returns the exit status.

    Without a terminal, each line of standard input is a message, answers alone go to standard output, and the status
    tells whether any failed.

    Args:
        system: system prompt; None leaves it to the model's chat template.
        max_tokens, temperature, top_p, top_k, min_p, seed: as in SamplingParams; None is the default of the
            model or server.
    """
    console = console or Console()
    interactive = sys.stdin.isatty() and console.is_terminal
    notes = console if interactive else Console(stderr=True)
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    params = {name: value for name, value in given.items() if value is not None}
    try:
        name = clean(backend.name)
    except MinispecError as exc:
        notes.print(Text(clean(str(exc)), style="red"), soft_wrap=True)
        return exc.exit_status
    chat = Chat(backend, params, system=system, console=console, notes=notes, interactive=interactive)
    if not interactive:
        return _run_piped(chat)
    console.print(Text.assemble("minispec chat with ", (name, "bold")), soft_wrap=True)
    console.print(Text("/help shows the commands · Ctrl-C stops an answer · Ctrl-D leaves", style="dim"))
    read = line_reader(COMMANDS)
    while True:
        try:
            console.print()
            if not chat.handle(read()):
                return 0
        except EOFError:
            return 0
        except KeyboardInterrupt:  # at the prompt, or in the instant before or after an answer
            console.print(Text("Ctrl-D or /exit leaves.", style="dim"))


def _run_piped(chat: Chat) -> int:
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    try:
        for line in sys.stdin:
            if not chat.handle(line):
                break
    except KeyboardInterrupt:
        return 130  # what a shell expects of an interrupted command
    return int(chat.failed)

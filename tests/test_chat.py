"""The terminal conversation: turns, commands, and what reaches the screen."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from chat_helpers import USAGE, assistant, make_chat, user
from minispec.chat import COMMANDS, run_chat
from minispec.chat_backends import ChatDelta, ChatError, HttpBackend, Usage
from minispec.chat_terminal import StreamWriter, line_reader
from minispec.errors import RequestError
from minispec.request import SpeculationStats


class Scripted:
    """Answers with the next script: texts to stream, or an exception to raise in their midst."""

    name = "scripted"

    def __init__(self, *scripts: list[str | BaseException], usage: Usage | None = USAGE) -> None:
        self.scripts = list(scripts)
        self.usage = usage
        self.seen: list[list[dict[str, str]]] = []
        self.params: dict[str, Any] = {}
        self.closed = 0

    def stream(self, messages: list[dict[str, str]], params: dict[str, Any]) -> Generator[ChatDelta, None, None]:
        self.seen.append(messages)
        self.params = params
        try:
            for item in self.scripts.pop(0):
                if isinstance(item, BaseException):
                    raise item
                yield ChatDelta(item, tokens=1)
            yield ChatDelta(usage=self.usage, finish_reason="stop")
        finally:
            self.closed += 1


# ---------------------------------------------------------------------------------------------------------- turns


def test_turns_build_history_and_show_timing() -> None:
    backend = Scripted([" Hel", "lo"], ["Bye"])
    chat, screen = make_chat(backend, system="Be brief.")
    assert chat.handle("hi\n") and chat.handle("bye")
    assert backend.seen[1] == [{"role": "system", "content": "Be brief."}, user("hi"), assistant(" Hello"), user("bye")]
    assert chat.history[-1] == assistant("Bye")
    assert screen.getvalue().startswith("Hello\n")  # the model's leading space is not shown
    shown = re.search(
        r"\[5 tokens · [\d.]+ tok/s · first token \d\.\d\d s · acceptance length 2\.00\]", screen.getvalue()
    )
    assert shown


def test_acceptance_length_is_left_out_without_drafts_and_tokens_without_usage() -> None:
    chat, screen = make_chat(Scripted(["a", "b"], usage=Usage(3, 2, SpeculationStats(2, 0, 0, 2))))
    chat.handle("hi")
    assert "2 tokens" in screen.getvalue() and "acceptance" not in screen.getvalue()
    chat, screen = make_chat(Scripted(["a"], usage=None))
    chat.handle("hi")
    assert re.search(r"\[first token [\d.]+ s\]", screen.getvalue())


def test_interrupt_keeps_the_partial_answer_and_the_chat() -> None:
    backend = Scripted(["One", " two", KeyboardInterrupt()], ["three"])
    chat, screen = make_chat(backend)
    assert chat.handle("count")
    assert backend.closed == 1
    assert chat.history == [user("count"), assistant("One two")]
    assert "One two\n[interrupted" in screen.getvalue()
    chat.handle("go on")
    assert backend.seen[1] == [user("count"), assistant("One two"), user("go on")]


def test_interrupt_while_printing_closes_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(self: StreamWriter, text: str) -> None:
        raise KeyboardInterrupt

    backend = Scripted(["One", " two"])
    chat, _ = make_chat(backend)
    monkeypatch.setattr(StreamWriter, "write", pressed)
    chat.handle("count")
    assert backend.closed == 1 and chat.history == [user("count"), assistant("One")]


def test_interrupt_before_the_first_token_drops_the_turn() -> None:
    chat, screen = make_chat(Scripted([KeyboardInterrupt()]))
    assert chat.handle("hi")
    assert chat.history == [] and "your message was not kept" in screen.getvalue()


def test_an_outgrown_context_suggests_reset_and_drops_the_turn() -> None:
    error = RequestError("limit 10 tokens, prompt 12", code="context_length_exceeded")
    backend = Scripted(["a"], [error], ["b"])
    chat, screen = make_chat(backend)
    assert chat.handle("one") and chat.handle("two")
    assert "limit 10 tokens, prompt 12" in screen.getvalue() and "/reset" in screen.getvalue()
    assert chat.history == [user("one"), assistant("a")]
    assert chat.handle("/reset") and chat.handle("three")
    assert backend.seen[-1] == [user("three")]


def test_any_error_ends_the_answer_only() -> None:
    chat, screen = make_chat(Scripted([ZeroDivisionError("oops")], ["par", ChatError("lost [red]it[/red]")]))
    assert chat.handle("one") and chat.handle("two")
    assert "ZeroDivisionError: oops" in screen.getvalue() and "Traceback" not in screen.getvalue()
    assert "lost [red]it[/red]" in screen.getvalue()
    assert chat.history == [user("two"), assistant("par")]  # what was read stays
    assert chat.failed


def test_nothing_the_model_writes_is_obeyed() -> None:
    chat, screen = make_chat(Scripted(["[bold red]x[/bold red] :smile: \x1b[31m\x07\r\x9b2J\ud83d\tend"]))
    chat.handle("hi")
    assert screen.getvalue().startswith("[bold red]x[/bold red] :smile: [31m2J\ufffd\tend\n")
    assert chat.history[1]["content"] == "[bold red]x[/bold red] :smile: [31m2J\ufffd\tend"


# ------------------------------------------------------------------------------------------------------- commands


def test_commands() -> None:
    backend = Scripted(["a"], ["b"])
    chat, screen = make_chat(backend)
    chat.handle("/help")
    assert all(f"/{name}" in screen.getvalue() for name in COMMANDS)
    chat.handle("/system")
    assert "There is no system prompt" in screen.getvalue()
    chat.handle("/SYSTEM Talk like\na pirate.")
    chat.handle("one")
    assert backend.seen[0][0] == {"role": "system", "content": "Talk like\na pirate."}
    chat.handle("/reset")
    chat.handle("/system -")
    chat.handle("two")
    assert backend.seen[1] == [user("two")]
    assert chat.handle("") and chat.handle("  \n") and len(backend.seen) == 2
    assert not chat.handle("/exit")


@pytest.mark.parametrize(
    ("line", "hint"), [("/rest", "/reset"), ("/quit", "/exit"), ("/h", "/help"), ("/sytem x", "/system")]
)
def test_unknown_commands_get_a_suggestion(line: str, hint: str) -> None:
    chat, screen = make_chat(Scripted())
    assert chat.handle(line)
    assert f"Did you mean {hint}?" in screen.getvalue()


def test_unlike_commands_point_at_help() -> None:
    chat, screen = make_chat(Scripted())
    assert chat.handle("/zzz") and chat.handle("/")
    assert screen.getvalue().count("/help lists the commands") == 2


@pytest.mark.parametrize("line", ["/usr/bin is a folder", " /help is a command", "a /reset"])
def test_not_every_slash_is_a_command(line: str) -> None:
    backend = Scripted(["a"])
    make_chat(backend)[0].handle(line)
    assert backend.seen == [[user(line.strip())]]


def test_stats() -> None:
    chat, screen = make_chat(Scripted(["a", "b"], ["c", KeyboardInterrupt()], [ChatError("no")]))
    chat.handle("/stats")
    assert "answers  0" in re.sub(" +", "  ", screen.getvalue())
    for line in ("one", "two", "three", "/stats"):
        chat.handle(line)
    shown = screen.getvalue()
    assert "2, 1 interrupted" in shown and "12 read, 5 written" in shown
    assert "acceptance length 2.00 · 2 of 8 draft tokens accepted in 2 steps" in shown


# -------------------------------------------------------------------------------------------------- the terminal


def written(*chunks: str, width: int = 20, terminal: bool = True) -> str:
    screen = io.StringIO()
    writer = StreamWriter(Console(file=screen, width=width, force_terminal=terminal))
    for chunk in chunks:
        writer.write(chunk)
    writer.finish()
    return screen.getvalue()


def test_lines_break_between_words_however_the_text_is_cut() -> None:
    text = "The quick brown fox jumps over the lazy dog.\n\n    indented 中文字符也要换行换行换行\n- x"
    whole = written(text)
    assert whole == "The quick brown fox \njumps over the lazy \ndog.\n\n    indented 中文字\n符也要换行换行换行\n- x\n"
    assert written(*text) == whole
    assert written(*(text[i : i + 7] for i in range(0, len(text), 7))) == whole
    assert written(text, terminal=False) == text + "\n"


def test_an_endless_word_is_shown_before_it_ends_and_never_cut_by_us() -> None:
    url = "https://example.org/" + "a" * 100
    assert written("see ", *url, " there") == f"see \n{url} \nthere\n".replace(" \nthere", " there")


def test_prompt_edits_completes_and_leaves() -> None:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        read = line_reader(COMMANDS)
        keys.send_text("hello\x1b\rworld\r")  # Alt-Enter
        assert read() == "hello\nworld"
        keys.send_text("/sta\t\r")
        assert read() == "/stats"
        keys.send_text("\x1b[A\x1b[A\x1b[A\r")  # up, through the history
        assert read() == "hello\nworld"
        keys.send_text("x\x03")
        with pytest.raises(KeyboardInterrupt):
            read()
        keys.send_text("\x04")
        with pytest.raises(EOFError):
            read()


def run_piped(monkeypatch: pytest.MonkeyPatch, backend: Any, stdin: str, **settings: Any) -> tuple[int, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    out = io.StringIO()
    return run_chat(backend, console=Console(file=out, width=20), **settings), out.getvalue()


def test_piped_lines_are_answered_plainly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    backend = Scripted(["first answer, longer than the width"], ["second"])
    status, out = run_piped(monkeypatch, backend, "one\n\ntwo", temperature=0.0, seed=3, system="S")
    assert (status, out) == (0, "first answer, longer than the width\nsecond\n")
    assert len(backend.seen[1]) == 4  # it is one conversation
    assert backend.params == {"temperature": 0.0, "seed": 3}
    assert capsys.readouterr().err == ""


def test_piped_failures_go_to_stderr_and_into_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = run_piped(monkeypatch, Scripted([ChatError("no luck")], ["fine"]), "one\ntwo\n/exit\nthree\n")
    assert (status, out) == (1, "fine\n")
    assert "no luck" in capsys.readouterr().err


def test_piped_interrupt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_piped(monkeypatch, Scripted(["par", KeyboardInterrupt()]), "one\ntwo\n") == (130, "par\n")


def test_no_backend_no_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    backend = HttpBackend("http://127.0.0.1:9")  # the discard port: nobody listens
    assert run_piped(monkeypatch, backend, "one\n")[0] == 1
    error = capsys.readouterr().err
    assert "Connection refused" in error and "minispec serve" in error


PTY_CHAT = """
import sys, time
from minispec.chat import run_chat
from minispec.chat_backends import ChatDelta
class Counter:
    name = "counter"
    def stream(self, messages, params):
        for i in range(10000):
            yield ChatDelta(f"n{i} ", tokens=1)
            time.sleep(0.01)
sys.exit(run_chat(Counter()))
"""


def test_in_a_real_terminal() -> None:
    root = Path(__file__).resolve().parents[1]
    main, side = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(root), "TERM": "xterm"}
    child = subprocess.Popen(
        [sys.executable, "-c", PTY_CHAT], stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True,
        # A terminal sends Ctrl-C to the session it controls only.
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(side)
    seen = ""

    def wait_for(text: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + 30
        while text not in seen:
            assert time.monotonic() < deadline, f"no {text!r} in {seen!r}"
            if select.select([main], [], [], 0.1)[0]:
                seen += os.read(main, 65536).decode(errors="replace")
        seen = seen[seen.index(text) + len(text) :]

    try:
        wait_for("counter")
        wait_for("> ")
        os.write(main, b"count\r")
        wait_for("n20 ")
        os.write(main, b"\x03")
        wait_for("interrupted")
        wait_for("> ")
        os.write(main, b"/stats\r")
        wait_for("1, 1 interrupted")
        wait_for("> ")
        os.write(main, b"\x04")
        assert child.wait(timeout=30) == 0
    finally:
        child.kill()
        child.wait()
        os.close(main)

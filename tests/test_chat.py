"""The terminal conversation: turns, commands, both backends, and what reaches the screen."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from minispec.chat import COMMANDS, Chat, run_chat
from minispec.chat_backends import ChatDelta, ChatError, HttpBackend, LocalBackend, Usage, sse_data
from minispec.chat_terminal import StreamWriter, line_reader
from minispec.errors import ConfigError, MinispecError, RequestError
from minispec.request import FinishReason, Request, SamplingParams, SpeculationStats, TokenEvent

USAGE = Usage(12, 5, SpeculationStats(steps=2, drafted=8, accepted=2, emitted=4))


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


def make_chat(backend: Any, *, interactive: bool = True, system: str | None = None) -> tuple[Chat, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    return Chat(backend, {}, system=system, console=console, notes=console, interactive=interactive), screen


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


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


# ------------------------------------------------------------------------------------------------- local backend


class FakeEngine:
    """Steps through a script of (tokens, text, finish reason), or raises SIGINT in the middle of a step."""

    name = "fake"

    def __init__(self, script: list[Any], default_params: dict[str, Any] | None = None) -> None:
        self.script = script
        self.default_params = default_params or {}
        self.tokenizer = SimpleNamespace(apply_chat_template=lambda messages: list(range(len(messages))))
        self.aborted: list[Request] = []
        self.steps = 0

    def make_request(self, prompt: list[int], params: SamplingParams) -> Request:
        self.request = Request(id="r", prompt=tuple(prompt), params=params, limit=100)
        return self.request

    def add(self, request: Request) -> None:
        assert request is self.request

    def abort(self, request: Request) -> None:
        self.aborted.append(request)
        request.end(FinishReason.ABORT)

    def step(self) -> list[TokenEvent]:
        item = self.script.pop(0)
        if item == "interrupt":
            signal.raise_signal(signal.SIGINT)
            item = ([1], "late", None)
        self.steps += 1
        tokens, text, reason = item
        self.request.append(tokens)
        if reason is not None:
            self.request.end(reason, "out of pages" if reason is FinishReason.ERROR else None)
        stranger = Request(id="other", prompt=(1,), params=SamplingParams(), limit=1)
        return [TokenEvent(stranger, [9], "not ours"), TokenEvent(self.request, tokens, text, reason)]


def local(engine: FakeEngine) -> LocalBackend:
    return LocalBackend(engine)  # type: ignore[arg-type]


def test_local_backend_streams_to_the_end() -> None:
    engine = FakeEngine(
        [([], "", None), ([5], "a", None), ([6, 7], "bc", FinishReason.STOP)], {"temperature": 0.5, "top_p": 0.9}
    )
    deltas = list(local(engine).stream([user("x"), assistant("y")], {"temperature": 0.0}))
    assert [(d.text, d.tokens) for d in deltas] == [("", 0), ("a", 1), ("bc", 2)]
    assert deltas[-1].usage == Usage(2, 3, engine.request.speculation) and deltas[-1].finish_reason == "stop"
    assert (engine.request.params.temperature, engine.request.params.top_p) == (0.0, 0.9)
    assert not engine.aborted


def test_local_backend_aborts_when_closed() -> None:
    engine = FakeEngine([([5], "a", None)])
    stream = local(engine).stream([user("x")], {})
    next(stream)
    stream.close()
    assert engine.aborted == [engine.request]


def test_local_backend_finishes_the_step_before_an_interrupt() -> None:
    engine = FakeEngine([([5], "a", None), "interrupt", ([6], "never", None)])
    handler = signal.getsignal(signal.SIGINT)
    chat, _ = make_chat(local(engine))
    chat.handle("hi")
    assert engine.steps == 2 and engine.aborted == [engine.request]
    assert chat.history == [user("hi"), assistant("a")]
    assert signal.getsignal(signal.SIGINT) is handler


def test_local_backend_reports_an_engine_error() -> None:
    with pytest.raises(ChatError, match="out of pages"):
        list(local(FakeEngine([([5], "a", None), ([], "", FinishReason.ERROR)])).stream([user("x")], {}))


# -------------------------------------------------------------------------------------------------- HTTP backend


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.server.authorization = self.headers.get("Authorization")
        self.reply(*self.server.models)

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, chunks = self.server.script
        if status != 200:
            self.reply(status, b"".join(chunks))
            return
        self.send_response(200)
        self.end_headers()
        try:
            for chunk in chunks:
                self.wfile.write(chunk)
                time.sleep(0.005)
        except OSError:
            self.server.disconnected.set()

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: tuple[int, Any] = (200, [])
        self.models: tuple[int, bytes] = (200, b'{"data": [{"id": "m1"}, {"id": "m2"}]}')
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.authorization: str | None = None
        self.disconnected = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def event(text: str = "", finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    chunk = {"choices": [choice], **more}
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


USAGE_EVENT = event(
    choices=[],
    usage={
        "prompt_tokens": 12,
        "completion_tokens": 5,
        "speculation": {"steps": 2, "drafted": 8, "accepted": 2, "acceptance_length": 2.0},
    },
)
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_http_backend_streams(server: FakeServer, suffix: str) -> None:
    text = "Grüße\u2028\u0085 {}"  # U+2028 and U+0085 end a line for str.splitlines, and not for SSE
    stream = b": ping\r\n\r\n" + event(text).replace(b"\n", b"\r\n") + event("!", "stop") + USAGE_EVENT + DONE
    server.script = (200, [stream[i : i + 9] for i in range(0, len(stream), 9)])
    backend = HttpBackend(server.url.removeprefix("http://") + suffix, "key")
    assert backend.name == f"m1 at {server.url}"
    deltas = list(backend.stream([user("hi")], {"temperature": 0.0}))
    assert "".join(delta.text for delta in deltas) == text + "!"
    assert [delta.finish_reason for delta in deltas] == [None, "stop", None]
    assert deltas[-1].usage == USAGE
    assert server.authorization == "Bearer key" and server.paths == ["/v1/chat/completions"]
    assert server.bodies == [
        {
            "model": "m1",
            "messages": [user("hi")],
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    backend.close()


@pytest.mark.parametrize("models", [(404, b"?"), (200, b'{"data": []}'), (200, b"<html>")])
def test_a_server_that_lists_no_model_may_take_any(server: FakeServer, models: tuple[int, bytes]) -> None:
    server.models = models
    assert HttpBackend(server.url).name == f"default at {server.url}"


@pytest.mark.parametrize(
    ("status", "text"), [(401, "--api-key.*told so"), (503, r"status 503\): told so"), (400, "told so")]
)
def test_a_server_that_refuses_to_list_its_models_is_no_start(server: FakeServer, status: int, text: str) -> None:
    server.models = (status, b'{"error": {"message": "told so"}}')
    with pytest.raises(MinispecError, match=text):
        _ = HttpBackend(server.url).name


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (401, b'{"error": {"message": "Wrong key."}}', ChatError, r"--api-key.*Wrong key"),
        (400, b'{"error": {"message": "top_k is off", "param": "top_k"}}', RequestError, "^top_k is off$"),
        (404, b'{"error": {"message": "no model m1"}}', RequestError, "no model m1"),
        (404, b"<html>nothing here</html>", ChatError, "OpenAI-compatible"),
        (422, b'{"detail": [{"loc": ["body"]}]}', RequestError, "loc"),
        (500, b'{"error": "boom"}', ChatError, r"status 500\): boom"),
        (503, b"", ChatError, "status 503"),
        (200, b'data: {"error": {"message": "out of memory"}}\n\n', ChatError, "out of memory"),
        (200, b"data: {nonsense\n\n", ChatError, "no chat completion"),
        (200, b"data: [1]\n\n", ChatError, "no chat completion"),
        (200, b"<html>welcome</html>", ChatError, "ended the answer"),
        (200, event("par"), ChatError, "ended the answer"),
    ],
)
def test_http_errors(server: FakeServer, status: int, body: bytes, kind: type[MinispecError], text: str) -> None:
    server.script = (status, [body])
    with pytest.raises(kind, match=text):
        list(HttpBackend(server.url, model="m1").stream([user("hi")], {}))


@pytest.mark.parametrize(
    "error",
    [
        {"message": "too long", "code": "context_length_exceeded"},
        {"message": "This model's maximum context length is 10 tokens.", "code": 400},
    ],
)
def test_http_context_error_has_its_code(server: FakeServer, error: dict[str, Any]) -> None:
    server.script = (400, [json.dumps({"error": error}).encode()])
    with pytest.raises(RequestError) as info:
        list(HttpBackend(server.url, model="m1").stream([user("hi")], {}))
    assert info.value.code == "context_length_exceeded" and info.value.status == 400


def test_closing_the_stream_disconnects(server: FakeServer) -> None:
    server.script = (200, (event(f"n{i} ") for i in range(100_000)))
    stream = HttpBackend(server.url).stream([user("hi")], {})
    assert next(stream).text == "n0 "
    assert not server.disconnected.is_set()
    stream.close()
    assert server.disconnected.wait(10)


def test_interrupting_a_blocked_read_disconnects(server: FakeServer) -> None:
    def slow() -> Iterator[bytes]:
        yield event("one")
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        while True:
            yield event("never")

    server.script = (200, slow())
    chat, _ = make_chat(HttpBackend(server.url))
    chat.handle("hi")
    assert chat.history == [user("hi"), assistant("one")]
    assert server.disconnected.wait(10)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://[::1"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        HttpBackend(url)


def test_sse_joins_data_lines_and_skips_the_rest() -> None:
    assert list(sse_data([b"event: x\nid: 1\nda", b"ta: a\ndata:b\n\n\n", b": c\n\ndata: cut off"])) == ["a\nb"]

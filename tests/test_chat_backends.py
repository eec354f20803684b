"""What `minispec chat` talks to: the local backend and the HTTP one."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from chat_helpers import USAGE, assistant, make_chat, user
from minispec.chat_backends import ChatError, HttpBackend, LocalBackend, Usage, sse_data
from minispec.errors import ConfigError, MinispecError, RequestError
from minispec.request import FinishReason, Request, SamplingParams, TokenEvent

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

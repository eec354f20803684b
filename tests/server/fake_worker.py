"""A server without weights: the real engine, worker and tokenizer around a scripted target that speaks by script.

`Script` says what is answered and when it hangs, sleeps or breaks; `live_server` puts it behind a real socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from torch import Tensor

from minispec.batch import Span
from minispec.drafters.base import NoDrafter
from minispec.engine import Engine
from minispec.kv_cache import PagePool
from minispec.request import Request
from minispec.sampling import Noise
from minispec.server.app import Api, ServerOptions
from minispec.server.bind import bind, url_of
from minispec.server.run import make_uvicorn
from minispec.tokenizer import Tokenizer
from minispec.worker import EngineWorker, WorkerState
from scripted import Prefix, ScriptedDrafter, ScriptedRunner, chain
from tokenizers_fixture import BYTE_VOCAB_SIZE, EOS, byte_tokenizer_folder

MODEL = "scripted"


@dataclass
class Script:
    """What the scripted target does.

    Attributes:
        reply: the answer to a prompt, given as text; without an end it goes on for ever with dots.
        drafts: tokens of the true answer that the drafter proposes per step.
        delay: seconds per step.
        gate: steps wait for it.
        fail_at: the forward (from 1) that raises, once.
        fail_from: the forward from which on all raise.
    """

    reply: Callable[[str], str | None] = lambda prompt: "Hello, world!"
    drafts: int = 0
    delay: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)
    fail_at: int | None = None
    fail_from: float = float("inf")
    steps: int = 0
    answers: dict[Prefix, list[int] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()

    def next_tokens(self, prefix: Prefix, count: int) -> list[int]:
        """The tokens that follow ``prefix``, which begins with a known prompt."""
        prompt = max((p for p in self.answers if prefix[: len(p)] == p), key=len, default=prefix)
        if prompt not in self.answers:  # no request: the engine asks whether anything can be computed
            return [EOS] * count
        answer, done = self.answers[prompt], len(prefix) - len(prompt)
        if answer is None:
            return [ord(".")] * count
        return [answer[i] if i < len(answer) else EOS for i in range(done, done + count)]

    def before_step(self) -> None:
        assert self.gate.wait(20), "nobody opened the gate"
        self.steps += 1
        time.sleep(self.delay)
        if self.steps == self.fail_at or self.steps >= self.fail_from:
            raise RuntimeError("scripted failure")


class _Runner(ScriptedRunner):
    def __init__(self, script: Script, pages: int) -> None:
        def logits(prefix: Prefix) -> list[float]:
            row = [0.0] * BYTE_VOCAB_SIZE
            row[script.next_tokens(prefix, 1)[0]] = 1000.0  # certain at any temperature
            return row

        super().__init__(logits, BYTE_VOCAB_SIZE, pages=pages)
        self._script = script

    def forward(self, spans: Sequence[Span], *, taps: object = None) -> Tensor:
        self._script.before_step()
        return super().forward(spans)


class _Engine(Engine):
    script: Script

    def make_request(self, prompt: Sequence[int], *args: Any, **kwargs: Any) -> Request:
        request = super().make_request(prompt, *args, **kwargs)
        text = bytes(token for token in prompt if token < 256).decode("utf-8", "replace")
        reply = self.script.reply(text)
        self.script.answers[request.prompt] = None if reply is None else [*reply.encode(), EOS]
        return request


def scripted_engine(
    script: Script,
    folder: Path,
    *,
    max_slots: int = 4,
    max_context: int = 256,
    pages: int = 400,
    prefix_cache: bool = False,
    default_params: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
) -> Engine:
    tokenizer = Tokenizer.from_folder(byte_tokenizer_folder(folder, **(tokenizer_config or {})))
    drafter = (
        ScriptedDrafter(lambda prefix: chain(script.next_tokens(prefix, script.drafts)))
        if script.drafts
        else NoDrafter()
    )
    runner = _Runner(script, pages)
    engine = _Engine(
        runner,
        PagePool(pages, runner.kv.page_size if prefix_cache else None),
        drafter,
        Noise(BYTE_VOCAB_SIZE),
        tokenizer=tokenizer,
        max_slots=max_slots,
        max_context=max_context,
        eos_ids=tokenizer.eos_ids,
        name=MODEL,
        description={"device": "cpu", "slots": max_slots},
        default_params=dict(default_params or {}),
    )
    engine.script = script
    return engine


@dataclass
class LiveServer:
    """A running server.

    Attributes:
        url: without /v1.
        load: opens when the engine may finish loading.
    """

    url: str
    script: Script
    worker: EngineWorker
    api: Api
    load: threading.Event

    @property
    def engine(self) -> Engine:
        assert self.worker.engine is not None
        return self.worker.engine

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    @cached_property
    def client(self) -> httpx.Client:
        """Kept, as making one takes longer than most requests. Thread-safe."""
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def assert_alive(self) -> None:
        """An ordinary request is answered, and nothing is left of the others."""
        self.wait_idle()
        assert self.engine.pool.owned == 0
        response = self.complete("alive?")
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == self.script.reply("alive?")

    def wait_idle(self, seconds: float = 2.0) -> None:
        deadline = time.monotonic() + seconds
        while self.worker.num_open or self.api.active:
            assert time.monotonic() < deadline, f"{self.worker.num_open} open, {len(self.api.active)} active"
            time.sleep(0.01)


@contextlib.contextmanager
def live_server(
    script: Script,
    folder: Path,
    *,
    loaded: bool = True,
    max_waiting: int = 64,
    send_buffer: int | None = None,
    step_timeout: float = 120.0,
    options: Mapping[str, Any] | None = None,
    make_engine: Callable[[], Engine] | None = None,
    **engine: Any,
) -> Iterator[LiveServer]:
    """A server on a port of its own, in this process; ready unless ``loaded`` is False.

    Args:
        make_engine: another engine than the scripted one.
    """
    may_load = threading.Event()
    if loaded:
        may_load.set()

    def load() -> Engine:
        assert may_load.wait(20)
        return scripted_engine(script, folder, **engine) if make_engine is None else make_engine()

    worker = EngineWorker(load, max_waiting=max_waiting, step_timeout=step_timeout)
    api = Api(worker, ServerOptions(**{"model_name": MODEL, "keep_alive": 0.1, **(options or {})}))
    server = make_uvicorn(api)
    server.config.timeout_graceful_shutdown = 1
    sock = bind("127.0.0.1", 0)
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
    url = url_of(sock)
    worker.start()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    if loaded:
        wait_for(lambda: worker.state is not WorkerState.LOADING)
        assert worker.state is WorkerState.READY, worker.error
    live = LiveServer(url, script, worker, api, may_load)
    try:
        yield live
    finally:
        live.client.close()
        script.gate.set()
        may_load.set()
        worker.stop()
        server.should_exit = True
        thread.join(5)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def events_of(text: str) -> list[Any]:
    """The payloads of an SSE body, with the framing checked: data lines, comments and blank lines, nothing else."""
    assert text.endswith("\n\n")
    payloads: list[Any] = []
    for block in text.split("\n\n"):
        for line in block.split("\n"):
            assert line == "" or line.startswith((":", "data: ")), line
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                payloads.append(data if data == "[DONE]" else json.loads(data))
    return payloads


def raw_request(server: LiveServer, data: bytes) -> socket.socket:
    """A connection on which ``data`` has been sent."""
    connection = socket.create_connection(server.address, timeout=10)
    connection.sendall(data)
    return connection


def http_bytes(path: str, body: Any) -> bytes:
    """A POST request as it goes over the wire."""
    payload = json.dumps(body)
    lines = (f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", f"Content-Length: {len(payload)}")
    return "\r\n".join([*lines, "", payload]).encode()

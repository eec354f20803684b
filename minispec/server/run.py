"""The life of the server process: bind, load, serve, drain, exit.

    bind the port ── preflight ── listen ── load (in the engine's thread) ── ready
                                                                               │ SIGTERM or SIGINT
    exit 0 ── uvicorn closes <── every answer is out <── new requests get 503 <┘
    exit 1 <── running streams end with an error <── a second signal, drain_timeout seconds, or a fatal fault

The port comes first because that check is free and a model takes a minute to load. The server listens while it loads so
that whoever watches /health gets an answer instead of a refused connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from minispec.engine import Engine
from minispec.errors import RequestError
from minispec.server.app import Api, ServerOptions
from minispec.server.bind import url_of
from minispec.server.errors import dump_json, error_body
from minispec.worker import STEP_TIMEOUT, EngineWorker, WorkerState

_POLL = 0.05  # seconds between looks at what has no event to wait for
_CLOSE_TIMEOUT = 1.0  # seconds for connections, and for the engine's thread, once the process is about to exit


class _Protocol(H11Protocol):
    """uvicorn's HTTP/1.1, with two additions: errors in JSON, and a way to cut off a client that does not read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Copied into the scope of every request of this connection.
        self.app_state = {**self.app_state, "abort_connection": self._abort}

    def _abort(self) -> None:
        self.transport.abort()  # close() would wait for the client to read what is buffered

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets no route, but the same shape of error."""
        body = dump_json(error_body(RequestError(msg, code="invalid_http")))
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: here a signal means drain, not stop listening."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_uvicorn(api: Api) -> uvicorn.Server:
    """A uvicorn server for ``api``; tests run it on a socket of their own."""
    config = uvicorn.Config(
        api.app(),
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    return _Uvicorn(config)


class ServerProcess:
    """One run of the server.

    Args:
        worker: not started yet.
        drain_timeout: seconds that running requests get to finish after the first signal.
    """

    def __init__(self, worker: EngineWorker, options: ServerOptions, *, drain_timeout: float) -> None:
        self._worker = worker
        self._api = Api(worker, options)
        self._uvicorn = make_uvicorn(self._api)
        self._model_name = options.model_name
        self._drain_timeout = drain_timeout
        self._status = 0
        self._signals = 0
        self._signal = asyncio.Event()

    async def run(self, sock: socket.socket) -> int:
        """Serve on ``sock`` until a signal, or until loading fails; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        self._worker.start()
        serving = asyncio.create_task(self._uvicorn.serve([sock]))
        while not self._uvicorn.started and not serving.done():
            await asyncio.sleep(0)
        _say(f"minispec is listening on {url_of(sock)} and loading {self._model_name}")
        try:
            if await self._loaded() and await self._told_to_stop():
                await self._drain()
        finally:
            self._uvicorn.should_exit = True
            await serving
        return self._status

    def _on_signal(self) -> None:
        self._signals += 1
        self._signal.set()

    async def _loaded(self) -> bool:
        """Wait for the engine; False if the process has to end instead."""
        while self._worker.state is WorkerState.LOADING:
            if self._signals:
                return False
            await asyncio.sleep(_POLL)
        if self._worker.state is WorkerState.FAILED:
            print(f"error: {self._worker.error}", file=sys.stderr, flush=True)
            self._status = 1
            return False
        assert self._worker.engine is not None
        _say(ready_line(self._model_name, self._worker.engine))
        return True

    async def _told_to_stop(self) -> bool:
        """Wait for a signal; False if the engine fails first."""
        while not self._signals:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signal.wait(), _POLL)
            if self._worker.state is WorkerState.FAILED:
                print(f"error: {self._worker.error}; the server ends", file=sys.stderr, flush=True)
                self._status = 1
                await self._let_answers_out()
                return False
        return True

    async def _let_answers_out(self) -> None:
        """Everyone has been answered; give the answers time to leave, and health checks time to see a 503."""
        deadline = asyncio.get_running_loop().time() + _CLOSE_TIMEOUT
        while self._api.active and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL)

    async def _drain(self) -> None:
        self._api.draining = True  # first, so that no request slips in between
        self._worker.drain()
        if running := len(self._api.active):
            requests = "request" if running == 1 else "requests"
            _say(f"minispec is finishing {running} running {requests}; press Ctrl-C again to stop at once")
        deadline = asyncio.get_running_loop().time() + self._drain_timeout
        while self._api.active and self._signals < 2 and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL)
        if self._worker.state is WorkerState.FAILED:
            self._status = 1
        if self._api.active:
            self._status = 1
            self._uvicorn.config.timeout_graceful_shutdown = 1
            error = RequestError("The server was stopped before this request was done.", code="aborted", status=503)
            self._api.fail_active(error)


def _say(line: str) -> None:
    print(line, flush=True)  # at once, also into a pipe: scripts wait for these lines


def ready_line(name: str, engine: Engine) -> str:
    """What a user wants to know once the model is there."""
    facts = ", ".join(f"{key} {value}" for key, value in engine.description.items())
    line = f"minispec is ready: {name}" + (f" ({facts})" if facts else "")
    if engine.default_params:
        defaults = ", ".join(f"{key} {value}" for key, value in engine.default_params.items())
        line += f"\nsampling defaults from the model's generation_config.json: {defaults}"
    return line


def serve(
    load: Callable[[], Engine],
    options: ServerOptions,
    sock: socket.socket,
    *,
    drain_timeout: float = 30.0,
    max_waiting: int = 256,
    step_timeout: float = STEP_TIMEOUT,
) -> int:
    """Serve until told to stop; returns the exit status. Call it in the main thread: it handles signals."""

    async def run() -> int:
        return await ServerProcess(worker, options, drain_timeout=drain_timeout).run(sock)

    worker = EngineWorker(load, max_waiting=max_waiting, step_timeout=step_timeout)
    status = asyncio.run(run())
    stopper = threading.Thread(target=worker.stop, daemon=True)
    stopper.start()
    stopper.join(_CLOSE_TIMEOUT)
    if stopper.is_alive():
        # The engine's thread is in the middle of loading or of a step. Python would now take apart the modules that it
        # is using, and may crash; everything is answered and written, so there is nothing to wait for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status

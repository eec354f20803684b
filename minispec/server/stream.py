"""From the engine's thread to the event loop, and from there to the client.

    engine thread ── TokenEvent ──> Generation (one HTTP call: one request, or one per prompt)
                                        │
              EventStream: SSE chunks <─┴─> collect: one JSON answer

A client that goes away is a cancelled request: `Generation.close` aborts whatever has not ended, and every way out of
a handler leads through it. Nothing here can hold up the engine: it only ever appends to a deque that max_tokens bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from minispec.errors import RequestError
from minispec.request import FinishReason, Request, TokenEvent
from minispec.server.errors import dump_json, error_body, internal_error

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the stream back
]

# Line ends for Python's and JavaScript's line splitters, legal inside JSON strings: clients cut events in two at them.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class ClientGone(Exception):
    """The client has closed the connection: nobody is there to answer."""


class Worker(Protocol):
    """The part of EngineWorker that a generation needs."""

    def submit(self, request: Request, on_event: Callable[[TokenEvent], None]) -> None: ...

    def abort(self, request: Request) -> None: ...


class Generation:
    """The requests of one HTTP call, while the engine works on them.

    Args:
        requests: in the order of their choice index.
        on_event: called in the engine's thread with every event, before it is delivered; must be quick.
    """

    def __init__(self, worker: Worker, requests: Sequence[Request], on_event: Callable[[TokenEvent], None]) -> None:
        self.requests = tuple(requests)
        self._worker = worker
        self._index = {request: index for index, request in enumerate(self.requests)}
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._events: deque[TokenEvent] = deque()
        self._wake = asyncio.Event()
        self._failure: Exception | None = None
        self._submitted: list[Request] = []
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        """Submit all requests, or none.

        Raises:
            RequestError: the engine takes no (more) requests.
        """
        try:
            for request in self.requests:
                self._worker.submit(request, self._receive)
                self._submitted.append(request)
        except BaseException:
            self.close()
            raise

    def index(self, request: Request) -> int:
        return self._index[request]

    def watch(self, receive: Receive) -> None:
        """Notice when the client leaves, even while there is nothing to write. Only after the body has been read."""

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.fail(ClientGone())

        self._watcher = asyncio.create_task(wait())

    def fail(self, failure: Exception) -> None:
        """End the generation from the event loop: its reader gets ``failure`` next, the engine stops working on it."""
        if self._failure is None:
            self._failure = failure
            self._wake.set()
            self._abort()

    def close(self) -> None:
        """Abort what has not ended. Idempotent; harmless when everything has."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        self._abort()

    async def batches(self, idle: float | None = None) -> AsyncIterator[list[TokenEvent]]:
        """The events, those that are there together in one list; ends after the last event of every request.

        Args:
            idle: seconds after which an empty list is yielded if nothing came; None waits for ever.

        Raises:
            ClientGone: the client has left.
            RequestError: a request failed, or ``fail`` was called.
        """
        unfinished = len(self.requests)
        while unfinished:
            try:
                async with asyncio.timeout(idle):
                    await self._wake.wait()
            except TimeoutError:
                yield []
                continue
            self._wake.clear()
            if self._failure is not None:
                raise self._failure
            batch: list[TokenEvent] = []
            while self._events:
                event = self._events.popleft()
                batch.append(event)
                unfinished -= event.finish_reason is not None
                if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    if batch[:-1]:  # what came before is still good
                        yield batch[:-1]
                    raise _failure_of(event)
            if batch:
                yield batch

    def _receive(self, event: TokenEvent) -> None:
        """Runs in the engine's thread."""
        self._on_event(event)
        if self._closed:
            return
        self._events.append(event)
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and with it everybody who would read this
            self._loop.call_soon_threadsafe(self._wake.set)

    def _abort(self) -> None:
        for request in self._submitted:
            if not request.finished:
                self._worker.abort(request)


def _failure_of(event: TokenEvent) -> RequestError:
    if event.finish_reason is FinishReason.ABORT:  # and not by the client, who would not be reading
        return RequestError("The server stopped before this request was done.", code="aborted", status=503)
    message = event.request.error or "The engine failed on this request."
    if event.request.constraint is not None and event.request.constraint.error is not None:
        return RequestError(message, code="form_failed")  # what the client asked for leads nowhere: no fault of ours
    return RequestError(message, code="engine_error", status=500)


def usage(requests: Sequence[Request], choices: int = 1) -> dict[str, Any]:
    """The ``usage`` object: sums over the requests. An acceptance length is null before the first verification.

    Args:
        requests: ``choices`` for each prompt, which counts once.
    """
    prompts = requests[::choices]
    prompt = sum(len(request.prompt) for request in prompts)
    completion = sum(request.num_output for request in requests)
    counts = [request.speculation for request in requests]
    steps = sum(count.steps for count in counts)
    emitted = sum(count.emitted for count in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in prompts)},
        "speculation": {
            "steps": steps,
            "drafted": sum(count.drafted for count in counts),
            "accepted": sum(count.accepted for count in counts),
            "acceptance_length": round(emitted / steps, 4) if steps else None,
        },
    }


class Chunks(Protocol):
    """How an endpoint words the chunks of a stream."""

    def of(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """The ``choices`` entries for one event, possibly none."""

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The whole chunk around ``choices``."""

    def usage(self, requests: Sequence[Request]) -> dict[str, Any]:
        """The ``usage`` object, once they have ended."""


def sse(content: Any) -> bytes:
    """One server-sent event: one ``data:`` line."""
    text = dump_json(content).decode()
    for raw, escaped in _LINE_ENDS.items():
        if raw in text:
            text = text.replace(raw, escaped)
    return f"data: {text}\n\n".encode()


class EventStream:
    """ASGI response that streams a started generation as server-sent events.

    Args:
        include_usage: add a last chunk with the usage.
        keep_alive: seconds without a token after which a comment is sent, so that proxies keep the connection.
        write_timeout: seconds a client may leave a full socket unread before it counts as gone.
        on_close: called once the stream has ended in whatever way.
    """

    def __init__(
        self,
        generation: Generation,
        chunks: Chunks,
        *,
        include_usage: bool,
        keep_alive: float,
        write_timeout: float,
        on_close: Callable[[], None],
    ) -> None:
        self._generation = generation
        self._chunks = chunks
        self._include_usage = include_usage
        self._keep_alive = keep_alive
        self._write_timeout = write_timeout
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            async with asyncio.timeout(self._write_timeout):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        generation = self._generation
        try:
            generation.watch(receive)
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            last = DONE
            try:
                async for batch in generation.batches(self._keep_alive):
                    data = b"".join(self._encode(batch)) if batch else KEEP_ALIVE
                    if data:
                        await write(data)
                if self._include_usage:
                    last = sse(self._chunks.chunk([], self._chunks.usage(generation.requests))) + DONE
            except RequestError as error:
                last = sse(error_body(error))
            except (ClientGone, TimeoutError):
                raise
            except Exception:
                logger.exception("a stream failed")
                last = sse(error_body(internal_error()))
            await write(last, more=False)
        except ClientGone:
            pass
        except TimeoutError:
            logger.warning("closed a stream that its client has not read for %g s", self._write_timeout)
            if abort := scope.get("state", {}).get("abort_connection"):
                abort()
        finally:
            generation.close()
            self._on_close()

    def _encode(self, batch: Iterable[TokenEvent]) -> Iterable[bytes]:
        for event in batch:
            for choice in self._chunks.of(self._generation.index(event.request), event):
                yield sse(self._chunks.chunk([choice]))


async def collect(generation: Generation, receive: Receive) -> tuple[Request, ...]:
    """Wait for a started generation to end; returns its requests.

    Raises:
        ClientGone: the client left first.
        RequestError: a request failed.
    """
    try:
        generation.watch(receive)
        async for _ in generation.batches():
            pass
        return generation.requests
    finally:
        generation.close()

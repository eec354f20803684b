"""EngineWorker: an engine in a thread of its own, and the only door through which other threads reach it."""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from minispec.engine import Engine
from minispec.errors import MinispecError, RequestError
from minispec.histogram import Histogram
from minispec.logs import http_request_id
from minispec.request import FinishReason, Request, TokenEvent
from minispec.watchdog import Watchdog

logger = logging.getLogger(__name__)

OnEvent = Callable[[TokenEvent], None]

STEP_TIMEOUT = 120.0
"""Seconds after which a step counts as stuck. A step is bounded (``--max-step-tokens`` rows), so that only a first
compilation, or a machine without memory, comes near it."""

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 120)


class WorkerState(StrEnum):
    """LOADING → READY → DRAINING → STOPPED; FAILED from any of them but STOPPED."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class _Open:
    """Who listens to a request, and the HTTP call it came with."""

    on_event: OnEvent
    http_request_id: str | None


class EngineWorker:
    """Loads an engine and steps it in one thread.

    Args:
        load: makes the engine; runs in the worker's thread.
        max_waiting: requests that may wait for a slot before ``submit`` refuses more.
        on_state: called on every change of state, from the thread that causes it.
        step_timeout: seconds after which a step counts as stuck; 0 watches nothing.

    Attributes:
        refused: requests that ``submit`` refused because the queue was full.
        step_seconds: how long steps took.
        watchdog: whether a step is stuck.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        max_waiting: int = 256,
        on_state: Callable[[WorkerState], None] | None = None,
        step_timeout: float = STEP_TIMEOUT,
    ) -> None:
        self.engine: Engine | None = None
        self.error: str | None = None
        self.refused = 0
        self.step_seconds = Histogram(_STEP_SECONDS)
        self.watchdog = Watchdog(step_timeout, lambda: self.engine.stage if self.engine is not None else "loading")
        self._load = load
        self._max_waiting = max_waiting
        self._on_state = on_state
        self._state = WorkerState.LOADING
        self._lock = threading.Lock()  # guards _state and _open against submit from other threads
        self._open: dict[Request, _Open] = {}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="minispec-engine", daemon=True)

    @property
    def state(self) -> WorkerState:
        return self._state

    @property
    def num_open(self) -> int:
        """Requests submitted and not ended."""
        return len(self._open)

    @property
    def capacity(self) -> int:
        """Most requests that may be open at once, once the engine is loaded."""
        assert self.engine is not None
        return self._max_waiting + self.engine.scheduler.max_slots

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._thread.start()

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request. ``on_event`` is called in the worker's thread, last with the event that ends the request.

        Raises:
            RequestError: the worker is not ready (503) or the queue is full (429).
        """
        with self._lock:
            if self._state is not WorkerState.READY or self.engine is None:
                raise RequestError(f"the engine is {self._state.value}", code="not_ready", status=503)
            limit = self.capacity
            if len(self._open) >= limit:
                self.refused += 1
                raise RequestError(
                    f"{len(self._open)} requests are running or waiting, the limit is {limit}; try again later",
                    code="queue_full",
                    status=429,
                )
            self._open[request] = opened = _Open(on_event, http_request_id.get())
            self._idle.clear()
        engine = self.engine
        logger.info(
            "request started",
            extra={**_ids(request, opened), "prompt_tokens": len(request.prompt), "max_tokens": request.limit},
        )
        self._commands.put(lambda: engine.add(request))

    def abort(self, request: Request) -> None:
        """End a request, in whatever state; nothing happens if it has ended. Returns at once."""
        self._commands.put(lambda: self._abort(request))

    def drain(self) -> None:
        """Take no more requests; those submitted run on."""
        self._change(WorkerState.DRAINING, {WorkerState.READY})

    def wait_idle(self, timeout: float) -> bool:
        """Block until every submitted request has ended and its listener has heard; False after ``timeout`` seconds."""
        return self._idle.wait(timeout)

    def stop(self, timeout: float = 10.0) -> None:
        """End all requests as aborted and stop the thread."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self.engine = self._load()
        except MinispecError as error:
            self._fail(str(error))
            return
        except Exception as error:
            logger.exception("loading failed")
            self._fail(f"loading failed: {type(error).__name__}: {error}")
            return
        # What is loaded stays: the garbage collector need not walk over it in the middle of a stream.
        gc.collect()
        gc.freeze()
        self._change(WorkerState.READY, {WorkerState.LOADING})
        self.watchdog.start()
        try:
            self._loop(self.engine)
        except Exception as error:
            # What one request did has been contained; state may be inconsistent now: answer everyone and stop, rather
            # than serve wrong text.
            logger.exception("the engine failed")
            self._fail(f"the engine failed: {type(error).__name__}: {error}")
        else:
            self._change(WorkerState.STOPPED)
        finally:
            self.watchdog.stop()

    def _loop(self, engine: Engine) -> None:
        while True:
            # with nothing to do, sleep until a command comes
            block = not engine.has_work
            while True:
                try:
                    command = self._commands.get(block=block)
                except queue.Empty:
                    break
                if command is None:
                    self.drain()  # first, so that no request slips in behind those that are ended
                    for request in list(self._open):
                        self._abort(request)
                    return
                command()
                block = False
            if engine.has_work:
                begin = time.perf_counter()
                with self.watchdog.step():
                    events = engine.step()
                self.step_seconds.observe(time.perf_counter() - begin)
                for event in events:
                    self._deliver(event)
                # Let the HTTP thread have the interpreter between steps.
                time.sleep(0)

    def _abort(self, request: Request, reason: FinishReason = FinishReason.ABORT, error: str | None = None) -> None:
        assert self.engine is not None
        event = self.engine.abort(request, reason, error)
        if event is not None:
            self._deliver(event)

    def _deliver(self, event: TokenEvent) -> None:
        request = event.request
        opened = self._open.get(request)
        last = event.finish_reason is not None
        if last:
            with self._lock:  # before the listener hears of it: its next request finds the place free
                self._open.pop(request, None)
        if opened is not None:
            try:
                opened.on_event(event)
            except Exception:  # nobody would get what is still to come: the request ends, and nobody else's does
                assert self.engine is not None
                logger.exception("the listener of a request failed", extra=_ids(request, opened))
                self.engine.stats.errors["listener"] += 1
                if not last:
                    self._abort(request, FinishReason.ERROR, "What listened to this request failed.")
            if last:
                _log_end(event, opened)
        if last:
            with self._lock:
                if not self._open:
                    self._idle.set()

    def _fail(self, message: str) -> None:
        self.error = message
        self._change(WorkerState.FAILED)
        for request in list(self._open):
            assert self.engine is not None
            event = None
            with contextlib.suppress(Exception):  # whatever state the engine is in, everyone is answered
                event = self.engine.abort(request, FinishReason.ERROR, message)
            if not request.finished:
                self.engine.stats.finished[FinishReason.ERROR] += 1
                with contextlib.suppress(Exception):
                    request.end(FinishReason.ERROR, message)
            self._deliver(event or TokenEvent(request, (), "", FinishReason.ERROR))

    def _change(self, state: WorkerState, allowed: set[WorkerState] | None = None) -> None:
        with self._lock:
            if allowed is not None and self._state not in allowed:
                return
            self._state = state
        if self._on_state is not None:
            self._on_state(state)


def _ids(request: Request, opened: _Open) -> dict[str, str | None]:
    return {"request_id": request.id, "http_request_id": opened.http_request_id}


def _log_end(event: TokenEvent, opened: _Open) -> None:
    request, now = event.request, time.monotonic()
    first = None if request.first_token is None else round(request.first_token - request.created, 4)
    logger.info(
        "request ended",
        extra={
            **_ids(request, opened),
            "reason": event.finish_reason,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": request.num_output,
            "preemptions": request.preemptions,
            "drafted": request.speculation.drafted,
            "accepted": request.speculation.accepted,
            "first_token_seconds": first,
            "seconds": round(now - request.created, 4),
            "error": request.error,
        },
    )

"""EngineWorker: an engine in a thread of its own, and the only door through which other threads reach it."""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable
from enum import StrEnum

from minispec.engine import Engine
from minispec.errors import MinispecError, RequestError
from minispec.request import FinishReason, Request, TokenEvent

logger = logging.getLogger(__name__)

OnEvent = Callable[[TokenEvent], None]


class WorkerState(StrEnum):
    """LOADING → READY → DRAINING → STOPPED; FAILED from any of them but STOPPED."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class EngineWorker:
    """Loads an engine and steps it in one thread.

    Args:
        load: makes the engine; runs in the worker's thread.
        max_waiting: requests that may wait for a slot before ``submit`` refuses more.
        on_state: called on every change of state, from the thread that causes it.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        max_waiting: int = 256,
        on_state: Callable[[WorkerState], None] | None = None,
    ) -> None:
        self.engine: Engine | None = None
        self.error: str | None = None
        self._load = load
        self._max_waiting = max_waiting
        self._on_state = on_state
        self._state = WorkerState.LOADING
        self._lock = threading.Lock()  # guards _state and _open against submit from other threads
        self._open: dict[Request, OnEvent] = {}
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
            limit = self._max_waiting + self.engine.scheduler.max_slots
            if len(self._open) >= limit:
                raise RequestError(
                    f"{len(self._open)} requests are running or waiting, the limit is {limit}; try again later",
                    code="queue_full",
                    status=429,
                )
            self._open[request] = on_event
            self._idle.clear()
        engine = self.engine
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
        try:
            self._loop(self.engine)
        except Exception as error:
            # State may be inconsistent now: answer everyone and stop, rather than serve wrong text.
            logger.exception("the engine failed")
            self._fail(f"the engine failed: {type(error).__name__}: {error}")
        else:
            self._change(WorkerState.STOPPED)

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
                for event in engine.step():
                    self._deliver(event)
                # Let the HTTP thread have the interpreter between steps.
                time.sleep(0)

    def _abort(self, request: Request) -> None:
        assert self.engine is not None
        event = self.engine.abort(request)
        if event is not None:
            self._deliver(event)

    def _deliver(self, event: TokenEvent) -> None:
        on_event = self._open.get(event.request)
        last = event.finish_reason is not None
        if last:
            with self._lock:  # before the listener hears of it: its next request finds the place free
                self._open.pop(event.request, None)
        if on_event is not None:
            try:
                on_event(event)
            except Exception:  # a listener's fault must not end everybody's engine
                logger.exception("the listener of request %s failed", event.request.id)
        if last:
            with self._lock:
                if not self._open:
                    self._idle.set()

    def _fail(self, message: str) -> None:
        self.error = message
        self._change(WorkerState.FAILED)
        for request in list(self._open):
            tail = request.end(FinishReason.ERROR, message)
            self._deliver(TokenEvent(request, (), tail, FinishReason.ERROR))

    def _change(self, state: WorkerState, allowed: set[WorkerState] | None = None) -> None:
        with self._lock:
            if allowed is not None and self._state not in allowed:
                return
            self._state = state
        if self._on_state is not None:
            self._on_state(state)

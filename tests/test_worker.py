"""The engine in a thread of its own: states, refusals, aborts, faults."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

import pytest

from minispec.engine import Engine
from minispec.errors import ModelError, RequestError
from minispec.request import FinishReason, Request, SamplingParams, TokenEvent
from minispec.worker import EngineWorker, WorkerState
from scripted import scripted_engine, table

VOCAB = 32
TIMEOUT = 20.0  # only ever waited for when something is broken


def counting(prefix):
    return (prefix[-1] + 1) % 29


class Gate:
    """Stops the scripted target before a step until it is let through."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()

    def close(self) -> None:
        self.reached.clear()
        self.open.clear()

    def __call__(self, prefix):
        self.reached.set()
        assert self.open.wait(TIMEOUT)
        return counting(prefix)


class Listener:
    """Collects a request's events."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.done = threading.Event()
        self.threads: set[str] = set()

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        self.threads.add(threading.current_thread().name)
        if event.finish_reason is not None:
            self.done.set()

    @property
    def tokens(self) -> list[int]:
        assert self.done.wait(TIMEOUT), "no last event"
        return [token for event in self.events for token in event.tokens]

    @property
    def reason(self) -> FinishReason | None:
        assert self.done.wait(TIMEOUT), "no last event"
        assert [event.finish_reason for event in self.events[:-1]] == [None] * (len(self.events) - 1)
        return self.events[-1].finish_reason


class CountingQueue(queue.SimpleQueue):
    """Counts how often the thread looks for a command."""

    looks = 0

    def get(self, block: bool = True, timeout: float | None = None):
        self.looks += 1
        return super().get(block, timeout)


class Ready:
    """A worker over a scripted engine, started and loaded."""

    def __init__(
        self, target: Callable = counting, *, max_waiting: int = 256, drafter=None, step_timeout=120.0, **settings
    ) -> None:
        self.engine: Engine = scripted_engine(table(target, VOCAB), VOCAB, drafter, **settings)
        self.states: list[WorkerState] = []
        self.changed = threading.Condition()
        self.worker = EngineWorker(
            lambda: self.engine, max_waiting=max_waiting, on_state=self.on_state, step_timeout=step_timeout
        )
        self.commands = self.worker._commands = CountingQueue()
        self.worker.start()
        self.wait_for(WorkerState.READY)

    def on_state(self, state: WorkerState) -> None:
        with self.changed:
            self.states.append(state)
            self.changed.notify_all()

    def wait_for(self, state: WorkerState) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: state in self.states, TIMEOUT), f"never {state}: {self.states}"

    def request(self, first: int = 3, max_tokens: int = 5) -> Request:
        return self.engine.make_request([first], SamplingParams(max_tokens=max_tokens, temperature=0))

    def submit(self, first: int = 3, max_tokens: int = 5) -> tuple[Request, Listener]:
        request, listener = self.request(first, max_tokens), Listener()
        self.worker.submit(request, listener)
        return request, listener

    def settle(self) -> None:
        """Wait until the thread has handled every command put so far."""
        handled = threading.Event()
        self.worker._commands.put(handled.set)
        assert handled.wait(TIMEOUT)


@contextlib.contextmanager
def ready(*args, **settings):
    it = Ready(*args, **settings)
    try:
        yield it
    finally:
        it.worker.stop(TIMEOUT)
        assert not it.worker._thread.is_alive()


def after(first: int, count: int) -> list[int]:
    return [(first + 1 + i) % 29 for i in range(count)]


def test_events_come_in_order_from_the_workers_thread():
    with ready() as it:
        request, listener = it.submit(3, 6)
        assert listener.tokens == request.output == after(3, 6)
        assert listener.reason is FinishReason.LENGTH
        assert len(listener.events) == 6 and listener.threads == {"minispec-engine"}
        assert it.worker.wait_idle(TIMEOUT) and it.worker.num_open == 0
    assert it.states == [WorkerState.READY, WorkerState.DRAINING, WorkerState.STOPPED]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModelError("no such model; pull it"), "no such model; pull it"),
        (MemoryError("too large"), "loading failed: MemoryError: too large"),
    ],
)
def test_a_load_that_fails(error, message):
    def load() -> Engine:
        raise error

    states: list[WorkerState] = []
    worker = EngineWorker(load, on_state=states.append)
    assert worker.state is WorkerState.LOADING
    worker.start()
    worker._thread.join(TIMEOUT)
    assert worker.state is WorkerState.FAILED and worker.error == message and states == [WorkerState.FAILED]
    refused(worker, "failed")
    worker.stop()
    assert worker.state is WorkerState.FAILED


def refused(worker: EngineWorker, state: str, engine: Engine | None = None) -> None:
    engine = engine or scripted_engine(table(counting, VOCAB), VOCAB)
    with pytest.raises(RequestError, match=f"the engine is {state}") as caught:
        worker.submit(engine.make_request([1], SamplingParams()), lambda event: None)
    assert (caught.value.status, caught.value.code) == (503, "not_ready")


def test_no_requests_before_it_is_loaded_and_none_after_it_has_stopped():
    loading, loaded = threading.Event(), threading.Event()

    def load() -> Engine:
        loading.set()
        assert loaded.wait(TIMEOUT)
        return scripted_engine(table(counting, VOCAB), VOCAB)

    worker = EngineWorker(load)
    refused(worker, "loading")
    worker.start()
    assert loading.wait(TIMEOUT)
    refused(worker, "loading")
    worker.stop(0)  # before the load is over: it ends when that is
    loaded.set()
    worker._thread.join(TIMEOUT)
    assert worker.state is WorkerState.STOPPED
    refused(worker, "stopped")
    worker.stop()


def test_a_full_queue_refuses_and_frees_up():
    gate = Gate()
    with ready(gate, max_waiting=4, max_slots=1) as it:
        gate.close()
        open_ = [it.submit(i, 2) for i in range(5)]
        with pytest.raises(RequestError, match="5 requests are running or waiting, the limit is 5") as caught:
            it.submit()
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert it.worker.num_open == 5 and not it.worker.wait_idle(0)
        gate.open.set()
        for i, (_, listener) in enumerate(open_):
            assert listener.tokens == after(i, 2)
        assert it.submit(7, 2)[1].tokens == after(7, 2)


def test_the_place_is_free_once_the_listener_has_heard():
    """A client that asks again on its last event is never refused."""
    with ready(max_waiting=0, max_slots=1) as it:
        listeners = [Listener() for _ in range(20)]
        requests = [it.request(i, 2) for i in range(20)]

        def chained(i: int) -> Callable[[TokenEvent], None]:
            def on_event(event: TokenEvent) -> None:
                if event.finish_reason is not None and i + 1 < len(requests):
                    it.worker.submit(requests[i + 1], chained(i + 1))
                listeners[i](event)

            return on_event

        it.worker.submit(requests[0], chained(0))
        assert it.worker.wait_idle(TIMEOUT)
        # nothing to wait for: idle means that the last listener was called
        assert all(listener.done.is_set() for listener in listeners)


def test_abort_in_every_state():
    gate = Gate()
    with ready(gate, max_slots=2, max_step_tokens=16) as it:
        gate.close()
        running, running_events = it.submit(3, 50)
        assert gate.reached.wait(TIMEOUT)  # in the middle of a step
        prefilling = it.engine.make_request([4] * 60, SamplingParams(max_tokens=5, temperature=0))
        prefilling_events = Listener()
        it.worker.submit(prefilling, prefilling_events)
        waiting, waiting_events = it.submit(5, 50)
        unprocessed, unprocessed_events = it.submit(6, 50)
        other, other_events = it.submit(7, 4)
        for request in (running, waiting, unprocessed, prefilling, running):  # twice does no harm
            it.worker.abort(request)
        gate.open.set()
        for listener in (running_events, prefilling_events, waiting_events, unprocessed_events):
            assert listener.reason is FinishReason.ABORT
            assert listener.events[-1].tokens == ()
        assert running.output == running_events.tokens == [4]  # the step that was under way is not lost
        assert other_events.tokens == after(7, 4)
        it.worker.abort(other)  # it has ended
        it.worker.abort(it.request())  # never submitted
        assert it.worker.wait_idle(TIMEOUT)
        it.settle()
        it.engine.check()
        assert it.engine.pool.owned == 0
        assert len(other_events.events) == 4 and other_events.reason is FinishReason.LENGTH
        assert it.submit(8, 3)[1].tokens == after(8, 3)


def test_draining_finishes_what_was_taken_and_takes_no_more():
    gate = Gate()
    with ready(gate) as it:
        gate.close()
        listeners = [it.submit(i, 4)[1] for i in range(3)]
        it.worker.drain()
        assert it.worker.state is WorkerState.DRAINING
        refused(it.worker, "draining", it.engine)
        assert not it.worker.wait_idle(0)
        gate.open.set()
        assert it.worker.wait_idle(TIMEOUT)
        for i, listener in enumerate(listeners):
            assert listener.done.is_set() and listener.tokens == after(i, 4)


def test_stop_answers_everyone():
    gate = Gate()
    it = Ready(gate, max_slots=1)
    gate.close()
    listeners = [it.submit(i, 50)[1] for i in range(3)]
    assert gate.reached.wait(TIMEOUT)
    it.worker.stop(0)
    gate.open.set()
    it.worker._thread.join(TIMEOUT)
    assert [listener.reason for listener in listeners] == [FinishReason.ABORT] * 3
    assert it.worker.state is WorkerState.STOPPED and it.worker.num_open == 0 and it.worker.wait_idle(0)
    assert it.engine.pool.owned == 0
    refused(it.worker, "stopped", it.engine)


def test_nobody_is_left_behind_by_a_stop():
    """Requests submitted while the worker stops are refused or answered."""
    for _ in range(20):
        it = Ready()
        answers: list[Listener] = []
        refusals: list[int] = []
        begun = threading.Event()

        def submit_many(it=it, answers=answers, refusals=refusals, begun=begun) -> None:
            for i in range(200):
                try:
                    answers.append(it.submit(3, 2)[1])
                except RequestError as error:
                    refusals.append(error.status)
                    if error.status == 503:
                        break
                if i == 3:
                    begun.set()
            begun.set()

        thread = threading.Thread(target=submit_many)
        thread.start()
        assert begun.wait(TIMEOUT)
        it.worker.stop(TIMEOUT)
        thread.join(TIMEOUT)
        assert all(listener.done.is_set() for listener in answers)
        assert it.worker.num_open == 0


def test_a_fatal_fault_is_everybodys_answer(caplog):
    gate = Gate()
    broken = threading.Event()

    def target(prefix):
        if broken.is_set():
            raise ValueError("boom")
        return gate(prefix)

    it = Ready(target, max_slots=2)
    gate.close()
    submitted = [it.submit(i, 50) for i in range(4)]
    assert gate.reached.wait(TIMEOUT)
    broken.set()
    gate.open.set()
    for request, listener in submitted:
        assert listener.reason is FinishReason.ERROR is request.finish_reason
        assert request.error
    it.wait_for(WorkerState.FAILED)
    assert it.worker.state is WorkerState.FAILED and it.worker.wait_idle(TIMEOUT) and it.worker.num_open == 0
    assert it.worker.error.startswith("the engine failed: EngineFailed: ") and "boom" in it.worker.error
    assert it.engine.stats.finished["error"] == 4
    assert "boom" in caplog.text
    refused(it.worker, "failed", it.engine)
    it.worker.stop(TIMEOUT)
    assert it.worker.state is WorkerState.FAILED and not it.worker._thread.is_alive()


def test_a_fault_of_the_scheduler_is_fatal():
    it = Ready(max_slots=1)

    all_are_in = threading.Event()

    def broken() -> None:
        all_are_in.wait(TIMEOUT)
        raise AssertionError("pages are lost")

    it.engine.scheduler.plan = broken
    submitted = [it.submit(i, 50) for i in range(3)]
    all_are_in.set()
    for request, listener in submitted:
        assert listener.reason is FinishReason.ERROR is request.finish_reason
        assert request.error == it.worker.error == "the engine failed: AssertionError: pages are lost"
    assert it.engine.stats.finished["error"] == 3 and it.engine.pool.owned == 0 and not it.engine.has_work
    it.worker.stop(TIMEOUT)


def test_a_listener_that_fails_ends_its_request_only(caplog):
    with ready() as it:
        heard = []

        def broken(event: TokenEvent) -> None:
            heard.append(event.finish_reason)
            raise RuntimeError("client went away")

        request = it.request(3, 10)
        it.worker.submit(request, broken)
        assert it.submit(7, 10)[1].tokens == after(7, 10)
        assert it.worker.wait_idle(TIMEOUT)
        assert heard == [None, FinishReason.ERROR] and request.output == after(3, 1)
        assert it.engine.stats.errors["listener"] == 2 and it.engine.pool.owned == 0
        assert it.worker.state is WorkerState.READY
    assert "the listener of a request failed" in caplog.text
    assert any(getattr(record, "request_id", None) == request.id for record in caplog.records)


def test_a_step_that_does_not_return(caplog):
    """Failure case i17: it is noticed, with the stack of the thread, and forgiven when it returns."""
    gate = Gate()
    with ready(gate, step_timeout=0.3) as it:
        gate.close()
        _, listener = it.submit(3, 4)
        watchdog = it.worker.watchdog
        deadline = threading.Event()
        while not (watchdog.stalled and watchdog.stalls):
            assert not deadline.wait(0.01)
        assert it.worker.state is WorkerState.READY
        gate.open.set()
        assert listener.tokens == after(3, 4)
        assert not watchdog.stalled and watchdog.stalls == 1
    stuck = next(record.getMessage() for record in caplog.records if "has not returned" in record.getMessage())
    assert "it is in prefill, at" in stuck and "assert self.open.wait(TIMEOUT)" in stuck
    assert "has returned after" in caplog.text


def test_an_idle_worker_runs_nothing():
    with ready() as it:
        assert it.submit(3, 5)[1].tokens == after(3, 5)
        assert it.worker.wait_idle(TIMEOUT)
        steps = 0
        step = it.engine.step

        def counted() -> list[TokenEvent]:
            nonlocal steps
            steps += 1
            return step()

        it.engine.step = counted
        it.settle()
        looks = it.commands.looks
        for _ in range(10):
            it.settle()
        assert steps == 0 and it.engine.runner.forwards == 5
        # one look finds the command and one that there is no other, then it sleeps; it does not poll
        assert it.commands.looks <= looks + 2 * 10 + 1


def test_many_threads_submit_and_abort_at_once():
    with ready(max_slots=4, pages=40, max_context=60) as it:
        results: list[tuple[Request, Listener, bool]] = []
        lock = threading.Lock()

        def client(number: int) -> None:
            for i in range(10):
                request, listener = it.submit((number + i) % 29, 3 + i)
                aborted = (number + i) % 4 == 0
                if aborted:
                    it.worker.abort(request)
                assert listener.done.wait(TIMEOUT)
                with lock:
                    results.append((request, listener, aborted))

        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert len(results) == 80 and it.worker.wait_idle(TIMEOUT)
        for request, listener, aborted in results:
            assert listener.tokens == request.output == after(request.prompt[0], request.num_output)
            assert aborted or request.num_output == request.params.max_tokens
        it.settle()
        assert it.engine.pool.owned == 0
        assert sum(it.engine.stats.finished.values()) == 80

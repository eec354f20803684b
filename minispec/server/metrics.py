"""Prometheus metrics, read from the engine when they are asked for.

Gauges and totals are the engine's own state and counters at scrape time: they cannot lag behind, and an idle engine
shows idle. Ratios (accepted per drafted, tokens per step) are left to the reader: nothing is divided, least by zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import minispec
from minispec.histogram import Histogram
from minispec.request import Request, TokenEvent
from minispec.worker import EngineWorker, WorkerState

if TYPE_CHECKING:
    from minispec.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_BETWEEN_TOKENS_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_REQUEST_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_QUEUE_SECONDS = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Latencies:
    """When tokens came and how long requests were, over all of them. ``on_event`` is called in the engine's thread."""

    def __init__(self) -> None:
        self.first_token = Histogram(_FIRST_TOKEN_SECONDS)
        self.between_tokens = Histogram(_BETWEEN_TOKENS_SECONDS)
        self.whole = Histogram(_REQUEST_SECONDS)
        self.queue = Histogram(_QUEUE_SECONDS)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self._last: dict[Request, float] = {}  # requests with a token and without an end

    def on_event(self, event: TokenEvent, now: float) -> None:
        """``now`` is a reading of time.monotonic(), the clock of Request.created."""
        request = event.request
        if event.tokens:
            previous = self._last.get(request)
            if previous is None:
                self.first_token.observe(now - request.created)
                self.prompt_tokens.observe(len(request.prompt))
                if request.admitted is not None:
                    self.queue.observe(request.admitted - request.created)
            else:
                # The tokens of one step came together: the gap is shared among them.
                self.between_tokens.observe((now - previous) / len(event.tokens), len(event.tokens))
            self._last[request] = now
        if event.finish_reason is not None:
            self._last.pop(request, None)
            self.whole.observe(now - request.created)
            self.generation_tokens.observe(request.num_output)


class EngineCollector(Collector):
    """Reads the engine's counters. Before it is loaded there is nothing of it."""

    def __init__(self, worker: EngineWorker, latencies: Latencies, statuses: Mapping[int, int]) -> None:
        self._worker = worker
        self._latencies = latencies
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        worker = self._worker
        if worker.engine is not None:
            yield _info(worker.engine)
            yield from _engine_families(worker.engine)
            yield from _drafter_families(worker.engine)
        yield from _worker_families(worker)
        yield _by(
            "minispec_http_responses", "Answers to HTTP calls; 499 is a client that left.", "status", self._statuses
        )
        latencies = self._latencies
        for name, help_text, histogram in (
            (
                "time_to_first_token_seconds",
                "From the moment a request is tokenized to its first token, waiting included.",
                latencies.first_token,
            ),
            (
                "inter_token_latency_seconds",
                "Time per token after the first; tokens of one step share its time.",
                latencies.between_tokens,
            ),
            ("e2e_request_latency_seconds", "From the moment a request is tokenized to its end.", latencies.whole),
            (
                "request_queue_time_seconds",
                "From the moment a request is tokenized to its first slot.",
                latencies.queue,
            ),
            ("request_prompt_tokens", "Prompt tokens of requests that got a first token.", latencies.prompt_tokens),
            ("request_generation_tokens", "Tokens generated for requests that ended.", latencies.generation_tokens),
            ("engine_step_seconds", "Time of a step.", worker.step_seconds),
        ):
            buckets, total = histogram.read()
            yield HistogramMetricFamily(f"minispec_{name}", help_text, buckets=buckets, sum_value=total)


def _info(engine: Engine) -> Metric:
    facts = {key: str(value) for key, value in engine.description.items()}
    return InfoMetricFamily(
        "minispec", "What is served.", {"version": minispec.__version__, "model": engine.name, **facts}
    )


def _engine_families(engine: Engine) -> Iterator[Metric]:
    stats, scheduler, pool = engine.stats, engine.scheduler, engine.pool
    used = pool.owned
    gauges = {
        "requests_running": ("Requests that hold a slot.", len(scheduler.running)),
        "requests_waiting": ("Requests that wait for a slot.", len(scheduler.waiting)),
        "kv_pages_used": ("Pages of the KV cache that requests hold.", used),
        "kv_pages_free": ("Pages that hold nothing.", pool.free),
        "kv_pages_cached": ("Pages that nobody holds and the prefix cache remembers.", pool.cached),
        "kv_pages": ("Pages of the KV cache in all.", pool.total),
        "kv_cache_usage_perc": ("Share of the KV cache that requests hold; 1 is all of it.", used / pool.total),
        "compiled_step": (
            "1 while the target's steps run compiled, 0 while they run eagerly.",
            getattr(engine.runner, "compiled", False),
        ),
        "speculation_off": ("1 once the drafter was switched off, as it did nothing but fail.", engine.drafting_off),
    }
    for name, (help_text, number) in gauges.items():
        yield GaugeMetricFamily(f"minispec_{name}", help_text, value=float(number))
    counters = {
        "prompt_tokens": ("Prompt tokens of requests that got a first token.", stats.prompt_tokens),
        "generation_tokens": ("Tokens generated.", stats.generated_tokens),
        # hits are read before queries, and what is accepted before what is drafted: the engine goes on meanwhile, and
        # a part never exceeds its whole
        "prefix_cache_hits": ("Prompt tokens that the prefix cache had.", stats.prefix_hit_tokens),
        "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_query_tokens),
        "prefix_cache_evictions": ("Pages of the prefix cache given up for other text.", pool.evictions),
        "engine_steps": ("Steps that ran the target.", stats.steps),
        "forward_rows": ("Rows computed by the target: prompt tokens and tree nodes.", stats.forward_rows),
        "preemptions": ("Slots taken back for want of pages.", stats.preemptions),
        "speculation_truncated_tokens": ("Verified tokens that the end of a request cut off.", stats.truncated),
        "speculation_steps": ("Verifications of a tree.", stats.verifications),
        "speculation_accepted_tokens": ("Draft tokens that became text.", stats.accepted),
        "speculation_drafted_tokens": ("Draft tokens verified.", stats.drafted),
    }
    for name, (help_text, number) in counters.items():
        yield CounterMetricFamily(f"minispec_{name}", help_text, value=number)
    yield _by("minispec_requests", "Requests that ended, by reason.", "reason", stats.finished)
    yield _by(
        "minispec_errors",
        "Requests that ended with a fault, and drafters and listeners that failed, by stage.",
        "stage",
        stats.errors,
    )


def _worker_families(worker: EngineWorker) -> Iterator[Metric]:
    ready = worker.state is WorkerState.READY
    yield GaugeMetricFamily("minispec_ready", "1 while requests are taken.", value=float(ready))
    yield GaugeMetricFamily(
        "minispec_engine_stalled", "1 while a step does not return.", value=float(worker.watchdog.stalled)
    )
    yield CounterMetricFamily(
        "minispec_engine_stalls", "Steps that took longer than --step-timeout.", value=worker.watchdog.stalls
    )
    yield CounterMetricFamily(
        "minispec_requests_refused", "Requests refused because the queue was full.", value=worker.refused
    )


def _drafter_families(engine: Engine) -> Iterator[Metric]:
    """By drafter, and by depth in the tree from 1; a token that two drafters proposed counts for both."""
    by_depth = ["drafter", "depth"]
    accepted = CounterMetricFamily(
        "minispec_drafter_accepted_tokens", "Draft tokens that became text, by drafter and depth.", labels=by_depth
    )
    drafted = CounterMetricFamily(
        "minispec_drafter_drafted_tokens", "Draft tokens verified, by drafter and depth.", labels=by_depth
    )
    steps = CounterMetricFamily(
        "minispec_drafter_steps", "Verifications of trees with nodes of the drafter.", labels=["drafter"]
    )
    invalid = CounterMetricFamily(
        "minispec_drafter_invalid_rows", "Rows not drafted from, as their logits were not finite.", labels=["drafter"]
    )
    for name, counts in engine.stats.drafters.copy().items():
        for family, numbers in ((accepted, counts.accepted), (drafted, counts.drafted)):
            for depth, number in sorted(numbers.copy().items()):  # the engine's thread may add a depth
                family.add_metric([name, str(depth)], number)
    for member in engine.drafter.members:
        known = engine.stats.drafters.get(member.name)
        steps.add_metric([member.name], known.steps if known else 0)
        invalid.add_metric([member.name], member.invalid)
    yield from (drafted, accepted, steps, invalid)


def _by(name: str, help_text: str, label: str, numbers: Mapping[str, int] | Mapping[int, int]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for key, number in dict(numbers).items():
        family.add_metric([str(key)], number)
    return family


def render(worker: EngineWorker, latencies: Latencies, statuses: Mapping[int, int]) -> bytes:
    """The metrics in Prometheus' text format, with the process's own (``process_resident_memory_bytes``, …).

    The registry lives for one scrape: no state outside the arguments.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(worker, latencies, statuses))
    ProcessCollector(registry=registry)
    return generate_latest(registry)

"""Prometheus metrics, read from the engine when they are asked for.

Gauges and totals are the engine's own state and counters at scrape time: they cannot lag behind, and an idle engine
shows idle. Ratios (accepted per drafted, tokens per step) are left to the reader: nothing is divided, least by zero.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from minispec.request import Request, TokenEvent

if TYPE_CHECKING:
    from minispec.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_BETWEEN_TOKENS_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)


class LatencyHistogram:
    """Counts of durations per bucket. One thread observes, any thread reads.

    Args:
        bounds: upper bounds of the buckets in seconds, rising; what is above them all counts in a last one.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, seconds: float, times: int = 1) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, seconds)] += times
            self._sum += seconds * times

    def family(self, name: str, help_text: str) -> HistogramMetricFamily:
        with self._lock:
            counts, total = list(self._counts), self._sum
        labels = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(labels, accumulate(counts), strict=True))
        return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=total)


class Latencies:
    """When tokens came, over all requests. ``on_event`` is called in the engine's thread."""

    def __init__(self) -> None:
        self.first_token = LatencyHistogram(_FIRST_TOKEN_SECONDS)
        self.between_tokens = LatencyHistogram(_BETWEEN_TOKENS_SECONDS)
        self._last: dict[Request, float] = {}  # requests with a token and without an end

    def on_event(self, event: TokenEvent, now: float) -> None:
        """``now`` is a reading of time.monotonic(), the clock of Request.created."""
        if event.tokens:
            previous = self._last.get(event.request)
            if previous is None:
                self.first_token.observe(now - event.request.created)
            else:
                # The tokens of one step came together: the gap is shared among them.
                self.between_tokens.observe((now - previous) / len(event.tokens), len(event.tokens))
            self._last[event.request] = now
        if event.finish_reason is not None:
            self._last.pop(event.request, None)


class EngineOwner(Protocol):
    """An EngineWorker, as far as metrics go."""

    @property
    def engine(self) -> Engine | None: ...


class EngineCollector(Collector):
    """Reads the engine's counters. Before it is loaded there is nothing but the latencies, all zero."""

    def __init__(self, worker: EngineOwner, latencies: Latencies) -> None:
        self._worker = worker
        self._latencies = latencies

    def collect(self) -> Iterator[Metric]:
        if self._worker.engine is not None:
            yield from _engine_families(self._worker.engine)
        yield self._latencies.first_token.family(
            "minispec_time_to_first_token_seconds",
            "From the moment a request is tokenized to its first token, waiting included.",
        )
        yield self._latencies.between_tokens.family(
            "minispec_inter_token_latency_seconds", "Time per token after the first; tokens of one step share its time."
        )


def _engine_families(engine: Engine) -> Iterator[Metric]:
    stats, scheduler = engine.stats, engine.scheduler
    gauges = {
        "requests_running": ("Requests that hold a slot.", len(scheduler.running)),
        "requests_waiting": ("Requests that wait for a slot.", len(scheduler.waiting)),
        "kv_pages_used": ("Pages of the KV cache in use.", engine.pool.owned),
        "kv_pages": ("Pages of the KV cache in all.", engine.pool.total),
    }
    for name, (help_text, number) in gauges.items():
        yield GaugeMetricFamily(f"minispec_{name}", help_text, value=number)
    counters = {
        "prompt_tokens": ("Prompt tokens of requests that got a first token.", stats.prompt_tokens),
        "generation_tokens": ("Tokens generated.", stats.generated_tokens),
        "engine_steps": ("Steps that ran the target.", stats.steps),
        "preemptions": ("Slots taken back for want of pages.", stats.preemptions),
        "speculation_steps": ("Verifications of a tree.", stats.verifications),
        # the engine goes on meanwhile: what is accepted is read before what is drafted, so that it never exceeds it
        "speculation_accepted_tokens": ("Draft tokens that became text.", stats.accepted),
        "speculation_drafted_tokens": ("Draft tokens verified.", stats.drafted),
    }
    for name, (help_text, number) in counters.items():
        yield CounterMetricFamily(f"minispec_{name}", help_text, value=number)
    finished = CounterMetricFamily("minispec_requests", "Requests that ended, by reason.", labels=["reason"])
    for reason, number in stats.finished.items():
        finished.add_metric([reason], number)
    yield finished
    yield from _drafter_families(engine)


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


def render(worker: EngineOwner, latencies: Latencies) -> bytes:
    """The metrics in Prometheus' text format. The registry lives for one scrape: no state outside the arguments."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(worker, latencies))
    return generate_latest(registry)

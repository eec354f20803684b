"""Counts of measured values per bucket."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """How often values fell into each bucket. One thread observes, any thread reads.

    Args:
        bounds: upper bounds of the buckets, rising; what is above them all counts in a last one.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, times: int = 1) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += times
            self._sum += value * times

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Bucket bounds with the number of values up to each, ``+Inf`` last, as Prometheus has them; and the sum."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        labels = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return [(label, float(count)) for label, count in zip(labels, accumulate(counts), strict=True)], total

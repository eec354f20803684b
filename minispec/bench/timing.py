"""Timing on a GPU by its own clock, with cold caches; on a CPU by the wall clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_FLUSH_BYTES = 1 << 30
"""Written between repetitions: many times an L2 cache, and long enough that the host has queued what comes next."""


class Stopwatch:
    """Medians of repeated calls.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES if self.cuda else 0, dtype=torch.uint8, device=device)

    def ms(self, fn: Callable[[], object], *, repeat: int = 20, seconds: float = 2.0) -> float:
        """Median milliseconds of ``fn`` on the device: once to warm up, then up to ``repeat`` times in ``seconds``."""
        fn()
        self.synchronize()
        deadline = time.perf_counter() + seconds
        times: list[float] = []
        while len(times) < repeat and (len(times) < 3 or time.perf_counter() < deadline):
            times.append(self._cuda_ms(fn) if self.cuda else self._cpu_ms(fn))
        return statistics.median(times)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def copy_bandwidth(self) -> float:
        """Bytes per second of a copy within the device's memory, read and written bytes both counted."""
        source = torch.ones(_FLUSH_BYTES if self.cuda else 1 << 25, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / (self.ms(lambda: target.copy_(source)) / 1e3)

    def _cuda_ms(self, fn: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        begin.record()
        fn()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def _cpu_ms(self, fn: Callable[[], object]) -> float:
        begin = time.perf_counter()
        fn()
        return (time.perf_counter() - begin) * 1e3

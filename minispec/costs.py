"""What a step costs, in seconds: of the target's forward by its rows, and of drafting by its depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepCost:
    """Seconds of a target forward by its number of rows, as a straight line.

    A line rather than the measured points: what is left of it on a busy machine is noise, and the choice of a tree
    would chase it.
    """

    base: float
    per_row: float

    @staticmethod
    def fit(rows: Sequence[int], seconds: Sequence[float]) -> StepCost:
        """Least squares over measured points, relative to their size; a row never costs less than nothing."""
        weights = [1 / s**2 for s in seconds]
        total = sum(weights)
        mean_r = sum(w * r for w, r in zip(weights, rows, strict=True)) / total
        mean_s = sum(w * s for w, s in zip(weights, seconds, strict=True)) / total
        spread = sum(w * (r - mean_r) ** 2 for w, r in zip(weights, rows, strict=True))
        slope = sum(w * (r - mean_r) * (s - mean_s) for w, r, s in zip(weights, rows, seconds, strict=True)) / spread
        slope = min(max(slope, 0.0), mean_s / mean_r)
        return StepCost(mean_s - slope * mean_r, slope)

    def __call__(self, rows: float) -> float:
        """Estimated seconds of a forward over ``rows`` rows."""
        return self.base + self.per_row * rows


class RunningCost:
    """The line of a StepCost, refined by the steps that are run anyway.

    The slope is a decayed least-squares fit of deviations: how much longer than its neighbours in time a step took that
    had more rows than they. Whatever moves slowly drops out of it: longer contexts, a machine that others use. The
    measurement at start counts as some steps, so that a server whose steps are all alike keeps its slope. The base
    follows the level.

    Attributes:
        line: the current estimate.
    """

    _MEMORY = 0.99  # of the slope, per step
    _LEVEL = 0.1  # how fast the level follows
    _PRIOR = 300.0  # squared rows of deviation that the start counts for: three steps that are ten rows off

    def __init__(self, start: StepCost) -> None:
        self.line = start
        self._start = start
        self._scale = 1.0  # seconds now to seconds at start
        self._slots = 0
        self._rows = 0.0
        self._seconds = 0.0
        self._xx = 0.0
        self._xy = 0.0

    def observe(self, rows: int, slots: int, seconds: float) -> None:
        """A decode step without prefill chunks took ``seconds``, forward and sampling."""
        # One step says at most "twice" or "half": a hiccup is forgotten, a lasting change is followed within a dozen.
        expected = self.line(rows)
        seconds = min(max(seconds, expected / 2), expected * 2)
        if slots == self._slots:
            deviation = rows - self._rows
            # squares weigh outliers; a step that is off by more than a quarter tells nothing of rows
            told = min(max(seconds, expected * 0.75), expected * 1.25) - self._seconds
            self._xx = self._MEMORY * self._xx + deviation**2
            self._xy = self._MEMORY * self._xy + deviation * told
            self._rows += self._LEVEL * deviation
            self._seconds += self._LEVEL * (seconds - self._seconds)
        else:  # every slot brings a context of its own: its rows are not what makes the difference
            self._slots, self._rows, self._seconds = slots, float(rows), seconds
        self._scale += self._LEVEL * (seconds / self._start(rows) - self._scale)
        slope = (self._xy + self._PRIOR * self._start.per_row * self._scale) / (self._xx + self._PRIOR)
        slope = min(max(slope, 0.0), seconds / rows)
        base = self.line.base + self._LEVEL * (seconds - slope * rows - self.line.base)
        self.line = StepCost(max(base, 0.0), slope)


class DraftCost:
    """Seconds that a proposal takes per layer of depth, by the number of slots that share it."""

    _RATE = 0.1

    def __init__(self) -> None:
        self._units: dict[int, tuple[float, int]] = {}  # power of two above the slots → (seconds, observations)

    def observe(self, slots: int, depth: int, seconds: float) -> None:
        """A proposal for ``slots`` slots, whose deepest tree had ``depth`` layers, took ``seconds``."""
        unit, key = seconds / max(depth, 1), (slots - 1).bit_length()
        mean, count = self._units.get(key, (unit, 0))
        if count < 3:
            mean = min(mean, unit)  # the first calls warm something up
        else:
            mean += self._RATE * (min(max(unit, mean / 2), mean * 2) - mean)
        self._units[key] = (mean, count + 1)

    def __call__(self, slots: int) -> float:
        """Estimated seconds per layer; 0 before the first observation, so that there is one."""
        if not self._units:
            return 0.0
        key = (slots - 1).bit_length()
        # an unmeasured number of slots costs what the nearest measured one does
        return self._units[min(self._units, key=lambda known: abs(known - key))][0]

"""What a step costs, in seconds: of the target's forward by its rows, and of drafting by its depth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_NOISE = 0.03  # relative error of what is measured at start


@dataclass(frozen=True)
class StepCost:
    """Seconds of a target forward by its number of rows: a line that may bend upwards.

    The first rows ride along with the read of the weights, later ones cost arithmetic; a straight line makes small
    trees look dearer than they are, and large ones cheaper. It is fitted and not just what was measured: the rest is
    noise on a busy machine, and the choice of a tree would chase it.

    Attributes:
        base, per_row: of the line as it begins.
        bends: (rows, how much more each row behind them costs).
    """

    base: float
    per_row: float
    bends: tuple[tuple[float, float], ...] = ()

    @staticmethod
    def fit(rows: Sequence[int], seconds: Sequence[float]) -> StepCost:
        """Least squares over measured points, relative to their size; a row never costs less than nothing, nor less
        than the one before it. It may bend at points between the first and the last."""
        if max(seconds) <= 0:
            return StepCost(0.0, 0.0)
        weight = [1 / max(s, 1e-9) for s in seconds]
        target = torch.tensor([s * w for s, w in zip(seconds, weight, strict=True)], dtype=torch.float64)
        best, smallest = StepCost(sum(weight) / sum(w * w for w in weight), 0.0), math.inf
        inner = rows[1:-1]
        for count in range(len(inner) + 1):
            for places in itertools.combinations(inner, count):
                columns = [[1.0] * len(rows), list(rows), *([max(n - place, 0) for n in rows] for place in places)]
                matrix = (
                    torch.tensor(columns, dtype=torch.float64).T * torch.tensor(weight, dtype=torch.float64)[:, None]
                )
                base, *slopes = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0].tolist()
                error = (matrix @ torch.tensor([base, *slopes], dtype=torch.float64) - target).square().sum().item()
                # a bend must explain something: what is measured has an error of a few per cent
                if min(base, *slopes) >= 0 and error < smallest - _NOISE**2:
                    best, smallest = (
                        StepCost(base, slopes[0], tuple(zip(map(float, places), slopes[1:], strict=True))),
                        error,
                    )
        return best

    def __call__(self, rows: float) -> float:
        """Estimated seconds of a forward over ``rows`` rows."""
        seconds = self.base + self.per_row * rows
        return seconds + self.bent(rows) if self.bends else seconds

    def bent(self, rows: float) -> float:
        """The part of it that is due to the bends."""
        seconds = 0.0
        for place, more in self.bends:
            if rows > place:
                seconds += more * (rows - place)
        return seconds

    def plus(self, seconds: float) -> StepCost:
        """The cost of a step that takes so much longer."""
        return StepCost(self.base + seconds, self.per_row, self.bends)

    def beside(self, rows: int, slots: int, decoding: int) -> StepCost:
        """The cost by the rows of ``decoding`` slots of a step that has ``rows`` others, of ``slots`` slots.

        Each row costs what it does at that place, but prompts are read whatever is drafted, so the rest is what a plain
        step of all these slots costs: a token gained while they read is worth a share of the steps to come, not of this
        long one.
        """
        if rows == slots == 0:
            return self
        slope = self.per_row + sum(more for place, more in self.bends if place <= rows)
        shifted = StepCost(0.0, slope, tuple((place - rows, more) for place, more in self.bends if place > rows))
        return shifted.plus(self(slots + decoding) - shifted(decoding))


class RunningCost:
    """The line of a StepCost, refined by the steps that are run anyway.

    Its bends stay where they were measured at start and grow with the cost as a whole; the rest is about what remains
    without them. The slope is a decayed least-squares fit of deviations: how much longer than its neighbours in time a
    step took that had more rows than they. Whatever moves slowly drops out of it: longer contexts, a machine that
    others use. The measurement at start counts as some steps, so that a server whose steps are all alike keeps its
    slope. The base follows the level.

    Attributes:
        line: the current estimate.
    """

    _MEMORY = 0.99  # of the slope, per step
    _LEVEL = 0.1  # how fast the level follows
    _PRIOR = 300.0  # squared rows of deviation that the start counts for: three steps that are ten rows off
    _LEAST = 0.2  # of a row by the measurement at start, at today's pace: what one costs at least

    def __init__(self, start: StepCost) -> None:
        self.line = start
        self._start = start
        self._scale = 1.0  # seconds now to seconds at start
        self._kind = 0, False
        self._rows = 0.0
        self._seconds = 0.0
        self._xx = 0.0
        self._xy = 0.0

    def observe(self, rows: int, slots: int, seconds: float, trees: bool = False) -> None:
        """A decode step without prefill chunks took ``seconds``, forward and sampling.

        Args:
            trees: slots were drafted for, which costs something by itself (``TreeCost``).
        """
        # One step says at most "twice" or "half": a hiccup is forgotten, a lasting change is followed within a dozen.
        expected = self.line(rows)
        seconds = min(max(seconds, expected / 2), expected * 2)
        bent = self.line.bent(rows)
        straight = seconds - bent
        if (slots, trees) == self._kind:
            deviation = rows - self._rows
            # squares weigh outliers; a step that is off by more than a quarter tells nothing of rows
            told = min(max(seconds, expected * 0.75), expected * 1.25) - bent - self._seconds
            self._xx = self._MEMORY * self._xx + deviation**2
            self._xy = self._MEMORY * self._xy + deviation * told
            self._rows += self._LEVEL * deviation
            self._seconds += self._LEVEL * (straight - self._seconds)
        else:  # every slot brings a context of its own: its rows are not what makes the difference
            self._kind, self._rows, self._seconds = (slots, trees), float(rows), straight
        self._scale += self._LEVEL * (seconds / self._start(rows) - self._scale)
        slope = (self._xy + self._PRIOR * self._start.per_row * self._scale) / (self._xx + self._PRIOR)
        slope = min(max(slope, 0.0), seconds / rows)
        base = self.line.base + self._LEVEL * (straight - slope * rows - self.line.base)
        bends = tuple((place, more * self._scale) for place, more in self._start.bends)
        # right behind a change of pace the bends, which follow slowly, would leave nothing of a step of many rows
        base = max(base, self._LEAST * self._scale * self._start(1) - slope, 0.0)
        self.line = StepCost(base, slope, bends)


class TreeCost:
    """Seconds that a slot with a tree takes of a step beside drafting and rows: in Python, for merging and cutting, and
    in the forward, whose slots no longer have a row each.

    Found by comparing steps with trees to steps without, of as many slots and not long before: contexts grow.

    Attributes:
        per_slot: the current estimate.
    """

    _RATE = 0.05
    _PLAIN_RATE = 0.3
    _START = 1e-4
    _FRESH = 32  # steps for which a step without trees can be compared with

    def __init__(self) -> None:
        self.per_slot = self._START
        self._plain = 0.0  # what such steps take
        self._slots = 0  # that they have
        self._age = 0

    def observe(self, slots: int, trees: int, seconds: float) -> None:
        """A step of ``slots`` slots, ``trees`` of them drafted for, took ``seconds``, drafting and more rows apart."""
        self._age += 1
        known = slots == self._slots and self._age < self._FRESH
        if trees == 0:
            self._plain = (
                self._plain + self._PLAIN_RATE * (min(seconds, 2 * self._plain) - self._plain) if known else seconds
            )
            self._slots, self._age = slots, 0
        elif known:
            more = min(max((seconds - self._plain) / trees, 0.0), 4 * self._START)  # a hiccup is not the trees' fault
            self.per_slot += self._RATE * (more - self.per_slot)


class DraftCost:
    """Seconds that a proposal takes, by its depth and by the number of slots that share it.

    Reading what was accepted makes the first layer dearer than the others, so depths are measured apart; what lies
    between or beyond those measured goes on in a straight line.
    """

    _RATE = 0.1
    _FIRST = 3  # observations of which the least counts: the first calls warm something up

    def __init__(self) -> None:
        # power of two above the slots → depth → (seconds, observations)
        self._seconds: dict[int, dict[int, tuple[float, int]]] = {}

    @staticmethod
    def size(slots: int) -> int:
        """What numbers of slots are told apart by: those of one size cost the same."""
        return (slots - 1).bit_length()

    @property
    def settled(self) -> bool:
        """Whether there is more than a first impression."""
        return any(count >= self._FIRST for depths in self._seconds.values() for _, count in depths.values())

    def observe(self, slots: int, depth: int, seconds: float, *, steady: bool = True) -> None:
        """A proposal for ``slots`` slots, whose deepest tree had ``depth`` layers, took ``seconds``.

        Args:
            steady: all of them were drafted for in the step before. Otherwise there was text to read first, and the
                time says at most how much such a proposal takes.
        """
        depths, depth = self._seconds.setdefault(self.size(slots), {}), max(depth, 1)
        mean, count = depths.get(depth, (seconds, 0))
        if not steady or count < self._FIRST:
            mean = min(mean, seconds)
        else:
            mean += self._RATE * (min(max(seconds, mean / 2), mean * 2) - mean)
        depths[depth] = (mean, count + steady)

    def __call__(self, slots: int, depth: int = 1) -> float:
        """Estimated seconds; 0 before the first observation, so that there is one."""
        depths = self._depths(slots)
        if not depths:
            return 0.0
        if depth in depths:
            return depths[depth][0]
        near = sorted(depths, key=lambda known: abs(known - depth))[:2]
        first = depths[near[0]][0]
        if len(near) == 1:
            return first * depth / near[0]
        # noise must not make layers free
        slope = max((depths[near[1]][0] - first) / (near[1] - near[0]), first / near[0] / 2)
        return max(first + slope * (depth - near[0]), 0.0)

    def dearest(self, slots: int) -> float:
        """Estimated seconds of the dearest depth that was measured; 0 before the first observation."""
        return max((seconds for seconds, _ in self._depths(slots).values()), default=0.0)

    def _depths(self, slots: int) -> dict[int, tuple[float, int]]:
        key = self.size(slots)
        if (depths := self._seconds.get(key)) is not None or not self._seconds:
            return depths or {}
        # an unmeasured number of slots costs what the nearest measured one does
        return self._seconds[min(self._seconds, key=lambda known: abs(known - key))]

"""How far a drafter's path values can be trusted: learned from what became of its proposals.

A drafter says how likely the target takes each child. Verified children are trials of that statement, counted per
range of what was said (a reliability curve; Guo et al. 2017, arXiv 1706.04599, section 2, names it) and per slot. The
corrected probability of a child never exceeds 1, so that corrected values still fall along a path.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from minispec.tree import DraftTree
from minispec.verify import Acceptance

Source = tuple[str, ...]
"""Names of the drafters that proposed a node."""

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_LARGEST = 1.5  # a correction above that would be a claim of the calibration, not of the drafter
_NEVER = -60.0  # log of a probability that stands for 0


class Ratio:
    """Observed to predicted acceptance, decayed; starts at 1, worth half a predicted acceptance."""

    _PRIOR = 0.5

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._predicted = 0.0
        self._happened = 0.0

    def __call__(self) -> float:
        return min((self._happened + self._PRIOR) / (self._predicted + self._PRIOR), _LARGEST)

    def learn(self, predicted: float, happened: float) -> None:
        self._predicted = self._memory * self._predicted + predicted
        self._happened = self._memory * self._happened + happened


class Calibration:
    """The reliability curves of one drafter, one per combination of members that propose a node."""

    def __init__(self) -> None:
        self._curves: dict[Source, list[Ratio]] = {}

    def values(self, tree: DraftTree, sources: Sequence[Source], slot: Ratio) -> list[float]:
        """The tree's path values corrected by the curves and by what ``slot`` has seen."""
        values = [0.0] * len(tree)
        for i in range(1, len(tree)):
            said = _said(tree, i)
            corrected = min(said * self._ratio(sources[i], said)() * slot(), 1.0)
            values[i] = values[tree.parents[i]] + (math.log(corrected) if corrected > 0 else _NEVER)
        return values

    def learn(self, tree: DraftTree, sources: Sequence[Source], acceptance: Acceptance, slot: Ratio) -> None:
        """Every verified child of an accepted node was a trial."""
        predicted = happened = 0.0
        for child, hit in trials(tree, acceptance):
            said = _said(tree, child)
            ratio = self._ratio(sources[child], said)
            predicted += min(said * ratio(), 1.0)
            happened += hit
            ratio.learn(said, hit)
        slot.learn(predicted, happened)

    def _ratio(self, source: Source, said: float) -> Ratio:
        curve = self._curves.get(source)
        if curve is None:
            curve = self._curves[source] = [Ratio(0.995) for _ in range(len(_EDGES) + 1)]
        return curve[bisect_right(_EDGES, said)]


class Survival:
    """How often a walk goes on at each depth, where the tree offered it children.

    Args:
        memory: what an observation weighs after each further one.
    """

    _FADING = 0.98  # of layers that the tree no longer has: what was bad luck there is tried again some day
    _PRIOR = 2.0  # observations the wider estimate counts for
    _GUESS = 0.6

    def __init__(self, memory: float = 0.95) -> None:
        self._memory = memory
        self._tries: list[float] = []
        self._hits: list[float] = []

    def learn(self, tree: DraftTree, acceptance: Acceptance) -> None:
        for depth, node in enumerate(acceptance.path):
            if not tree.children[node]:
                self._tries[depth:] = [self._FADING * tries for tries in self._tries[depth:]]
                self._hits[depth:] = [self._FADING * hits for hits in self._hits[depth:]]
                break
            if depth == len(self._tries):
                self._tries.append(0.0)
                self._hits.append(0.0)
            self._tries[depth] = self._memory * self._tries[depth] + 1
            self._hits[depth] = self._memory * self._hits[depth] + (len(acceptance.path) > depth + 1)

    def gains(self, depth: int, wider: Survival | None = None) -> list[float]:
        """Expected accepted tokens of a tree of 0, 1, … ``depth`` layers.

        Args:
            wider: the estimate over all slots, which this slot's own starts from.
        """
        gains, reach = [0.0], 1.0
        for rate in self._rates(depth, wider._rates(depth, None) if wider else None):
            reach *= rate
            gains.append(gains[-1] + reach)
        return gains

    def _rates(self, depth: int, prior: list[float] | None) -> list[float]:
        rates: list[float] = []
        for d in range(depth):
            # what was never tried is as good as the layer above it
            guess = prior[d] if prior else rates[-1] if rates else self._GUESS
            tries, hits = (self._tries[d], self._hits[d]) if d < len(self._tries) else (0.0, 0.0)
            rates.append((hits + self._PRIOR * guess) / (tries + self._PRIOR))
        return rates


def trials(tree: DraftTree, acceptance: Acceptance) -> Iterator[tuple[int, bool]]:
    """(child, whether the target took it) for every verified child of an accepted node."""
    for node, token in zip(acceptance.path, acceptance.tokens, strict=True):
        for drafted, child in tree.children[node].items():
            yield child, drafted == token


def _said(tree: DraftTree, node: int) -> float:
    """The drafter's probability of a node, given that the walk reaches its parent."""
    return (
        math.exp(max(tree.values[node] - tree.values[tree.parents[node]], _NEVER))
        if math.isfinite(tree.values[node])
        else 0.0
    )

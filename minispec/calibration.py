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
    """Observed to predicted acceptance, decayed; starts at 1."""

    _PRIOR = 0.5

    def __init__(self, memory: float, largest: float = _LARGEST) -> None:
        self._memory = memory
        self._largest = largest
        self._predicted = 0.0
        self._happened = 0.0

    def __call__(self, prior: float = _PRIOR) -> float:
        """``prior``: the predicted acceptances that the start counts for, > 0."""
        return min((self._happened + prior) / (self._predicted + prior), self._largest)

    def learn(self, predicted: float, happened: float) -> None:
        self._predicted = self._memory * self._predicted + predicted
        self._happened = self._memory * self._happened + happened


class Calibration:
    """The reliability curves of one drafter, one per combination of members that propose a node."""

    def __init__(self) -> None:
        self._curves: dict[Source, list[Ratio]] = {}

    def values(self, tree: DraftTree, sources: Sequence[Source], slot: Ratio, least: float = -math.inf) -> list[float]:
        """The tree's path values corrected by the curves and by what ``slot`` has seen; -inf where they are not above
        ``least``."""
        own, values = slot(), [0.0]
        for i, parent in enumerate(tree.parents[1:], 1):
            value = values[parent]
            if value > least:  # or else nothing behind it is
                said = _said(tree, i)
                corrected = min(said * self._ratio(sources[i], said)() * own, 1.0)
                value += math.log(corrected) if corrected > 0 else _NEVER
            values.append(value if value > least else -math.inf)
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


class Outcome:
    """What a drafter's proposals come to, by layer, as long as circumstances are as they were: means over proposals of
    the nodes verified because of it, and of the tokens they bring.

    Attributes:
        count: proposals seen.
        others, beside: of the rest of the tree, which others propose too: tokens, and nodes.
    """

    _RATE = 0.05
    _TRUST = 8  # proposals that the beginning counts for: the first few are a matter of luck
    _FADING = 0.1  # of layers that are not asked for: what was bad luck there is tried again some day
    _GUESS = 0.6  # of a layer's tokens, what the next is reckoned to bring at least

    def __init__(self) -> None:
        self.count = 0
        self.others = 0.0
        self.beside = 0.0
        self._layers: list[tuple[float, float]] = []  # tokens, nodes
        self._layers.append(self._next(0))
        self._totals: list[tuple[float, float]] = []

    def learn(self, layers: Sequence[tuple[float, float]], asked: int, others: float, beside: float) -> None:
        """Take in a proposal.

        Args:
            layers: tokens and nodes, of each layer.
            asked: layers it was to have at most.
            others, beside: see above.
        """
        self.count += 1
        self._totals = []
        rate = max(self._RATE, 1 / (self.count + self._TRUST))
        self.rest(others, beside)
        while len(self._layers) < len(layers):
            self._layers.append(self._next(len(self._layers)))
        for depth, (tokens, nodes) in enumerate(self._layers):
            if depth < asked:
                more, wide = layers[depth] if depth < len(layers) else (0.0, 0.0)
                self._layers[depth] = tokens + rate * (more - tokens), nodes + rate * (wide - nodes)
            else:
                self._layers[depth] = tokens + self._FADING * (self._next(depth)[0] - tokens), nodes

    def rest(self, others: float, beside: float) -> None:
        """Take in a tree to which it was not asked to add anything."""
        self.others += self._RATE * (others - self.others)
        self.beside += self._RATE * (beside - self.beside)

    def totals(self) -> list[tuple[float, float]]:
        """Tokens and nodes of trees of 0, 1, 2, … layers: one more than ever was seen."""
        if self._totals:
            return self._totals
        tokens = nodes = 0.0
        self._totals = totals = [(0.0, 0.0)]
        for more, wide in self._layers:
            tokens, nodes = tokens + more, nodes + wide
            totals.append((tokens, nodes))
        more, wide = self._next(len(self._layers))
        totals.append((tokens + more, nodes + wide))
        return totals

    def _next(self, depth: int) -> tuple[float, float]:
        """A guess at layer ``depth`` (0 is the first): walks go on as they did in the layer above."""
        if depth == 0:
            return self._GUESS, 1.0
        tokens, nodes = self._layers[depth - 1]
        above = self._layers[depth - 2][0] if depth > 1 else 1.0
        if tokens >= above > 0:
            return tokens, nodes
        share = tokens / above if above > 0 else 0.0
        return tokens * (share if share > self._GUESS else self._GUESS), nodes


def trials(tree: DraftTree, acceptance: Acceptance) -> Iterator[tuple[int, bool]]:
    """(child, whether the target took it) for every verified child of an accepted node."""
    for node, token in zip(acceptance.path, acceptance.tokens, strict=True):
        for drafted, child in tree.children[node].items():
            yield child, drafted == token


def _said(tree: DraftTree, node: int) -> float:
    """The drafter's probability of a node, given that the walk reaches its parent."""
    value = tree.values[node]
    return math.exp(max(value - tree.values[tree.parents[node]], _NEVER)) if math.isfinite(value) else 0.0

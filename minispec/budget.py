"""How many nodes a step verifies: the number that maximises expected tokens per second.

A step with R rows costs ``cost(R)`` seconds, measured at start. A node whose walk probability is p adds p expected
tokens. Over all slots together the best nodes are taken as long as (roots + sum of p) / cost keeps its maximum (the
objective of Sequoia, Chen et al. 2024, arXiv 2402.12374, section 4, applied to the step at hand).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minispec.tree import DraftTree


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

    def __call__(self, rows: int) -> float:
        """Estimated seconds of a forward over ``rows`` rows."""
        return self.base + self.per_row * rows


def allot(trees: Sequence[DraftTree], budget: int, cost: StepCost | None, other_rows: int = 0) -> list[DraftTree]:
    """Cut the trees, taken together, to the nodes that pay.

    Args:
        trees: one per decoding slot.
        budget: most nodes over all trees, roots included; every tree keeps its root.
        cost: measured step cost; None keeps as many nodes as the budget allows.
        other_rows: rows of the step that are not tree nodes (prefill chunks).

    Returns:
        The trees cut; each is closed under taking the parent, as values fall along a path.
    """
    drafted = [(-tree.values[i], t, i) for t, tree in enumerate(trees) for i in range(1, len(tree))]
    drafted.sort()
    drafted = drafted[: max(budget - len(trees), 0)]
    count = len(drafted)
    if cost is not None and drafted:
        best, tokens = 0.0, float(len(trees))
        for n in range(len(drafted) + 1):
            if n:
                tokens += math.exp(-drafted[n - 1][0])
            rate = tokens / cost(other_rows + len(trees) + n)
            if rate > best:
                best, count = rate, n
    kept: list[list[int]] = [[0] for _ in trees]
    for _, t, i in drafted[:count]:
        kept[t].append(i)
    return [tree if len(nodes) == len(tree) else tree.keep(nodes) for tree, nodes in zip(trees, kept, strict=True)]

"""Which nodes of some trees are verified: those that, taken together, bring the requests of a step forward fastest.

A decode step with R rows costs ``cost(R)`` seconds. A node whose walk probability is p adds p expected tokens to its
slot's. Over all slots together the best nodes are taken as long as (roots + sum of p) / cost keeps its maximum (the
objective of Sequoia, Chen et al. 2024, arXiv 2402.12374, section 4, applied to the step at hand); of several slots,
their geometric mean. So it counts how much faster each request becomes (proportional fairness: Kelly et al. 1998,
"Rate control for communication networks", section 2): the sum would give all to those that are fast already, and leave
the others behind. Where prompts are read beside, the cost is that of ``StepCost.beside``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minispec.costs import StepCost
from minispec.tree import DraftTree


@dataclass(frozen=True)
class Prefill:
    """What else is in a step: prompts that are read.

    Attributes:
        rows: prompt tokens computed, and one for each slot that decodes without being drafted for.
        slots: whose they are; each counts as a token, as it does while decoding.
    """

    rows: int = 0
    slots: int = 0


def allot(
    trees: Sequence[DraftTree], budget: int, cost: StepCost | None, prefill: Prefill = Prefill()
) -> list[DraftTree]:
    """Cut the trees, taken together, to the nodes that pay by their own values; arguments as for ``choose``."""
    kept = choose([tree.values for tree in trees], budget, cost, prefill)
    return [tree if len(nodes) == len(tree) else tree.keep(nodes) for tree, nodes in zip(trees, kept, strict=True)]


def choose(
    values: Sequence[Sequence[float]], budget: int, cost: StepCost | None, prefill: Prefill = Prefill()
) -> list[list[int]]:
    """The nodes of some trees, taken together, that pay.

    Args:
        values: path values, one tree per decoding slot; they fall along a path.
        budget: most nodes over all trees, roots included; every tree keeps its root.
        cost: of a decode step by its rows; None keeps as many nodes as the budget allows.
        prefill: what else is in the step.

    Returns:
        Of each tree the nodes kept, in any order behind the root; with a node its parent is kept, as values fall along
        a path.
    """
    if cost is None:
        drafted = sorted((-value, t, i) for t, own in enumerate(values) for i, value in enumerate(own) if i)
    else:
        drafted = sorted(gain for t, own in enumerate(values) for gain in _gains(t, own))
    drafted = drafted[: max(budget - len(values), 0)]
    count = len(drafted)
    if cost is not None and drafted:
        cost = cost.beside(prefill.rows, prefill.slots, rows := len(values))
        share = 1 / (rows + prefill.slots)
        gained, best, count = 0.0, -math.log(cost(rows)), 0
        for n, (less, _, _) in enumerate(drafted, 1):
            gained -= less
            if (speed := share * gained - math.log(cost(rows + n))) > best:
                best, count = speed, n
    kept: list[list[int]] = [[0] for _ in values]
    for _, t, i in drafted[:count]:
        kept[t].append(i)
    return kept


def _gains(tree: int, values: Sequence[float]) -> list[tuple[float, int, int]]:
    """(less, tree, node) for the nodes of a tree that can be reached, likeliest first: minus the logarithm of how much
    further the slot gets with it than with those before it."""
    gains, tokens = [], 1.0
    for less, i in sorted((-value, i) for i, value in enumerate(values) if i and value > -math.inf):
        chance = math.exp(-less)
        gains.append((-math.log1p(chance / tokens), tree, i))
        tokens += chance
    return gains

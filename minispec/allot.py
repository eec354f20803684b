"""Which nodes of some trees are verified: those that, taken together, make the most tokens per second.

A step with R rows costs ``cost(R)`` seconds. A node whose walk probability is p adds p expected tokens. Over all slots
together the best nodes are taken as long as (roots + sum of p) / cost keeps its maximum (the objective of Sequoia, Chen
et al. 2024, arXiv 2402.12374, section 4, applied to the step at hand).
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
        rows: prompt tokens computed.
        tokens: what they are worth in the reckoning; a slot counts as one, as it does while decoding.
    """

    rows: int = 0
    tokens: int = 0


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
        cost: measured step cost; None keeps as many nodes as the budget allows.
        prefill: what else is in the step.

    Returns:
        Of each tree the nodes kept, in any order behind the root; with a node its parent is kept, as values fall along
        a path.
    """
    drafted = [(-value, t, i) for t, own in enumerate(values) for i, value in enumerate(own) if i]
    if cost is not None:
        drafted = [node for node in drafted if node[0] < math.inf]  # others never pay
    drafted.sort()
    drafted = drafted[: max(budget - len(values), 0)]
    count = len(drafted)
    if cost is not None and drafted:
        rows, tokens = prefill.rows + len(values), float(len(values) + prefill.tokens)
        best, count = tokens / cost(rows), 0
        for n, (value, _, _) in enumerate(drafted, 1):
            tokens += math.exp(-value)
            if (rate := tokens / cost(rows + n)) < best:
                break  # the gains fall and the costs of rows do not: from here on the rate falls too
            if rate > best:
                best, count = rate, n
    kept: list[list[int]] = [[0] for _ in values]
    for _, t, i in drafted[:count]:
        kept[t].append(i)
    return kept

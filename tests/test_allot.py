"""How many nodes a step verifies."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minispec.allot import Prefill, allot
from minispec.costs import StepCost
from minispec.tree import DraftTree


def test_the_cost_is_a_line():
    assert [StepCost(10.0, 2.0)(rows) for rows in (0, 1, 2, 100)] == [10.0, 12.0, 14.0, 210.0]


@pytest.mark.parametrize(("base", "per_row"), [(10.0, 2.0), (5.0, 0.0), (0.0, 3.0)])
def test_a_straight_line_is_found_again(base, per_row):
    rows = (1, 2, 4, 8, 16, 32, 64)
    cost = StepCost.fit(rows, [base + per_row * n for n in rows])
    assert cost.base == pytest.approx(base, abs=1e-9) and cost.per_row == pytest.approx(per_row, abs=1e-9)


def test_rows_that_get_dearer_bend_the_line():
    rows = (1, 4, 8, 16, 32)
    cost = StepCost.fit(rows, [10.0 + 0.5 * n + max(n - 8, 0) * 1.0 for n in rows])
    assert [cost(n) for n in (1, 8, 12, 32)] == pytest.approx([10.5, 14.0, 20.0, 50.0])
    assert cost.plus(3.0)(12) == pytest.approx(23.0)


def test_noise_does_not_bend_the_line():
    rng = random.Random(3)
    rows = (1, 4, 8, 16, 32)
    assert StepCost.fit(rows, [(20.0 + n) * rng.uniform(0.99, 1.01) for n in rows]).bends == ()


def test_rows_that_get_cheaper_do_not_bend_it_downwards():
    cost = StepCost.fit((1, 4, 8, 16, 32), [10.0, 13.0, 17.0, 17.5, 18.0])
    assert cost.bends == () and cost(32) > cost(1)


@given(st.lists(st.floats(1e-4, 10.0), min_size=7, max_size=7))
def test_whatever_was_measured_a_step_costs_something_and_rows_are_never_paid_back(seconds):
    cost = StepCost.fit((1, 2, 4, 8, 16, 32, 64), seconds)
    assert cost.per_row >= 0 and cost.base >= -1e-12
    assert 0 < cost(1) <= cost(64) <= cost(10_000)


def chain(*probabilities: float) -> DraftTree:
    """A path whose nodes are reached with these probabilities."""
    n = len(probabilities)
    return DraftTree(tuple(range(n + 1)), tuple(range(-1, n)), (0.0, *map(math.log, probabilities)))


@st.composite
def trees(draw, most: int = 6) -> DraftTree:
    parents, values = [-1], [0.0]
    for i in range(1, draw(st.integers(1, most))):
        parents.append(draw(st.integers(0, i - 1)))
        # eighths make ties, also between parent and child
        values.append(values[parents[-1]] + math.log(draw(st.integers(1, 8)) / 8))
    return DraftTree(tuple(range(len(parents))), tuple(parents), tuple(values))


forests = st.lists(trees(), min_size=1, max_size=3)
costs = st.builds(StepCost, st.integers(0, 20), st.integers(1, 5))
bent = st.builds(
    StepCost,
    st.integers(0, 20),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), max_size=2),
)


def is_cut_of(cut: DraftTree, tree: DraftTree) -> bool:
    """Tokens here are node indices, so a cut says which nodes it kept; making it checked that it is closed."""
    kept = cut.tokens
    return cut == tree.keep(kept) and kept[0] == 0


@given(forests, st.integers(1, 20))
def test_without_a_cost_the_budget_is_used_up(forest, budget):
    cut = allot(forest, budget, None)
    assert all(map(is_cut_of, cut, forest)) and len(cut) == len(forest)
    total = sum(map(len, forest))
    assert sum(map(len, cut)) == min(total, max(budget, len(forest)))
    left_out = [v for c, t in zip(cut, forest, strict=True) for i, v in enumerate(t.values) if i not in c.tokens]
    drafted = [v for c in cut for v in c.values[1:]]
    assert not left_out or not drafted or max(left_out) <= min(drafted)


@given(forests, st.integers(1, 20), costs, st.integers(0, 12))
def test_with_a_cost_the_budget_is_a_bound(forest, budget, cost, other_rows):
    cut = allot(forest, budget, cost, Prefill(other_rows))
    assert all(map(is_cut_of, cut, forest)) and len(cut) == len(forest)
    assert sum(map(len, cut)) <= max(budget, len(forest))


@settings(max_examples=60)
@given(st.lists(trees(4), min_size=1, max_size=2), st.integers(1, 8), bent, st.integers(0, 6), st.integers(0, 2))
def test_no_closed_choice_of_nodes_brings_requests_forward_faster(forest, budget, cost, other_rows, slots):
    """In geometric mean; rows at what they cost in this step, all else as in one of all these slots without prompts."""

    def rate(cut: tuple[DraftTree, ...]) -> float:
        tokens = math.prod(sum(math.exp(value) for value in tree.values) for tree in cut)
        rows = sum(map(len, cut))
        further = cost(other_rows + rows) - cost(other_rows + len(cut))
        return tokens ** (1 / (slots + len(cut))) / (cost(slots + len(cut)) + further)

    def cuts(tree: DraftTree) -> list[DraftTree]:
        result = []
        for nodes in itertools.product([False, True], repeat=len(tree) - 1):
            kept = [0, *(i for i, keep in enumerate(nodes, 1) if keep)]
            if all(tree.parents[i] in kept for i in kept[1:]):
                result.append(tree.keep(kept))
        return result

    choices = itertools.product(*map(cuts, forest))
    best = max(rate(c) for c in choices if sum(map(len, c)) <= max(budget, len(forest)))
    assert rate(tuple(allot(forest, budget, cost, Prefill(other_rows, slots)))) == pytest.approx(best)


def test_free_rows_are_filled_and_dear_rows_are_not():
    tree = chain(0.9, 0.5, 0.1, 0.01)
    assert allot([tree], 64, StepCost(1.0, 0.0)) == [tree]
    # a step costs its rows and nothing else: even a sure node only breaks even
    assert allot([chain(1.0, 1.0)], 64, StepCost(0.0, 1.0)) == [DraftTree.root(0)]
    # tokens per second with 1, 2, 3, 4, 5 rows: 1/5 < 1.9/6 < 2.4/7 > 2.5/8 > 2.51/9
    assert [len(cut) for cut in allot([tree], 64, StepCost(4.0, 1.0))] == [3]


def test_a_prompt_beside_makes_a_node_no_cheaper():
    """Its rows are computed whatever is drafted; a token is worth what it costs in the steps to come."""
    tree = chain(0.5, 0.4)
    assert [len(cut) for cut in allot([tree], 64, StepCost(0.5, 1.0))] == [1]
    assert [len(cut) for cut in allot([tree], 64, StepCost(0.5, 1.0), Prefill(rows=200, slots=3))] == [1]


def test_a_prompt_beside_can_make_a_node_dearer():
    """Where its rows have used up what a step has to spare."""
    cost, tree = StepCost(10.0, 0.1, ((64, 2.0),)), chain(0.5, 0.4)
    assert [len(cut) for cut in allot([tree], 64, cost)] == [3]
    assert [len(cut) for cut in allot([tree], 64, cost, Prefill(rows=200, slots=1))] == [2]
    assert [len(cut) for cut in allot([tree], 64, cost, Prefill(rows=200, slots=3))] == [1]


def test_many_slots_share_the_fixed_cost():
    """With more streams a step carries more tokens, so that a doubtful node must pay more of them."""
    tree = chain(0.5)
    alone = allot([tree], 64, StepCost(3.0, 1.0))
    crowd = allot([tree] * 8, 64, StepCost(3.0, 1.0))
    assert [len(cut) for cut in alone] == [2]
    assert [len(cut) for cut in crowd] == [1] * 8


def test_the_best_nodes_win_whosever_they_are():
    sure, unsure = chain(0.9, 0.8, 0.7), chain(0.5, 0.1)
    assert [len(tree) for tree in allot([unsure, sure], 5, None)] == [1, 4]
    assert [len(tree) for tree in allot([unsure, sure], 6, None)] == [2, 4]
    # every slot keeps its root, even above the budget
    assert [len(tree) for tree in allot([unsure, sure], 1, None)] == [1, 1]


def test_who_is_slow_has_a_node_before_who_is_fast_has_another():
    """What a node adds counts by how fast its request is without it."""
    fast, slow = chain(0.9, 0.8, 0.7), chain(0.4)
    cost = StepCost(10.0, 1.0)
    assert [len(cut) for cut in allot([fast, fast, slow], 64, cost)] == [4, 4, 2]
    assert [len(cut) for cut in allot([fast, fast, slow], 7, cost)] == [3, 3, 1]
    assert [len(cut) for cut in allot([fast, fast, slow], 8, cost)] == [3, 3, 2]


def test_nothing_to_allot():
    assert allot([], 10, StepCost(1.0, 1.0)) == [] and allot([], 10, None) == []
    assert allot([DraftTree.root(5)], 10, StepCost(1.0, 1.0), Prefill(rows=3)) == [DraftTree.root(5)]


def test_a_node_that_is_never_reached_is_not_verified():
    tree = DraftTree((0, 1, 2), (-1, 0, 1), (0.0, math.log(0.9), -math.inf))
    assert allot([tree], 10, StepCost(1.0, 0.01)) == [tree.keep([0, 1])]

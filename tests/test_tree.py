from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minispec.tree import MAX_NODES, DraftTree


@st.composite
def trees(draw, max_nodes: int = 40) -> DraftTree:
    n = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]
    values = [0.0]
    for i in range(1, n):
        values.append(values[parents[i]] - draw(st.floats(0, 3)))
    return DraftTree(tuple(range(n)), tuple(parents), tuple(values))


def test_position_comes_from_the_parent_not_the_order():
    tree = DraftTree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 3, 0), (0.0, -1, -1, -2, -3, -4))
    assert tree.depth == (0, 1, 1, 2, 3, 1)
    assert tree.ancestors == (0b1, 0b11, 0b101, 0b1011, 0b11011, 0b100001)
    assert tree.path(4) == (0, 1, 3, 4)
    assert tree.children[0] == {1: 1, 2: 2, 5: 5}


@pytest.mark.parametrize(
    ("tokens", "parents", "values", "message"),
    [
        ((), (), (), "nodes"),
        ((1,) * (MAX_NODES + 1), (-1,) + (0,) * MAX_NODES, (0.0,) * (MAX_NODES + 1), "nodes"),
        ((1, 2), (-1, 1), (0.0, 0.0), "node 1 has parent 1"),
        ((1, 2), (-1, -1), (0.0, 0.0), "node 1 has parent -1"),
        ((1, 2), (0, 0), (0.0, 0.0), "root has parent"),
        ((1, 2), (-1,), (0.0, 0.0), "as many parents"),
        ((1, 2, 2), (-1, 0, 0), (0.0, -1, -1), "siblings"),
        ((1, 2), (-1, 0), (0.0, 0.5), "above its parent"),
        ((1, 2), (-1, 0), (0.0, float("nan")), "above its parent"),
    ],
)
def test_refuses_what_is_not_a_tree(tokens, parents, values, message):
    with pytest.raises(ValueError, match=message):
        DraftTree(tokens, parents, values)


@given(trees(), st.integers(1, 50), st.integers(0, 6))
def test_best_keeps_the_most_valuable_closed_subtree(tree, count, max_depth):
    best = tree.best(count, max_depth)
    allowed = [i for i in range(len(tree)) if tree.depth[i] <= max_depth]
    assert len(best) == min(count, len(allowed))
    assert max(best.depth) <= max_depth
    assert sorted(best.values) == pytest.approx(sorted(sorted((tree.values[i] for i in allowed), reverse=True)[:count]))
    # tokens are unique here, so they tell old nodes: paths must be what they were
    for i in range(len(best)):
        path = [best.tokens[n] for n in best.path(i)]
        assert path == [tree.tokens[n] for n in tree.path(tree.tokens.index(best.tokens[i]))]


def test_keep_refuses_orphans():
    tree = DraftTree((0, 1, 2), (-1, 0, 1), (0.0, -1, -2))
    with pytest.raises(ValueError, match="closed"):
        tree.keep([0, 2])
    with pytest.raises(ValueError, match="closed"):
        tree.keep([1])

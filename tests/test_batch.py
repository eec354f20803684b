from __future__ import annotations

import torch

from minispec.batch import Span, StepBatch
from minispec.tree import DraftTree

TREE = DraftTree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 3, 0), (0.0, -1, -1, -2, -3, -4))


def test_rows_of_different_kinds_lie_one_behind_the_other():
    spans = [
        Span.chunk([7, 8, 9], [5, 2], 2, sample_last=False),
        Span.tree(TREE, [1, 0, 3], 4),
        Span.tree(DraftTree.root(6), [4], 3),
    ]
    batch = StepBatch.build(spans, page_size=4)
    assert batch.tokens.tolist() == [7, 8, 9, 9, 1, 2, 3, 4, 5, 6]
    assert batch.positions.tolist() == [2, 3, 4, 4, 5, 5, 6, 7, 5, 3]
    assert batch.kv_index.tolist() == [22, 23, 8, 0, 1, 2, 3, 12, 13, 19]
    assert batch.row_start.tolist() == [0, 3, 9, 10]
    assert batch.num_cached.tolist() == [2, 4, 3]
    assert batch.tree_size.tolist() == [3, 6, 1]
    assert batch.causal.tolist() == [True, False, True]
    assert batch.page_table.tolist() == [[5, 2, 0], [1, 0, 3], [4, 0, 0]]
    assert batch.sample_rows.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert batch.ancestors.flatten().tolist() == [0, 0, 0, 1, 3, 5, 11, 27, 33, 0]
    chunk, tree, single = batch.visible
    assert chunk.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert tree[:, :4].all()
    assert tree[4, 4:].tolist() == [True, True, False, True, True, False]
    assert single is None


def test_a_layer_of_a_tree_sees_its_ancestors_of_earlier_forwards():
    span = Span([1, 2], [0, 1], 3, [2, 2], [0b0101, 0b1010], [0, 1], first_key=2)
    batch = StepBatch.build([span], page_size=4)
    assert batch.kv_index.tolist() == [5, 6]
    assert batch.positions.tolist() == [5, 5]
    assert batch.visible[0].int().tolist() == [[1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 0, 1]]


def test_a_window_hides_old_keys_by_position():
    chain = DraftTree((0, 1, 2, 3), (-1, 0, 1, 2), (0.0, 0.0, 0.0, 0.0))
    spans = [
        Span.chunk([1, 2, 3], [0, 1], 3, sample_last=True),
        Span.tree(chain, [2, 3], 3),
        Span.tree(DraftTree.root(1), [4, 5], 5),
    ]
    chunk, tree, single = StepBatch.build(spans, page_size=4, window=3).visible
    expected = [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    assert chunk.int().tolist() == expected
    assert tree.int().tolist() == [[*row, 0] for row in expected] + [[0, 0, 0, 0, 1, 1, 1]]
    assert single.int().tolist() == [[0, 0, 0, 1, 1, 1]]


def test_wide_trees_take_several_words():
    n = 70
    tree = DraftTree(tuple(range(n)), (-1, *range(n - 1)), (0.0,) * n)
    batch = StepBatch.build([Span.tree(tree, range(10), 6)], page_size=8)
    assert batch.ancestors.shape == (n, 3)
    assert batch.ancestors[31].tolist() == [-1, 0, 0]
    assert torch.equal(batch.visible[0][:, 6:], torch.ones(n, n, dtype=torch.bool).tril())


def test_building_nothing_gives_an_empty_batch():
    batch = StepBatch.build([], page_size=4)
    assert batch.tokens.shape == (0,) and batch.row_start.tolist() == [0]


def test_positions_behind_a_gap():
    batch = StepBatch.build([Span.chunk([7, 8], [0], 1, sample_last=True), Span.tree(TREE, [1, 2], 2)], page_size=4)
    assert batch.positions_after([0, 0]) is batch.arrays["positions"]
    assert list(batch.positions_after([5, 3])) == [6, 7, 5, 6, 6, 7, 8, 6]
    assert batch.positions.tolist() == [1, 2, 2, 3, 3, 4, 5, 3]
    assert (batch.rows, batch.samples) == (8, 7)

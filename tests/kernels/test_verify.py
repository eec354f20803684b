"""verify on the device: the kernel and its reference against minispec.verify."""

import random

import pytest
import torch

from minispec.kernels.verify import verify_ref, verify_triton
from minispec.tree import DraftTree
from minispec.verify import verify
from paged_steps import random_tree


@pytest.mark.parametrize("walk", [verify_ref, verify_triton], ids=["torch", "triton"])
@pytest.mark.parametrize("sizes", [[1], [63, 1, 64, 0, 65], [256, 2], [0]])
def test_walks(sizes, walk):
    rng = random.Random(len(sizes))
    trees, samples = [], []
    for size in sizes:
        tree = random_tree(rng, size) if size else None
        if tree is not None:  # few tokens, so that walks are long; siblings get distinct ones
            ranks = [sum(p == tree.parents[i] for p in tree.parents[:i]) for i in range(size)]
            tree = DraftTree(tuple(ranks), tree.parents, tree.values)
            samples.append([rng.choice([0, 0, 1, 5]) for _ in range(size)])
        else:
            samples.append([])
        trees.append(tree)
    start = [0]
    for size in sizes:
        start.append(start[-1] + size)
    depth = 40
    path, emitted, count = walk(
        torch.tensor([t for tree in trees if tree for t in tree.tokens], dtype=torch.int64),
        torch.tensor([p for tree in trees if tree for p in tree.parents], dtype=torch.int32),
        torch.tensor([s for row in samples for s in row], dtype=torch.int64),
        torch.tensor(start, dtype=torch.int32),
        depth,
    )
    for i, (tree, row) in enumerate(zip(trees, samples, strict=True)):
        expected = verify(tree, row).cut(depth) if tree else None
        n = len(expected.path) if expected else 0
        assert count[i] == n
        assert path[i].tolist() == [*(expected.path if expected else ()), *[-1] * (depth - n)]
        assert emitted[i].tolist() == [*(expected.tokens if expected else ()), *[-1] * (depth - n)]


@pytest.mark.parametrize("walk", [verify_ref, verify_triton], ids=["torch", "triton"])
def test_a_walk_is_cut_at_the_given_depth(walk):
    chain = torch.arange(5)
    path, emitted, count = walk(
        chain, torch.arange(-1, 4, dtype=torch.int32), chain + 1, torch.tensor([0, 5], dtype=torch.int32), 3
    )
    assert (path.tolist(), emitted.tolist(), count.tolist()) == ([[0, 1, 2]], [[1, 2, 3]], [3])

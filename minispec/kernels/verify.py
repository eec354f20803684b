"""The walk over each tree to the tokens it emits, on the device: ``minispec.verify`` for a batch, without a round trip.

    path = root, then ever the child that carries the target's token, until there is none
    tokens = the target's token after each node of the path; the last is the bonus token

Verification by match (Daliri, Musco & Suresh 2024, arXiv 2408.07978).

Roofline: 20 bytes per node, no FLOPs; bound by the latency of one comparison per level of the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.kernels._triton import jit
from minispec.tree import MAX_NODES

if TYPE_CHECKING:
    import triton.language as tl


def verify_ref(
    tokens: Tensor, parents: Tensor, samples: Tensor, tree_start: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch reference, and the path of a CPU.

    Args:
        tokens: [nodes] int64, the nodes of all trees one behind the other; a plain decode is a tree with one node.
        parents: [nodes] int32, index within the tree; -1 for a root.
        samples: [nodes] int64, the target's token after each node.
        tree_start: [trees + 1] int32, first node of each tree and the total; a tree without nodes emits nothing.
        depth: most nodes a path may have.

    Returns:
        path [trees, depth] int32, emitted [trees, depth] int64, both padded with -1, and count [trees] int32.
    """
    start = tree_start.tolist()
    trees = len(start) - 1
    path = torch.full((trees, depth), -1, dtype=torch.int32)
    emitted = torch.full((trees, depth), -1, dtype=torch.int64)
    count = torch.zeros(trees, dtype=torch.int32)
    token, parent, sample = tokens.tolist(), parents.tolist(), samples.tolist()
    for tree in range(trees):
        first, size = start[tree], start[tree + 1] - start[tree]
        child = {(parent[first + i], token[first + i]): i for i in range(1, size)}
        node: int | None = 0 if size else None
        length = 0
        while node is not None and length < depth:
            path[tree, length], emitted[tree, length] = node, sample[first + node]
            length += 1
            node = child.get((node, sample[first + node]))
        count[tree] = length
    return path.to(tokens.device), emitted.to(tokens.device), count.to(tokens.device)


def verify_triton(
    tokens: Tensor, parents: Tensor, samples: Tensor, tree_start: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Triton launcher; arguments as in the reference."""
    trees = tree_start.shape[0] - 1
    path = torch.empty((trees, depth), dtype=torch.int32, device=tokens.device)
    emitted = torch.empty((trees, depth), dtype=torch.int64, device=tokens.device)
    count = torch.empty(trees, dtype=torch.int32, device=tokens.device)
    if trees:
        _verify_kernel[(trees,)](
            tokens, parents, samples, tree_start, path, emitted, count, depth, BLOCK=MAX_NODES, num_warps=1
        )
    return path, emitted, count


@jit
def _verify_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    samples: tl.tensor,
    tree_start: tl.tensor,
    path: tl.tensor,
    emitted: tl.tensor,
    count: tl.tensor,
    depth: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one tree of at most BLOCK nodes. Shapes as in the reference."""
    tree = tl.program_id(0).to(tl.int64)
    first = tl.load(tree_start + tree)
    size = tl.load(tree_start + tree + 1) - first
    node = tl.arange(0, BLOCK)
    inside = (node > 0) & (node < size)  # the root is nobody's child
    token = tl.load(tokens + first + node, mask=inside, other=-1)
    parent = tl.load(parents + first + node, mask=inside, other=-2)
    at = tl.where(size > 0, 0, -1)
    length = at * 0
    for i in range(depth):
        sample = tl.load(samples + first + at, mask=at >= 0, other=-1)
        tl.store(path + tree * depth + i, at)
        tl.store(emitted + tree * depth + i, sample)
        length += tl.where(at >= 0, 1, 0)
        # siblings differ, so at most one child matches; past the end nothing does
        at = tl.max(tl.where(inside & (parent == at) & (token == sample), node, -1), 0)
    tl.store(count + tree, length)

"""DraftTree: the token tree that a drafter proposes and the target verifies in one masked pass.

Tree-masked verification: SpecInfer (Miao et al. 2023, arXiv 2305.09781, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

MAX_NODES = 256
"""Most nodes one tree may have, root included; the attention kernels are built for it."""


@dataclass(frozen=True)
class DraftTree:
    """A tree of draft tokens. Node 0, the root, is the last committed token, whose KV is not cached yet.

    Attributes:
        tokens: token id per node; ``tokens[0]`` is the root's.
        parents: index of each node's parent; ``parents[0] == -1`` and ``parents[i] < i``.
        values: natural log of the estimated probability that the target's walk reaches each node. The root's is 0,
            and a child's never exceeds its parent's, so that keeping the best nodes keeps a tree.

    Siblings carry distinct tokens.

    Raises:
        ValueError: the lists do not form such a tree.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if not 1 <= n <= MAX_NODES:
            raise ValueError(f"a tree has 1 to {MAX_NODES} nodes, not {n}")
        if len(self.parents) != n or len(self.values) != n:
            raise ValueError(f"{n} tokens need as many parents and values, not {len(self.parents)}, {len(self.values)}")
        if self.parents[0] != -1:
            raise ValueError(f"the root has parent -1, not {self.parents[0]}")
        for i in range(1, n):
            p = self.parents[i]
            if not 0 <= p < i:
                raise ValueError(f"node {i} has parent {p}: a parent comes before its child and is not negative")
            # `not <=` also refuses NaN
            if not self.values[i] <= self.values[p]:
                raise ValueError(f"node {i} has value {self.values[i]}, above its parent's {self.values[p]}")
        if len({(self.parents[i], self.tokens[i]) for i in range(n)}) != n:
            raise ValueError("two siblings carry the same token")

    @staticmethod
    def root(token: int) -> DraftTree:
        """The tree with one node: plain decoding."""
        return DraftTree((token,), (-1,), (0.0,))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Distance of each node from the root. A node's position is the committed length plus this."""
        depth = [0] * len(self)
        for i in range(1, len(self)):
            depth[i] = depth[self.parents[i]] + 1
        return tuple(depth)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Bit mask per node: bit ``j`` is set iff node ``j`` is the node itself or one of its ancestors."""
        bits = [1] * len(self)
        for i in range(1, len(self)):
            bits[i] = bits[self.parents[i]] | 1 << i
        return tuple(bits)

    @cached_property
    def children(self) -> tuple[dict[int, int], ...]:
        """Per node: child token → child index."""
        children: tuple[dict[int, int], ...] = tuple({} for _ in self.tokens)
        for i in range(1, len(self)):
            children[self.parents[i]][self.tokens[i]] = i
        return children

    def path(self, node: int) -> tuple[int, ...]:
        """Node indices from the root to ``node``, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def keep(self, nodes: Iterable[int]) -> DraftTree:
        """The subtree of ``nodes``, in their old order. The set must contain the parent of each of its nodes."""
        kept = sorted(set(nodes))
        index = {old: new for new, old in enumerate(kept)}
        if not kept or kept[0] != 0 or any(self.parents[i] not in index for i in kept[1:]):
            raise ValueError("the nodes to keep are not closed under taking the parent")
        return DraftTree(
            tuple(self.tokens[i] for i in kept),
            tuple(index[self.parents[i]] if i else -1 for i in kept),
            tuple(self.values[i] for i in kept),
        )

    def best(self, count: int, max_depth: int = MAX_NODES) -> DraftTree:
        """The ``count`` nodes of highest value no deeper than ``max_depth``: closed, as values fall along a path."""
        if count >= len(self) and max(self.depth) <= max_depth:
            return self
        # sort is stable and parents precede children, so ties keep the parent first
        order = sorted((i for i in range(len(self)) if self.depth[i] <= max_depth), key=lambda i: -self.values[i])
        return self.keep(order[: max(count, 1)])

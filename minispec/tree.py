"""DraftTree: the token tree that a drafter proposes and the target verifies in one masked pass.

Tree-masked verification: SpecInfer (Miao et al. 2023, arXiv 2305.09781, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import le, lt

MAX_NODES = 256
"""Most nodes one tree may have, root included; the attention kernels are built for it."""
_LEAF: dict[int, int] = {}  # the children of every node that has none; stays empty


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
        if n == 1:
            return
        values, parents = self.values, self.parents[1:]
        if min(parents) < 0 or not all(map(lt, parents, range(1, n))):
            i = next(i for i, p in enumerate(parents, 1) if not 0 <= p < i)
            raise ValueError(
                f"node {i} has parent {self.parents[i]}: a parent comes before its child and is not negative"
            )
        # `not <=` also refuses NaN
        if not all(map(le, values[1:], map(values.__getitem__, parents))):
            i = next(i for i, p in enumerate(parents, 1) if not values[i] <= values[p])
            raise ValueError(f"node {i} has value {values[i]}, above its parent's {values[self.parents[i]]}")
        if len(set(zip(parents, self.tokens[1:], strict=True))) != n - 1:
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
        depth = [0]
        for parent in self.parents[1:]:
            depth.append(depth[parent] + 1)
        return tuple(depth)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Bit mask per node: bit ``j`` is set iff node ``j`` is the node itself or one of its ancestors."""
        bits = [1]
        for i, parent in enumerate(self.parents[1:], 1):
            bits.append(bits[parent] | 1 << i)
        return tuple(bits)

    @cached_property
    def children(self) -> Sequence[Mapping[int, int]]:
        """Per node: child token → child index."""
        children: list[dict[int, int]] = [_LEAF] * len(self)
        for i, (parent, token) in enumerate(zip(self.parents[1:], self.tokens[1:], strict=True), 1):
            if children[parent] is _LEAF:
                children[parent] = {}
            children[parent][token] = i
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
        index[-1] = -1
        tokens, parents, values = self.tokens, self.parents, self.values
        try:
            return DraftTree(
                tuple([tokens[i] for i in kept]),
                tuple([index[parents[i]] for i in kept]),
                tuple([values[i] for i in kept]),
            )
        except KeyError:
            raise ValueError("the nodes to keep are not closed under taking the parent") from None

    def best(self, count: int, max_depth: int = MAX_NODES) -> DraftTree:
        """The ``count`` nodes of highest value no deeper than ``max_depth``: closed, as values fall along a path."""
        nodes: Sequence[int] = range(len(self))
        if len(self) > max_depth + 1:  # else it cannot be deeper
            nodes = [i for i, depth in enumerate(self.depth) if depth <= max_depth]
        if count >= len(self) == len(nodes):
            return self
        # sort is stable, in reverse too, and parents precede children, so ties keep the parent first
        return self.keep(sorted(nodes, key=self.values.__getitem__, reverse=True)[: max(count, 1)])

"""Trees grown a layer at a time, best-first: what all drafters share that run a model over their own nodes.

The most promising nodes of a layer are run in one forward, and their best children make the next (EAGLE-2: Li et al.
2024, arXiv 2406.16858, section 4). For sampled requests children are ranked by ``log q + g`` with the target's own
noise g, which makes them the likeliest to be the target's draw.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from minispec import kernels
from minispec.batch import Span
from minispec.drafters.base import BaseDrafter
from minispec.drafters.fixed_tree import Ranks, TreeShape
from minispec.kv_cache import KVCache, PagePool
from minispec.prefix_cache import Node
from minispec.request import Request
from minispec.sampling import Noise, SamplingBatch
from minispec.scheduler import Slot
from minispec.tree import MAX_NODES, DraftTree

logger = logging.getLogger(__name__)


@dataclass
class Growth:
    """A tree while it grows.

    Attributes:
        tokens, parents, values, depths: as in DraftTree, by node.
        frontier: the nodes of the last layer that are run next.
        keys: node → index of its key past the text in the drafter's cache; nodes that were not run have none, nor has
            the root, which is text.
        bits: node → the keys it sees, itself included.
        rows: node of the last frontier run → its row among that forward's samples.
        ranks: where trees have a given shape: per node, its rank among its siblings and the ranks on the way to it.
        least: what a node must be worth to be proposed at all, and to be among the best ``max_nodes`` so far.
    """

    slot: Slot
    max_nodes: int
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    values: list[float] = field(default_factory=lambda: [0.0])
    depths: list[int] = field(default_factory=lambda: [0])
    frontier: list[int] = field(default_factory=lambda: [0])
    keys: dict[int, int] = field(default_factory=dict)
    bits: dict[int, int] = field(default_factory=lambda: {0: 0})
    rows: dict[int, int] = field(default_factory=dict)
    ranks: list[Ranks] = field(default_factory=lambda: [()])
    least: float = -sys.float_info.max

    def promise(self, least: float) -> float:
        """How likely a walk comes to the frontier, by the drafter's own reckoning, as far as that is beyond ``least``
        for a node: no further layer gains more. Nodes that do not come up to it leave the frontier."""
        chances = [(node, math.exp(self.values[node]) - least) for node in self.frontier]
        self.frontier = [node for node, chance in chances if chance > 0]
        return sum(chance for _, chance in chances if chance > 0)

    def span(self, pages: Sequence[int], num_cached: int) -> Span:
        """The frontier as rows behind the nodes run before; all are sampled.

        Args:
            pages, num_cached: of the drafter's cache; the root is its last cached row.
        """
        first = len(self.keys)
        for key, node in enumerate(self.frontier, first):
            self.keys[node] = key
            self.bits[node] = self.bits[self.parents[node]] | 1 << key
        return Span(
            [self.tokens[node] for node in self.frontier],
            pages,
            num_cached,
            [self.depths[node] - 1 for node in self.frontier],
            [self.bits[node] for node in self.frontier],
            range(len(self.frontier)),
            first_key=first,
        )

    def add(self, node: int, children: Children, shape: TreeShape | None) -> None:
        """Add a node's children: those that are worth enough, of those that ``shape`` has."""
        if shape is not None:
            paths = [(*self.ranks[node], rank) for rank in range(len(children))]
            kept = [rank for rank, path in enumerate(paths) if path in shape.paths]
            self.ranks += [paths[rank] for rank in kept]
            children = [children[rank] for rank in kept]
        value, least, first = self.values[node], self.least, len(self.tokens)
        for token, own in children:
            if (worth := value + own) < least and len(self.tokens) > 1:
                break
            self.tokens.append(token)
            self.values.append(worth)
        count = len(self.tokens) - first
        self.parents += [node] * count
        self.depths += [self.depths[node] + 1] * count

    def tree(self) -> DraftTree:
        """The best ``max_nodes`` nodes: closed under taking the parent, as values fall along a path."""
        tokens, parents, values = self.tokens, self.parents, self.values
        if len(tokens) <= self.max_nodes:
            return DraftTree(tuple(tokens), tuple(parents), tuple(values))
        # the sort is stable, in reverse too, and parents precede children, so ties keep the parent first
        kept = sorted(sorted(range(len(tokens)), key=values.__getitem__, reverse=True)[: self.max_nodes])
        index = {node: i for i, node in enumerate(kept)}
        index[-1] = -1
        return DraftTree(
            tuple([tokens[node] for node in kept]),
            tuple([index[parents[node]] for node in kept]),
            tuple([values[node] for node in kept]),
        )


@dataclass
class CacheState:
    """What a drafter's own cache holds of one slot.

    Attributes:
        pages: pages of the drafter's pool.
        num_cached: rows of text in its cache.
        chain: what is remembered of them (``PagePool.remember``).
    """

    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    chain: list[Node] = field(default_factory=list)


Best = tuple[list[list[int]], list[list[float]]]
"""The best tokens of some rows and what they are worth, a list for each row, best first."""

Children = Sequence[tuple[int, float]]
"""A node's children: (token, log-probability), best first."""

State = TypeVar("State", bound=CacheState)


class RankingDrafter(BaseDrafter):
    """A drafter that ranks a model's logits.

    Attributes:
        invalid: rows whose logits were not finite; they get no children.
        noise: what children are ranked with.
    """

    def __init__(self, name: str, noise: Noise, children: int, choices: int) -> None:
        """Args:
        name: as in ``--draft``.
        noise: the target's noise source, shared.
        children: children considered per node.
        choices: tokens it has logits for; no node has more children.
        """
        self.name = name
        self.invalid = 0
        self.noise = noise
        self._choices = choices
        self._children = min(children, choices)
        self._shape: TreeShape | None = None

    def follow(self, shape: TreeShape) -> None:
        """Draft trees of this shape instead of what looks best.

        Raises:
            ConfigError: the drafter cannot go as deep.
        """
        self._shape = shape
        self._children = min(shape.children, self._choices)

    def _best_children(self, logits: Tensor, sampling: SamplingBatch) -> tuple[Tensor, Tensor]:
        """(tokens, values), both [rows, children], as ``kernels.top_children`` gives them."""
        return kernels.top_children(logits, sampling, self.noise, self._children)

    def _rank(self, rows: Sequence[tuple[Request, int]], logits: Tensor) -> list[Children]:
        """(token, log-probability) of each row's children, best first; none for a row that is not finite.

        Args:
            rows: request, and position of the children.
            logits: [rows, vocab] float32.
        """
        ranked: list[Children] = []
        for tokens, values in zip(*self._children_of(rows, logits), strict=True):
            if math.isnan(values[0]):
                self._count_invalid()
                ranked.append(())
                continue
            # outside the request's top-k, top-p or min-p: the target cannot draw it
            while values and values[-1] == -math.inf:
                values.pop()
            if values and values[0] > 0.0:  # by rounding
                values = [min(value, 0.0) for value in values]
            ranked.append(list(zip(tokens, values, strict=False)))
        return ranked

    def _children_of(self, rows: Sequence[tuple[Request, int]], logits: Tensor) -> Best:
        """The best of each row; the values of a row that is not finite are NaN."""
        # what a row without numbers lets the target draw is undefined, so it is kept from the kernel
        finite = logits.amax(-1, keepdim=True).isfinite()
        sampling = SamplingBatch.build(rows, device=logits.device)
        tokens, values = self._best_children(logits.where(finite, 0.0), sampling)
        return fetched(tokens, values.where(finite, math.nan))

    def _count_invalid(self) -> None:
        if not self.invalid:
            logger.warning("the draft %s gives logits that are not finite; such rows are not drafted from", self.name)
        self.invalid += 1


class GrowingDrafter(RankingDrafter, Generic[State]):
    """Reads the text it has not cached yet, then grows a tree; as many forwards as the tree is deep, for all slots.

    Subclasses say how their model is run: ``_new_state``, ``_num_pending``, ``_read`` and ``_run``.

    Args:
        name: as in ``--draft``.
        kv, pool: the drafter's cache and its pages.
        noise: the target's noise source, shared.
        depth: layers to grow.
        width: nodes of a layer that are run to make the next.
        children: children considered per node.
        choices: tokens the model has logits for.
        chunk: most rows of text read in one step, so that a long prompt delays nobody's step by more.
    """

    def __init__(
        self,
        name: str,
        kv: KVCache,
        pool: PagePool,
        noise: Noise,
        *,
        depth: int,
        width: int,
        children: int,
        choices: int,
        chunk: int,
    ) -> None:
        super().__init__(name, noise, children, choices)
        self._kv = kv
        self._pool = pool
        self._depth = depth
        self._width = width
        self._chunk = chunk
        self._states: dict[Slot, State] = {}

    def follow(self, shape: TreeShape) -> None:
        super().follow(shape)
        self._depth, self._width = shape.depth, shape.width

    def begin(self, slot: Slot) -> None:
        self._states[slot] = self._new_state()

    def end(self, slot: Slot) -> None:
        self._pool.release(self._states.pop(slot).pages)

    def propose(self, slots: Sequence[Slot], max_nodes: Sequence[int]) -> list[DraftTree]:
        least = math.log(self.least_node) if self.least_node and self._shape is None else Growth.least
        growths = {
            slot: Growth(slot, count, [slot.request.tokens[-1]], least=least)
            for slot, count in zip(slots, max_nodes, strict=True)
            if count > 1
        }
        growing = self._catch_up(list(growths.values()))
        layers = self._depth if self.least_gain else min(self._depth, self.depth_limit)
        for depth in range(1, layers + 1):
            # a layer pays only if its nodes can be both kept and used: the tokens of a walk are one more than its depth
            growing = [g for g in growing if g.frontier and min(g.slot.request.remaining, g.max_nodes) > depth + 1]
            if not growing or depth == layers:
                break
            if self.least_gain:
                if sum([g.promise(self.least_value) for g in growing]) < self.least_gain:
                    break
                growing = [g for g in growing if g.frontier]
            self._add_children(growing, self._run(growing))
        return [growths[slot].tree() if slot in growths else DraftTree.root(slot.request.tokens[-1]) for slot in slots]

    def _share(self, state: CacheState, owner: str, text: Sequence[int], rows: int) -> None:
        """Begin with what the drafter's own prefix cache has of a text, up to ``rows`` rows of it."""
        state.chain = self._pool.match(owner, text[:rows])
        state.pages = [node.page for node in state.chain]
        state.num_cached = len(state.pages) * self._kv.page_size
        self._pool.share(state.pages)

    def _new_state(self) -> State:
        raise NotImplementedError

    def _num_pending(self, slot: Slot) -> int:
        """Rows of the slot's text that the cache lacks, its last token's included."""
        raise NotImplementedError

    def _read(self, reads: Sequence[tuple[Slot, int, bool]]) -> Tensor:
        """Run (slot, count, whether these are all): its next ``count`` pending rows, whose pages are reserved. They
        count as cached then.

        Returns:
            [slots whose text is complete, vocab] float32 logits after their last token.
        """
        raise NotImplementedError

    def _run(self, growths: Sequence[Growth]) -> Tensor:
        """Run the frontiers (``Growth.span``): [frontier nodes, vocab] float32 logits, in order."""
        raise NotImplementedError

    def _catch_up(self, growths: Sequence[Growth]) -> list[Growth]:
        """Read the text that is not cached; returns the trees ready to grow, with their first layer."""
        reads: list[tuple[Slot, int, bool]] = []
        ready = []
        room = self._chunk
        # the shortest first: those that draft already go on while a long prompt is read
        waiting = [(self._num_pending(growth.slot), i) for i, growth in enumerate(growths)]
        for pending, i in sorted(waiting):
            growth = growths[i]
            slot, state = growth.slot, self._states[growth.slot]
            if pending == 0:  # nothing to begin from: the row of the last token is not known
                continue
            count = min(pending, max(room, 1))
            # room for every node that can be run: a layer of `width` nodes per depth, of a tree that is not too large
            tree_keys = min(self._width * (self._depth - 1), MAX_NODES)
            if not self._extend(state, state.num_cached + count + tree_keys):
                continue
            reads.append((slot, count, count == pending))
            if count == pending:
                ready.append(growth)
            room -= count
            if room <= 0:
                break
        if not reads:
            return []
        logits = self._read(reads)
        self._add_children(ready, logits)
        return ready

    def _add_children(self, growths: Sequence[Growth], logits: Tensor) -> None:
        """Add the best children of every frontier node, and make the best new nodes the next frontier."""
        if not growths:
            return
        nodes = [(growth, node) for growth in growths for node in growth.frontier]
        rows = [(growth.slot.request, len(growth.slot.request.tokens) + growth.depths[node]) for growth, node in nodes]
        ranked = iter(self._rank(rows, logits))
        row = 0
        for growth in growths:
            first = len(growth.tokens)
            growth.rows = {node: row + i for i, node in enumerate(growth.frontier)}
            row += len(growth.frontier)
            for node in growth.frontier:
                growth.add(node, next(ranked), self._shape)
            layer: Sequence[int] = range(first, len(growth.tokens))
            if self._shape is not None:
                layer = [node for node in layer if growth.ranks[node] in self._shape.parents]
            elif len(growth.tokens) > growth.max_nodes:
                # what is not among the best now never will be, nor will its children: they are not worth running
                growth.least = max(growth.least, sorted(growth.values)[-growth.max_nodes])
                layer = [node for node in layer if growth.values[node] >= growth.least]
            growth.frontier = sorted(layer, key=growth.values.__getitem__, reverse=True)[: self._width]

    def _extend(self, state: CacheState, positions: int) -> bool:
        """Grow the pages to cover ``positions``; False, and nothing changes, if too few are free."""
        missing = self._kv.pages_for(positions) - len(state.pages)
        if missing > self._pool.available:
            return False
        if missing > 0:
            state.pages += self._pool.allocate(missing, state.pages[-1] + 1 if state.pages else 0)
        return True


def fetched(tokens: Tensor, values: Tensor) -> Best:
    """[rows, k] each, as lists."""
    # side by side, as each fetch waits for the device; ids are exact in float64
    rows = torch.cat([tokens.double(), values.double()], dim=-1).tolist()
    k = tokens.shape[1]
    return [list(map(int, row[:k])) for row in rows], [row[k:] for row in rows]

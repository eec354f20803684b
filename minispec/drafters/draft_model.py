"""A smaller model of the same vocabulary as drafter (Leviathan et al. 2023, arXiv 2211.17192), growing trees.

The tree is grown a layer at a time: the most promising nodes of a layer are run in one forward, and their best children
make the next (best-first by path value, as in EAGLE-2: Li et al. 2024, arXiv 2406.16858, section 4). For sampled
requests children are ranked by ``log q + g`` with the target's own noise g, which makes them the likeliest to be the
target's draw.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from minispec import kernels
from minispec.batch import Span
from minispec.drafters.base import BaseDrafter
from minispec.kv_cache import PagePool
from minispec.runner import ModelRunner
from minispec.sampling import Noise, SamplingBatch
from minispec.scheduler import Slot
from minispec.tree import DraftTree
from minispec.verify import Acceptance

logger = logging.getLogger(__name__)


@dataclass
class _State:
    """The draft's view of one slot.

    Attributes:
        pages: pages of the draft's own pool.
        num_cached: committed tokens in the draft's KV.
        run: path of draft tokens → index among the tree keys that the last proposal wrote past ``num_cached``.
    """

    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    run: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass
class _Growth:
    """A tree while it grows."""

    slot: Slot
    state: _State
    max_nodes: int
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    values: list[float] = field(default_factory=lambda: [0.0])
    depths: list[int] = field(default_factory=lambda: [0])
    keys: dict[int, int] = field(default_factory=dict)  # node → index of its key past the prefix; the root is committed
    frontier: list[int] = field(default_factory=lambda: [0])

    def path(self, node: int) -> tuple[int, ...]:
        path: list[int] = []
        while node:
            path.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(path))

    def ancestors(self, node: int) -> int:
        """Bits over the keys past the prefix that ``node`` sees, itself included."""
        bits = 0
        while node:
            bits |= 1 << self.keys[node]
            node = self.parents[node]
        return bits


class DraftModelDrafter(BaseDrafter):
    """Drafts with a model that has its own paged KV; as many forwards as the tree is deep.

    Args:
        name: as in ``--draft``.
        runner: the draft model with its cache.
        pool: pages of that cache.
        noise: the target's noise source, shared.
        depth: layers to grow.
        width: nodes of a layer that are run to make the next.
        children: children considered per node.
        chunk: most prompt tokens the draft reads in one step, so that a long prompt delays nobody's step by more.
    """

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        pool: PagePool,
        noise: Noise,
        *,
        depth: int = 4,
        width: int = 4,
        children: int = 4,
        chunk: int = 256,
    ) -> None:
        self.name = name
        self.invalid = 0
        self._runner = runner
        self._pool = pool
        self._noise = noise
        self._depth = depth
        self._width = width
        self._children = min(children, runner.vocab_size)
        self._chunk = chunk
        self._states: dict[Slot, _State] = {}

    def begin(self, slot: Slot) -> None:
        self._states[slot] = _State()

    def end(self, slot: Slot) -> None:
        self._pool.release(self._states.pop(slot).pages)

    def propose(self, slots: Sequence[Slot], max_nodes: Sequence[int]) -> list[DraftTree]:
        wanting = [
            _Growth(slot, self._states[slot], count, [slot.request.tokens[-1]])
            for slot, count in zip(slots, max_nodes, strict=True)
            if count > 1
        ]
        growing = self._catch_up(wanting)
        for depth in range(1, self._depth + 1):
            # a layer pays only if its nodes can be both kept and used: the tokens of a walk are one more than its depth
            growing = [g for g in growing if g.frontier and min(g.slot.request.remaining, g.max_nodes) > depth + 1]
            if not growing or depth == self._depth:
                break
            self._run_layer(growing)
        trees = {
            growth.slot: DraftTree(tuple(growth.tokens), tuple(growth.parents), tuple(growth.values)).best(
                growth.max_nodes
            )
            for growth in wanting
        }
        return [trees.get(slot) or DraftTree.root(slot.request.tokens[-1]) for slot in slots]

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        """Keep the KV of accepted nodes that were run; the rest of the path is read again with the next proposal."""
        state = self._states[slot]
        accepted = acceptance.tokens[:-1]
        path: list[int] = []
        while len(path) < len(accepted) and (key := state.run.get(accepted[: len(path) + 1])) is not None:
            path.append(key)
        self._runner.kv.commit([(state.pages, state.num_cached, path)])
        state.num_cached += len(path)
        state.run.clear()

    def _catch_up(self, growths: Sequence[_Growth]) -> list[_Growth]:
        """Read the tokens the draft has not cached; returns the trees ready to grow, with their first layer."""
        spans, read = [], []
        room = self._chunk
        # the shortest first: those that draft already go on while a long prompt is read
        for growth in sorted(growths, key=lambda g: len(g.slot.request.tokens) - g.state.num_cached):
            state, tokens = growth.state, growth.slot.request.tokens
            pending = tokens[state.num_cached : state.num_cached + max(room, 1)]
            # room for every node that can be run: a layer of `width` nodes per depth
            tree_keys = self._width * (self._depth - 1)
            if not self._extend(state, state.num_cached + len(pending) + tree_keys):
                continue
            state.run.clear()
            complete = state.num_cached + len(pending) == len(tokens)
            # ids that only the target knows (a longer vocabulary) are read as some other token: worse drafts, no harm
            known = [token if token < self._runner.vocab_size else 0 for token in pending]
            spans.append(Span.chunk(known, state.pages, state.num_cached, sample_last=complete))
            read.append((growth, len(pending), complete))
            room -= len(pending)
            if room <= 0:
                break
        if not spans:
            return []
        logits = self._runner.forward(spans)
        ready = []
        for growth, count, complete in read:
            growth.state.num_cached += count
            if complete:
                ready.append(growth)
        self._add_children(ready, logits)
        return ready

    def _run_layer(self, growths: Sequence[_Growth]) -> None:
        spans = []
        for growth in growths:
            state = growth.state
            first = len(growth.keys)
            for i, node in enumerate(growth.frontier):
                growth.keys[node] = first + i
                state.run[growth.path(node)] = first + i
            spans.append(
                Span(
                    [growth.tokens[node] for node in growth.frontier],
                    state.pages,
                    state.num_cached,
                    # the root is committed in the draft's cache, so the first layer lies at depth 0 past it
                    [growth.depths[node] - 1 for node in growth.frontier],
                    [growth.ancestors(node) for node in growth.frontier],
                    range(len(growth.frontier)),
                    first_key=first,
                )
            )
        self._add_children(growths, self._runner.forward(spans))

    def _add_children(self, growths: Sequence[_Growth], logits: Tensor) -> None:
        """Add the best children of every frontier node, and make the best new nodes the next frontier."""
        if not growths:
            return
        rows = [(growth, node) for growth in growths for node in growth.frontier]
        sampling = SamplingBatch.build(
            [(growth.slot.request, len(growth.slot.request.tokens) + growth.depths[node]) for growth, node in rows],
            device=logits.device,
        )
        # what a row without numbers lets the target draw is undefined, so it is kept from the kernel
        finite = logits.amax(-1, keepdim=True).isfinite()
        tokens, values = kernels.top_children(logits.where(finite, 0.0), sampling, self._noise, self._children)
        values = values.where(finite, math.nan)
        layer: dict[int, list[int]] = {id(growth): [] for growth in growths}
        for (growth, node), row_tokens, row_values in zip(rows, tokens.tolist(), values.tolist(), strict=True):
            if math.isnan(row_values[0]):
                self._count_invalid()
                continue
            for token, value in zip(row_tokens, row_values, strict=True):
                if value == -math.inf:  # outside the request's top-k, top-p or min-p: the target cannot draw it
                    break
                layer[id(growth)].append(len(growth.tokens))
                growth.tokens.append(token)
                growth.parents.append(node)
                growth.values.append(growth.values[node] + min(value, 0.0))
                growth.depths.append(growth.depths[node] + 1)
        for growth in growths:
            growth.frontier = sorted(layer[id(growth)], key=lambda n: -growth.values[n])[: self._width]

    def _extend(self, state: _State, positions: int) -> bool:
        missing = self._runner.kv.pages_for(positions) - len(state.pages)
        if missing > self._pool.free:
            return False
        if missing > 0:
            state.pages += self._pool.allocate(missing, state.pages[-1] + 1 if state.pages else 0)
        return True

    def _count_invalid(self) -> None:
        if not self.invalid:
            logger.warning("the draft %s gives logits that are not finite; such rows are not drafted from", self.name)
        self.invalid += 1

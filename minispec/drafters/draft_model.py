"""A smaller model of the same vocabulary as drafter (Leviathan et al. 2023, arXiv 2211.17192), growing trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from minispec.batch import Span
from minispec.drafters.grow import CacheState, GrowingDrafter, Growth
from minispec.kv_cache import PagePool
from minispec.runner import ModelRunner
from minispec.sampling import Noise
from minispec.scheduler import Slot
from minispec.tree import DraftTree
from minispec.verify import Acceptance


@dataclass
class DraftState(CacheState):
    """The draft's view of one slot.

    Attributes:
        run: (key of the parent, -1 for the root; token) → key of the node, for the nodes of the last proposal whose KV
            lies past ``num_cached``.
    """

    run: dict[tuple[int, int], int] = field(default_factory=dict)


class DraftModelDrafter(GrowingDrafter[DraftState]):
    """Drafts with a model that has its own paged KV; as many forwards as the tree is deep.

    Args:
        name: as in ``--draft``.
        runner: the draft model with its cache.
        pool: pages of that cache.
        noise: the target's noise source, shared.
        depth, width, children, chunk: see ``GrowingDrafter``.
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
        super().__init__(
            name,
            runner.kv,
            pool,
            noise,
            depth=depth,
            width=width,
            children=children,
            choices=runner.vocab_size,
            chunk=chunk,
        )
        self._runner = runner
        self.runners = (runner,)

    def prepare(self, slots: int) -> None:
        self._runner.prepare(slots)

    def begin(self, slot: Slot) -> None:
        super().begin(slot)
        text = self._text(slot)
        self._share(self._states[slot], slot.request.owner, text, len(text) - 1)  # the root's row begins the tree

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        """Keep the KV of accepted nodes that were run; the rest of the path is read again with the next proposal."""
        state = self._states[slot]
        path: list[int] = []
        for token in acceptance.tokens[:-1]:
            key = state.run.get((path[-1] if path else -1, token))
            if key is None:
                break
            path.append(key)
        self._kv.commit([(state.pages, state.num_cached, path)])
        state.num_cached += len(path)
        state.run.clear()
        self._remember(slot)

    def _new_state(self) -> DraftState:
        return DraftState()

    def _text(self, slot: Slot) -> Sequence[int]:
        """The slot's text in the draft's ids."""
        return slot.request.tokens

    def _span(self, growth: Growth, pages: Sequence[int], num_cached: int) -> Span:
        """The frontier's rows, in the draft's ids."""
        return growth.span(pages, num_cached)

    def _num_pending(self, slot: Slot) -> int:
        return len(self._text(slot)) - self._states[slot].num_cached

    def _read(self, reads: Sequence[tuple[Slot, int, bool]]) -> Tensor:
        spans = []
        for slot, count, complete in reads:
            state = self._states[slot]
            state.run.clear()
            pending = self._text(slot)[state.num_cached : state.num_cached + count]
            # ids that only the target knows (a longer vocabulary) are read as some other token: worse drafts, no harm
            known = [token if token < self._runner.vocab_size else 0 for token in pending]
            spans.append(Span.chunk(known, state.pages, state.num_cached, sample_last=complete))
        logits = self._runner.forward(spans)
        for slot, count, _ in reads:
            self._states[slot].num_cached += count
            self._remember(slot)
        return logits

    def _remember(self, slot: Slot) -> None:
        state = self._states[slot]
        self._pool.remember(state.chain, state.pages, slot.request.owner, self._text(slot), state.num_cached)

    def _run(self, growths: Sequence[Growth]) -> Tensor:
        spans = []
        for growth in growths:
            state = self._states[growth.slot]
            spans.append(self._span(growth, state.pages, state.num_cached))
            for node in growth.frontier:
                parent = growth.keys.get(growth.parents[node], -1)
                state.run[parent, growth.tokens[node]] = growth.keys[node]
        return self._runner.forward(spans)

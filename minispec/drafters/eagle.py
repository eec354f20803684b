"""Drafting with an EAGLE head (Li et al.: arXiv 2401.15077, 2406.16858, 2503.01840); the head itself is in eagle_head.

The head's cache holds a row per target position that has a hidden state: the row of position i was computed from the
token at i + 1. While decoding these are all positions but the root's own, so the root's row is the last, and its g
begins the tree. Rows of drafted tokens stand on the head's own guesses; what is accepted of them is computed again from
the target's hidden states, with the next proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minispec.batch import Span
from minispec.drafters.eagle_head import EagleHead
from minispec.drafters.eagle_runner import HeadRunner
from minispec.drafters.grow import Best, CacheState, GrowingDrafter, Growth
from minispec.kv_cache import PagePool
from minispec.model.llama import Tapped, features_of
from minispec.request import Request
from minispec.sampling import Noise, SamplingBatch
from minispec.scheduler import Slot
from minispec.tree import DraftTree
from minispec.verify import Acceptance

_AGAIN = 64
"""Positions that the target computes again at most, for the sake of the head, of a prefix that it has cached."""
_RAW_STEPS = 32
"""Steps whose tapped hidden states are kept as they came: several times wider than fused ones, and with them what other
slots tapped in the same step; but fused better together."""


@dataclass
class _State(CacheState):
    """The head's view of one slot. Once the text has grown, gap + num_cached + fused rows + raw rows equals the
    slot's num_cached.

    Attributes:
        gap: positions left out. Not 0 where the slot began on pages of the target that another request filled, and of
            which the head remembers less: the target's hidden states there are not known, and the head's attention
            passes over them.
        fused: ``EagleHead.fuse``'d rows that the cache lacks; [rows, hidden] each.
        raw: rows behind those, as tapped.
        tree: rows of the nodes of the tree under verification, as tapped.
    """

    gap: int = 0
    fused: list[Tensor] = field(default_factory=list)
    raw: list[Tapped] = field(default_factory=list)
    tree: Tapped | None = None


class EagleDrafter(GrowingDrafter[_State]):
    """Drafts with an EAGLE head that has its own paged KV; as many forwards of the head as the tree is deep.

    Args:
        name: as in ``--draft``.
        head: the head; ``taps`` are its.
        noise: the target's noise source, shared.
        pages, page_size: of the head's cache, one layer per decoder layer of the head.
        prefix_cache: remember what pages hold.
        depth, width, children, chunk: see ``GrowingDrafter``.
    """

    def __init__(
        self,
        name: str,
        head: EagleHead,
        noise: Noise,
        *,
        pages: int,
        page_size: int,
        prefix_cache: bool = True,
        depth: int = 6,
        width: int = 8,
        children: int = 10,
        chunk: int = 1024,  # a row takes a small part of the time of one of the target
    ) -> None:
        runner = HeadRunner(head, pages=pages, page_size=page_size)
        super().__init__(
            name,
            runner.kv,
            PagePool(pages, page_size if prefix_cache else None),
            noise,
            depth=depth,
            width=width,
            children=children,
            choices=head.vocabulary.size,
            chunk=chunk,
        )
        self.taps = head.config.taps
        self.runners = (runner,)
        self._runner = runner
        self._head = head
        # [rows, hidden]: g of the rows sampled in the last forward
        self._hidden = torch.empty(0, head.config.layer.hidden_size, dtype=head.dtype, device=head.device)

    def reusable(self, request: Request, positions: int) -> int:
        """What the head remembers too, if that is nearly all: a few positions of the target are computed again rather
        than left out."""
        if not request.may_draft(self.name):
            return positions
        own = len(self._pool.match(request.owner, request.tokens[1 : positions + 1])) * self._kv.page_size
        return own if positions - own <= _AGAIN else positions

    def begin(self, slot: Slot) -> None:
        super().begin(slot)
        state = self._states[slot]
        # a row is computed from the token behind its position
        self._share(state, slot.request.owner, slot.request.tokens[1:], slot.num_cached)
        state.gap = slot.num_cached - state.num_cached

    def observe(self, slot: Slot, tapped: Tapped) -> None:
        state = self._states[slot]
        if slot.decoding:
            state.tree = tapped
        else:
            state.fused.append(self._fused([tapped]))

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        """Keep the target's hidden states along the path; the nodes' own rows in the cache are dead."""
        state = self._states[slot]
        assert state.tree is not None, "the step was not observed"
        # a slot that is not drafted for goes on collecting
        if len(state.raw) >= _RAW_STEPS:
            state.fused.append(self._fused(state.raw))
            state.raw = []
        taps, rows = state.tree
        state.raw.append(Tapped(taps, [rows[node] for node in acceptance.path]))
        state.tree = None

    def _new_state(self) -> _State:
        return _State()

    def _num_pending(self, slot: Slot) -> int:
        state = self._states[slot]
        return slot.num_cached - state.gap - state.num_cached

    def _read(self, reads: Sequence[tuple[Slot, int, bool]]) -> Tensor:
        states = [self._states[slot] for slot, _, _ in reads]
        hidden = self._unread(states, reads)
        spans = []
        for state, (slot, count, complete) in zip(states, reads, strict=True):
            start = state.gap + state.num_cached
            tokens = slot.request.tokens[start + 1 : start + 1 + count]
            spans.append(Span.chunk(tokens, state.pages, state.num_cached, sample_last=complete))
        logits = self._forward(spans, [state.gap for state in states], hidden)
        for state, (slot, count, _) in zip(states, reads, strict=True):
            state.num_cached += count
            # the text is looked at where another page of it is full
            if not state.gap and state.num_cached // self._kv.page_size > len(state.chain):
                text = slot.request.tokens[1:]
                self._pool.remember(state.chain, state.pages, slot.request.owner, text, state.num_cached)
        return logits

    def _unread(self, states: Sequence[_State], reads: Sequence[tuple[Slot, int, bool]]) -> Tensor:
        """The rows that are to be read, [rows, hidden]; they are not pending any more."""
        if all(complete and not state.fused for state, (_, _, complete) in zip(states, reads, strict=True)):
            hidden = self._runner.fuse([part for state in states for part in state.raw])
            for state in states:
                state.raw = []
            return hidden
        parts = []
        with torch.inference_mode():
            for state, (_, count, complete) in zip(states, reads, strict=True):
                if state.raw:
                    state.fused.append(self._fused(state.raw))
                    state.raw = []
                if complete:
                    parts += state.fused
                    state.fused = []
                else:
                    pending = _joined(state.fused)
                    parts.append(pending[:count])
                    state.fused = [pending[count:]]
            return _joined(parts)

    def _fused(self, tapped: Sequence[Tapped]) -> Tensor:
        """To be kept: [rows, hidden]."""
        with torch.inference_mode():
            return self._head.fuse(features_of(tapped))

    def _run(self, growths: Sequence[Growth]) -> Tensor:
        rows = [growth.rows[growth.parents[node]] for growth in growths for node in growth.frontier]
        states = [self._states[growth.slot] for growth in growths]
        spans = [growth.span(state.pages, state.num_cached) for growth, state in zip(growths, states, strict=True)]
        return self._forward(spans, [state.gap for state in states], self._hidden, rows)

    def _forward(
        self, spans: Sequence[Span], gaps: Sequence[int], hidden: Tensor, rows: Sequence[int] | None = None
    ) -> Tensor:
        """Run rows on those of hidden, [n, hidden]; keeps g of the sampled rows and returns their logits."""
        self._hidden, logits = self._runner.forward(spans, gaps, hidden, rows)
        return logits

    def _children_of(self, rows: Sequence[tuple[Request, int]], logits: Tensor) -> Best:
        if all(request.params.greedy for request, _ in rows):
            return self._runner.best(logits, self._children)
        if (native := self.noise.native) is not None:
            sampling = SamplingBatch.build(rows)
            return native.children(logits, sampling, self.noise, self._children, self._head.vocabulary.ids)
        return super()._children_of(rows, logits)

    def _best_children(self, logits: Tensor, sampling: SamplingBatch) -> tuple[Tensor, Tensor]:
        return self._head.vocabulary.best_children(logits, sampling, self.noise, self._children)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of all of them; without a copy where there is one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

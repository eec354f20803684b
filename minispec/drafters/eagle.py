"""Drafting with an EAGLE head (Li et al.: arXiv 2401.15077, 2406.16858, 2503.01840); the head itself is in eagle_head.

The head's cache holds a row per target position that has a hidden state: the row of position i was computed from the
token at i + 1. While decoding these are all positions but the root's own, so the root's row is the last, and its g
begins the tree. Rows of drafted tokens stand on the head's own guesses; what is accepted of them is computed again from
the target's hidden states, with the next proposal.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minispec.batch import Span
from minispec.drafters.eagle_head import EagleHead
from minispec.drafters.eagle_runner import HeadRunner
from minispec.drafters.grow import Best, CacheState, GrowingDrafter, Growth
from minispec.kv_cache import PagePool
from minispec.request import Request
from minispec.sampling import Noise, SamplingBatch
from minispec.scheduler import Slot
from minispec.tree import DraftTree
from minispec.upload import tensor_of
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
    raw: list[Tensor] = field(default_factory=list)
    tree: Tensor | None = None


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
        chunk: int = 256,
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

    def observe(self, slot: Slot, features: Tensor) -> None:
        state = self._states[slot]
        if slot.decoding:
            state.tree = features
        else:
            with torch.inference_mode():
                state.fused.append(self._head.fuse(features))

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        """Keep the target's hidden states along the path; the nodes' own rows in the cache are dead."""
        state = self._states[slot]
        assert state.tree is not None, "the step was not observed"
        path, count = acceptance.path, len(acceptance.path)
        # a slot that is not drafted for goes on collecting
        if len(state.raw) >= _RAW_STEPS:
            with torch.inference_mode():
                state.fused.append(self._head.fuse(torch.cat(state.raw)))
            state.raw.clear()
        if path[-1] == count - 1:  # the first nodes, as nodes of a path rise
            state.raw.append(state.tree[:count])
        else:
            state.raw.append(state.tree.index_select(0, tensor_of(array("q", path)).to(state.tree.device)))
        state.tree = None

    def _new_state(self) -> _State:
        return _State()

    def _num_pending(self, slot: Slot) -> int:
        state = self._states[slot]
        return slot.num_cached - state.gap - state.num_cached

    @torch.inference_mode()
    def _read(self, reads: Sequence[tuple[Slot, int, bool]]) -> Tensor:
        states = [self._states[slot] for slot, _, _ in reads]
        raw = [part for state in states for part in state.raw]
        if raw:
            fused = self._head.fuse(_joined(raw))
            first = 0
            for state in states:
                if count := sum(map(len, state.raw)):
                    state.fused.append(fused[first : first + count])
                    first += count
                state.raw.clear()
        spans, hidden = [], []
        for state, (slot, count, complete) in zip(states, reads, strict=True):
            if complete:
                hidden += state.fused
                state.fused = []
            else:
                pending = _joined(state.fused)
                hidden.append(pending[:count])
                state.fused = [pending[count:]]
            start = state.gap + state.num_cached
            tokens = slot.request.tokens[start + 1 : start + 1 + count]
            spans.append(Span.chunk(tokens, state.pages, state.num_cached, sample_last=complete))
        logits = self._forward(spans, [state.gap for state in states], _joined(hidden))
        for state, (slot, count, _) in zip(states, reads, strict=True):
            state.num_cached += count
            # the text is looked at where another page of it is full
            if not state.gap and state.num_cached // self._kv.page_size > len(state.chain):
                text = slot.request.tokens[1:]
                self._pool.remember(state.chain, state.pages, slot.request.owner, text, state.num_cached)
        return logits

    @torch.inference_mode()
    def _run(self, growths: Sequence[Growth]) -> Tensor:
        rows = [growth.rows[growth.parents[node]] for growth in growths for node in growth.frontier]
        states = [self._states[growth.slot] for growth in growths]
        spans = [growth.span(state.pages, state.num_cached) for growth, state in zip(growths, states, strict=True)]
        # not by advanced indexing, which wakes torch's threads, and they spin where the compiled step wants to run
        hidden = self._hidden.index_select(0, tensor_of(array("q", rows)).to(self._hidden.device))
        return self._forward(spans, [state.gap for state in states], hidden)

    def _forward(self, spans: Sequence[Span], gaps: Sequence[int], hidden: Tensor) -> Tensor:
        """Run rows on [rows, hidden]; keeps g of the sampled rows and returns their logits."""
        self._hidden, logits = self._runner.forward(spans, gaps, hidden)
        return logits

    def _children_of(self, rows: Sequence[tuple[Request, int]], logits: Tensor) -> Best:
        if all(request.params.greedy for request, _ in rows):
            return self._runner.best(logits, self._children)
        if self.noise.native is not None:  # which has NaN, too, for the values of a row that is not finite
            tokens, values = self._best_children(logits, SamplingBatch.build(rows))
            return tokens.tolist(), values.tolist()
        return super()._children_of(rows, logits)

    def _best_children(self, logits: Tensor, sampling: SamplingBatch) -> tuple[Tensor, Tensor]:
        return self._head.vocabulary.best_children(logits, sampling, self.noise, self._children)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of all of them; without a copy where there is one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

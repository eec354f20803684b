"""Continuous batching over a fixed number of slots (Orca: Yu et al., OSDI 2022), with chunked prefill.

Decides who runs, how many rows each gets in a step, and whose pages pay when the pool runs dry: first those that are
only remembered, then those that past trees have left over, then the youngest request's. Knows pages and counts, not
tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minispec.kv_cache import PagePool
from minispec.prefix_cache import Node
from minispec.request import Request
from minispec.tree import MAX_NODES

_GROWTH = 1024
"""Tokens that a text gets room for behind it where contexts lie in consecutive pages; past them it may have to move."""


@dataclass(eq=False)
class Slot:
    """A seat of one running request.

    While decoding ``num_cached == len(request.tokens) - 1``: the last token, the root, is not cached yet.

    Attributes:
        index: which seat, ``0 <= index < max_slots``.
        num_cached: length of the committed prefix in the KV cache.
        pages: its pages in logical order; they cover at least ``num_cached`` positions. Full ones behind ``num_cached``
            may be shared with other slots.
        chain: what is remembered of its text, a node per page (``PagePool.remember``).
    """

    index: int
    request: Request
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    chain: list[Node] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        """Tokens that are not cached yet."""
        return len(self.request.tokens) - self.num_cached

    @property
    def decoding(self) -> bool:
        """Only the root is pending. The first token never waits for a draft: it comes from the prompt's last row."""
        return self.num_pending == 1 and self.request.num_output > 0


@dataclass(frozen=True)
class StepPlan:
    """Who takes part in a step.

    Attributes:
        chunks: prefilling slots with the number of pending tokens each computes.
        decoding: slots that verify a tree.
        tree_budget: most nodes, roots included, over all decoding slots; at least one each.
    """

    chunks: tuple[tuple[Slot, int], ...]
    decoding: tuple[Slot, ...]
    tree_budget: int

    @property
    def empty(self) -> bool:
        return not self.chunks and not self.decoding


def _all_of_it(request: Request, positions: int) -> int:
    return positions


class Scheduler:
    """Slots, waiting queue and page accounting.

    Args:
        pool: pages of the target's cache.
        page_size: positions per page.
        max_slots, max_step_tokens, max_tree_tokens: as the engine's.
        copy: copies the content of pages, where contexts should lie in consecutive ones (a CPU reads those in place);
            None leaves them wherever there is room.

    Attributes:
        waiting: requests without a slot, first come first served; a preempted one waits at the front.
        running: occupied slots, oldest first.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        max_slots: int,
        max_step_tokens: int,
        max_tree_tokens: int,
        copy: Callable[[Sequence[int], Sequence[int]], None] | None = None,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.max_slots = max_slots
        self.max_step_tokens = max_step_tokens
        self.max_tree_tokens = max_tree_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Slot] = []
        self._copy = copy
        self._hold = False

    def admit(self, usable: Callable[[Request, int], int] = _all_of_it) -> list[Slot]:
        """Give waiting requests free slots, with pages for all their tokens, in order of arrival.

        What the prefix cache has of a text is not computed again, but for its last token, whose row gives the next.
        After a preemption nobody is admitted until a running request ends: its pages would be taken away again.

        Args:
            usable: from a request and the length of its text's prefix that is cached, how much of it to use.
        """
        admitted = []
        self._hold &= bool(self.running)
        while self.waiting and len(self.running) < self.max_slots and not self._hold:
            slot = self._seat(self.waiting[0], usable)
            if slot is None:
                break
            self.waiting.popleft()
            self.running.append(slot)
            admitted.append(slot)
        return admitted

    def plan(self) -> StepPlan:
        """Share the step's rows: a root for every decoding slot, then trees and prefill chunks.

        Prefilling slots get equal shares, and what a short one leaves goes to the longer ones, so that a long prompt
        delays neither the running streams by more than a step nor a short newcomer.
        """
        decoding = tuple(slot for slot in self.running if slot.decoding)
        prefilling = sorted((slot for slot in self.running if not slot.decoding), key=lambda slot: slot.num_pending)
        tree_budget = max(min(self.max_tree_tokens, self.max_step_tokens), len(decoding))
        if prefilling:
            tree_budget = max(min(tree_budget, self.max_step_tokens // 2), len(decoding))
        rows = max(self.max_step_tokens - (tree_budget if decoding else 0), 1)
        chunks = []
        for i, slot in enumerate(prefilling):
            count = min(slot.num_pending, -(-rows // (len(prefilling) - i)))
            if count:
                chunks.append((slot, count))
            rows -= count
        return StepPlan(tuple(chunks), decoding, tree_budget)

    def reserve(self, plan: StepPlan) -> tuple[StepPlan, list[int], list[Slot]]:
        """Provide pages for the trees to come: preempt the youngest where a root has none, then share out what is left.

        Returns:
            The plan without the preempted slots; how many nodes each decoding slot's tree may have, at least 1; and the
            preempted slots, which have been released.
        """
        preempted: list[Slot] = []
        for slot in plan.decoding:
            while slot not in preempted and not self._extend(slot, slot.num_cached + 1):
                if self._reclaim():
                    continue
                youngest = self.running[-1]
                self._preempt(youngest)
                preempted.append(youngest)
        decoding = tuple(slot for slot in plan.decoding if slot not in preempted)
        chunks = tuple((slot, count) for slot, count in plan.chunks if slot not in preempted)
        # A tree may take the whole budget that its neighbours' roots leave; the budget decides who gets how much of it.
        share = min(plan.tree_budget - len(decoding) + 1, MAX_NODES)
        nodes = []
        for slot in decoding:
            # where the next token is the last, nothing could come after a draft
            wanted = share if slot.request.remaining > 1 else 1
            if not self._extend(slot, slot.num_cached + wanted):
                spare = len(slot.pages) * self.page_size - slot.num_cached
                wanted = min(wanted, spare + self.pool.available * self.page_size)
                self._extend(slot, slot.num_cached + wanted)
            nodes.append(wanted)
        return StepPlan(chunks, decoding, plan.tree_budget), nodes, preempted

    def remember(self, slot: Slot) -> None:
        """Note the pages that the slot's committed text has filled, for texts that begin as it does."""
        self.pool.remember(slot.chain, slot.pages, slot.request.owner, slot.request.tokens, slot.num_cached)

    def release(self, slot: Slot, *, sound: bool = True) -> None:
        """Free a slot and its pages; its request has ended.

        Args:
            sound: False if its KV may be wrong: nothing of it is remembered then.
        """
        if not sound:
            self.pool.forget(slot.chain)
        self._vacate(slot)
        self._hold = False

    def check(self) -> None:
        """Assert the invariants of slots and pages."""
        self.pool.check([slot.pages for slot in self.running])
        assert len({slot.index for slot in self.running}) == len(self.running) <= self.max_slots
        for slot in self.running:
            assert 0 <= slot.num_cached < len(slot.request.tokens)
            assert slot.num_cached <= len(slot.pages) * self.page_size
            assert len(slot.chain) * self.page_size <= slot.num_cached
            assert not slot.request.finished

    def _preempt(self, slot: Slot) -> None:
        slot.request.preemptions += 1
        self._vacate(slot)
        self.waiting.appendleft(slot.request)
        self._hold = True

    def _vacate(self, slot: Slot) -> None:
        self.running.remove(slot)
        self.pool.release(slot.pages)
        slot.pages = []

    def _seat(self, request: Request, usable: Callable[[Request, int], int]) -> Slot | None:
        """A slot with pages for all of the request's tokens; None, and nothing changes, if there are too few."""
        chain = self.pool.match(request.owner, request.tokens[:-1])
        positions = usable(request, len(chain) * self.page_size)
        if request.wants_prompt_logprobs:  # each scored token needs the row before it
            positions = min(positions, max(len(request.prompt_logprobs) - 1, 0))
        del chain[positions // self.page_size :]
        index = min(set(range(self.max_slots)) - {slot.index for slot in self.running})
        slot = Slot(index, request, len(chain) * self.page_size, [node.page for node in chain], chain)
        self.pool.share(slot.pages)
        while not self._extend(slot, len(request.tokens)):
            if not self._reclaim():
                self.pool.release(slot.pages)
                return None
        return slot

    def _extend(self, slot: Slot, positions: int) -> bool:
        """Grow the slot's pages to cover ``positions``; False, and nothing changes, if too few are free."""
        count = self._pages_for(positions)
        missing = count - len(slot.pages)
        if missing <= 0:
            return True
        if missing > self.pool.available:
            return False
        near = slot.pages[-1] + 1 if slot.pages else 0
        follow = range(near, near + missing)
        follows = slot.pages and _consecutive(slot.pages) and self.pool.is_free(follow)
        if self._copy is None or follows or not self._move(slot, count):
            slot.pages += self.pool.allocate(missing, near)
        return True

    def _move(self, slot: Slot, count: int) -> bool:
        """Put a slot's text into ``count`` consecutive pages, with room to grow if there is a place; False if not."""
        assert self._copy is not None
        claimed = [
            range(other.pages[-1] + 1, other.pages[-1] + 1 + self._room(other) - len(other.pages))
            for other in self.running
            if other is not slot
        ]
        for room in (self._room(slot), count):
            first = self.pool.place(max(room, count), claimed)
            if first is not None:
                break
        else:
            return False
        pages = self.pool.allocate_at(range(first, first + count))
        held, used = slot.pages, self._pages_for(slot.num_cached)
        if used:
            self._copy(held[:used], pages[:used])
        slot.pages = pages
        self.pool.release(held)
        self.pool.move(slot.chain, pages[: len(slot.chain)])
        return True

    def _room(self, slot: Slot) -> int:
        """The pages that a slot's text and its trees will want."""
        growth = min(slot.request.remaining, _GROWTH) + min(self.max_tree_tokens, MAX_NODES)
        return self._pages_for(len(slot.request.tokens) + growth)

    def _reclaim(self) -> bool:
        """Take back pages that earlier trees needed and the text has not reached; False if there are none."""
        available = self.pool.available
        for slot in self.running:
            needed = self._pages_for(len(slot.request.tokens))
            spare = slot.pages[needed:]
            if spare:
                del slot.pages[needed:]
                self.pool.release(spare)
        return self.pool.available > available

    def _pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)


def _consecutive(pages: Sequence[int]) -> bool:
    return all(page == pages[0] + i for i, page in enumerate(pages))

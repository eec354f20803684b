"""Continuous batching over a fixed number of slots (Orca: Yu et al., OSDI 2022), with chunked prefill.

Decides who runs, how many rows each gets in a step, and whose pages pay when the pool runs dry. Knows pages and counts,
not tensors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from minispec.kv_cache import PagePool
from minispec.request import Request
from minispec.tree import MAX_NODES


@dataclass(eq=False)
class Slot:
    """A seat of one running request.

    While decoding ``num_cached == len(request.tokens) - 1``: the last token, the root, is not cached yet.

    Attributes:
        index: which seat, ``0 <= index < max_slots``.
        num_cached: length of the committed prefix in the KV cache.
        pages: its pages in logical order; they cover at least ``num_cached`` positions.
    """

    index: int
    request: Request
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)

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


class Scheduler:
    """Slots, waiting queue and page accounting.

    Attributes:
        waiting: requests without a slot, first come first served; a preempted one waits at the front.
        running: occupied slots, oldest first.
    """

    def __init__(
        self, pool: PagePool, *, page_size: int, max_slots: int, max_step_tokens: int, max_tree_tokens: int
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.max_slots = max_slots
        self.max_step_tokens = max_step_tokens
        self.max_tree_tokens = max_tree_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Slot] = []
        self._hold = False

    def admit(self) -> list[Slot]:
        """Give waiting requests free slots, with pages for all their tokens, in order of arrival.

        After a preemption nobody is admitted until a running request ends: its pages would be taken away again.
        """
        admitted = []
        self._hold &= bool(self.running)
        while self.waiting and len(self.running) < self.max_slots and not self._hold:
            request = self.waiting[0]
            count = self._pages_for(len(request.tokens))
            if count > self.pool.free:
                break
            self.waiting.popleft()
            index = min(set(range(self.max_slots)) - {slot.index for slot in self.running})
            slot = Slot(index, request)
            # a stretch of the pool per seat keeps contexts in consecutive pages
            slot.pages = self.pool.allocate(count, near=index * (self.pool.total // self.max_slots))
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
                wanted = min(wanted, spare + self.pool.free * self.page_size)
                self._extend(slot, slot.num_cached + wanted)
            nodes.append(wanted)
        return StepPlan(chunks, decoding, plan.tree_budget), nodes, preempted

    def release(self, slot: Slot) -> None:
        """Free a slot and its pages; its request has ended."""
        self._vacate(slot)
        self._hold = False

    def check(self) -> None:
        """Assert the invariants of slots and pages."""
        self.pool.check([slot.pages for slot in self.running])
        assert len({slot.index for slot in self.running}) == len(self.running) <= self.max_slots
        for slot in self.running:
            assert 0 <= slot.num_cached < len(slot.request.tokens)
            assert slot.num_cached <= len(slot.pages) * self.page_size
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

    def _extend(self, slot: Slot, positions: int) -> bool:
        """Grow the slot's pages to cover ``positions``; False, and nothing changes, if too few are free."""
        missing = self._pages_for(positions) - len(slot.pages)
        if missing <= 0:
            return True
        if missing > self.pool.free:
            return False
        near = slot.pages[-1] + 1 if slot.pages else 0
        slot.pages += self.pool.allocate(missing, near)
        return True

    def _reclaim(self) -> bool:
        """Take back pages that earlier trees needed and the text has not reached; False if there are none."""
        free = self.pool.free
        for slot in self.running:
            needed = self._pages_for(len(slot.request.tokens))
            spare = slot.pages[needed:]
            if spare:
                del slot.pages[needed:]
                self.pool.release(spare)
        return self.pool.free > free

    def _pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

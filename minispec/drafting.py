"""The drafter and the budget of an engine, kept from harming anybody: a draft is never needed.

A proposal that fails leaves its step without drafts. Who is to blame is found by asking slot by slot; those slots are
decoded plainly from then on. A drafter that does nothing but fail is switched off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from minispec.allot import Prefill
from minispec.budget import Budget
from minispec.drafters.base import Drafter
from minispec.guide import Guided, forced_tokens, permitted
from minispec.model.llama import Tapped
from minispec.request import Request
from minispec.scheduler import Slot, StepPlan
from minispec.stats import EngineStats
from minispec.tree import DraftTree
from minispec.verify import Acceptance

logger = logging.getLogger(__name__)

MAX_FAILURES = 8
"""Proposals that fail one after the other until the drafter is switched off."""


class Drafting:
    """Drafts for an engine.

    Args:
        drafter: proposes trees.
        budget: cuts them to what pays.
        stats: where failures are counted, under ``errors["draft"]``.
        clock: seconds.
        at: told of the stage, "draft", and of the requests that are drafted for.

    Attributes:
        off: the drafter was switched off, for all requests.
    """

    def __init__(
        self,
        drafter: Drafter,
        budget: Budget,
        stats: EngineStats,
        clock: Callable[[], float],
        at: Callable[[str, Sequence[Request]], None],
    ) -> None:
        self.drafter = drafter
        self.budget = budget
        self.off = False
        self._stats = stats
        self._clock = clock
        self._at = at
        self._plain: set[Slot] = set()  # slots that are not drafted for any more; the drafter knows nothing of them
        self._failures = 0  # proposals that failed in a row
        self._guided: dict[Slot, Guided] = {}  # of the last proposal, where a grammar forces something

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden states that the drafter wants of a forward."""
        return () if self.off else self.drafter.taps

    def reusable(self, request: Request, positions: int) -> int:
        """How much of a cached prefix the drafter wants the target to skip."""
        if not self.off:
            try:
                return self.drafter.reusable(request, positions)
            except Exception as error:
                self._note(error, f"the drafter {self.drafter.name} could not look up request {request.id}")
        return positions

    def begin(self, slot: Slot) -> None:
        if self.off:
            self._plain.add(slot)
            return
        try:
            self._at("draft", [slot.request])
            self.drafter.begin(slot)
        except Exception as error:
            self._stop(slot, error)

    def end(self, slot: Slot) -> None:
        """The slot's request ended, or was preempted."""
        self.budget.end(slot)
        if slot in self._plain:
            self._plain.remove(slot)
        else:
            self._end(slot)

    def propose(self, plan: StepPlan, max_nodes: Sequence[int]) -> list[DraftTree]:
        """A tree per decoding slot, cut to the nodes that pay, and what grammars force, which always pays; without the
        drafter's part where that failed."""
        trees = {slot: DraftTree.root(slot.request.tokens[-1]) for slot in plan.decoding}
        spare = plan.tree_budget - len(trees)
        forced: dict[Slot, tuple[int, ...]] = {}
        drafting: list[tuple[Slot, int]] = []
        for slot, count in zip(plan.decoding, max_nodes, strict=True):
            count = min(count, slot.request.params.speculation.max_nodes or count)
            if tokens := forced_tokens(slot.request, min(count - 1, spare)):
                forced[slot] = tokens
                spare, count = spare - len(tokens), count - len(tokens)
            if slot not in self._plain:
                drafting.append((slot, count))
        tree_budget = spare + len(trees)
        if drafting:
            slots, counts = zip(*drafting, strict=True)
            others = len(trees) - len(slots)
            prefill = Prefill(rows=sum(count for _, count in plan.chunks) + others, slots=len(plan.chunks) + others)
            try:
                proposed = self._propose(slots, counts, tree_budget - others, prefill)
                trees.update(zip(slots, proposed, strict=True))
            except Exception as error:
                self._blame(slots, counts, tree_budget - others, prefill, error)
        self._guided = {slot: Guided.merge(trees[slot], tokens) for slot, tokens in forced.items()}
        trees.update((slot, guided.tree) for slot, guided in self._guided.items())
        return list(trees.values())

    def observe(self, slot: Slot, tapped: Tapped) -> None:
        """Hand the drafter the slot's rows of the tapped hidden states."""
        if slot not in self._plain:
            try:
                self.drafter.observe(slot, tapped)
            except Exception as error:
                self._stop(slot, error)

    def sources(self, slot: Slot, tree: DraftTree) -> Sequence[tuple[str, ...]]:
        """Who proposed each node of the tree that was verified: the last proposal, or its root."""
        guided = self._guiding(slot, tree)
        own = tree if guided is None else guided.drafted
        drafted: Sequence[tuple[str, ...]] = [()] * len(own)
        if slot not in self._plain:
            try:
                drafted = self.drafter.sources(slot, own)
            except Exception as error:
                self._stop(slot, error)
        return drafted if guided is None else guided.sources(drafted)

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        """Tell what became of the tree; the text has grown already."""
        if slot not in self._plain:
            try:
                own, reached = tree, acceptance
                if (guided := self._guiding(slot, tree)) is not None:
                    own, reached = guided.drafted, guided.drafters_part(acceptance)
                self.budget.learn(slot, own, self.drafter.sources(slot, own), reached)
                self.drafter.accept(slot, tree, acceptance)
            except Exception as error:
                self._stop(slot, error)

    def _propose(
        self, slots: Sequence[Slot], max_nodes: Sequence[int], tree_budget: int, prefill: Prefill
    ) -> list[DraftTree]:
        wanted = [
            count if any(slot.request.may_draft(member.name) for member in self.drafter.members) else 1
            for slot, count in zip(slots, max_nodes, strict=True)
        ]
        limits = self.budget.limits(self.drafter, slots, wanted, prefill)
        drafting = [(slot, count) for slot, count in zip(slots, limits, strict=True) if count > 1]
        if not drafting:
            return [DraftTree.root(slot.request.tokens[-1]) for slot in slots]
        self._at("draft", [slot.request for slot, _ in drafting])
        begin = self._clock()
        proposed = dict(
            zip((slot for slot, _ in drafting), self.drafter.propose(*zip(*drafting, strict=True)), strict=True)
        )
        deepest = max(max(tree.depth) for tree in proposed.values())
        self.budget.drafted(self.drafter, len(drafting), deepest, self._clock() - begin)
        trees = [
            # a walk of depth d emits d + 1 tokens: deeper nodes than that could never be used
            permitted(slot.request, proposed[slot].best(count, max_depth=slot.request.remaining - 1))
            if slot in proposed
            else DraftTree.root(slot.request.tokens[-1])
            for slot, count in zip(slots, limits, strict=True)
        ]
        trees = self.budget.cut(self.drafter, slots, trees, tree_budget, prefill)
        self._failures = 0
        return trees

    def _guiding(self, slot: Slot, tree: DraftTree) -> Guided | None:
        """What a grammar adds to the tree that was verified, if it does."""
        guided = self._guided.get(slot)
        return guided if guided is not None and guided.tree is tree else None

    def _blame(
        self, slots: Sequence[Slot], max_nodes: Sequence[int], tree_budget: int, prefill: Prefill, error: Exception
    ) -> None:
        """A proposal failed: find the slots that fail alone too, and draft for them no more."""
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self.off = True
            logger.error(
                "the drafter %s has failed %d times in a row and is switched off: decoding goes on without speculation",
                self.drafter.name,
                self._failures,
            )
            for slot in slots:
                self._stop(slot, error)
            return
        if len(slots) == 1:
            self._stop(slots[0], error)
            return
        failures, blamed = self._failures, False
        for slot, count in zip(slots, max_nodes, strict=True):
            try:
                self._propose([slot], [count], min(tree_budget, count), prefill)
            except Exception as own:
                self._stop(slot, own)
                blamed = True
        self._failures = failures  # what succeeds alone is no sign of health while the whole fails
        if not blamed:
            self._note(error, "drafting failed, and did not when it was tried request by request")

    def _stop(self, slot: Slot, error: Exception) -> None:
        """Draft for the slot no more; its text goes on."""
        self._note(error, f"drafting for request {slot.request.id} failed; it is decoded without speculation")
        self._plain.add(slot)
        self._end(slot)

    def _end(self, slot: Slot) -> None:
        try:
            self.drafter.end(slot)
        except Exception as error:
            self._note(error, f"the drafter {self.drafter.name} could not let go of request {slot.request.id}")

    def _note(self, error: Exception, message: str) -> None:
        self._stats.errors["draft"] += 1
        logger.warning(message, exc_info=error)

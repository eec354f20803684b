"""The Drafter protocol: whatever proposes trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from minispec.scheduler import Slot
from minispec.tree import DraftTree
from minispec.verify import Acceptance


class Drafter(Protocol):
    """Proposes trees for slots; never touches the target's KV.

    A slot's life is ``begin``, then ``propose`` and ``accept`` in turn, then ``end``. What a drafter knows of a slot
    dies with ``end``, which also comes when a request is preempted.
    """

    @property
    def name(self) -> str:
        """As in ``--draft``."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Which of the target's hidden states it reads (``minispec.model.llama.Taps.layers``); mostly none."""

    def begin(self, slot: Slot) -> None:
        """A request took the slot; its prompt is known, nothing is generated."""

    def propose(self, slots: Sequence[Slot], max_nodes: Sequence[int]) -> list[DraftTree]:
        """One tree per slot, at most ``max_nodes[i]`` nodes (root included) each; node 0 is the slot's last token."""

    def observe(self, slot: Slot, features: Tensor) -> None:
        """The tapped hidden states of the slot's rows in the step's forward, if ``taps`` asks for any.

        Comes before ``accept``: for a chunk, [tokens, taps * hidden] from ``slot.num_cached`` on; for a tree, one row
        per node.
        """

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        """What became of a proposal. ``tree`` is the part of it that was verified; the text has grown already."""

    def end(self, slot: Slot) -> None:
        """The slot's request ended, or was preempted."""


class BaseDrafter:
    """Does nothing where a drafter needs nothing done. ``propose`` gives roots: plain decoding."""

    name = "none"
    taps: tuple[int, ...] = ()

    def begin(self, slot: Slot) -> None:
        pass

    def propose(self, slots: Sequence[Slot], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.root(slot.request.tokens[-1]) for slot in slots]

    def observe(self, slot: Slot, features: Tensor) -> None:
        pass

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        pass

    def end(self, slot: Slot) -> None:
        pass


class NoDrafter(BaseDrafter):
    """Plain decoding: every tree is a root."""

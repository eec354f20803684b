"""What an AutoBudget knows of drafters and of slots: what proposals cost and came to, and when to ask again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from minispec.calibration import Outcome, Ratio
from minispec.costs import DraftCost

FIRST_PAUSE = 16
"""Steps to the first probe; each failure doubles it."""
PAUSES = (32, 512)
"""Bounds of the longest pause."""


@dataclass
class Gate:
    """Whether a member drafts for a slot, where it does not pay at present.

    Attributes:
        waited: steps since it last paid or was last probed.
        pause: steps from there to the next probe.
        failed: probes in a row that found nothing.
    """

    waited: int = 0
    pause: int = FIRST_PAUSE
    failed: int = 0

    @property
    def due(self) -> bool:
        return self.waited >= self.pause

    @property
    def dormant(self) -> bool:
        """Two probes have failed: there is no need to ask before the next."""
        return self.failed >= 2 and not self.due

    def pays(self) -> None:
        self.waited, self.pause, self.failed = 0, FIRST_PAUSE, 0

    def probed(self, found: bool, longest: int, alone: bool) -> None:
        """After a find the next step probes again, until the estimates have caught up; several slots tell enough at
        once."""
        if found and alone:
            self.failed = 0
        elif found:
            self.pays()
        else:
            self.waited, self.pause, self.failed = 0, min(2 * self.pause, longest), self.failed + 1


@dataclass
class Part:
    """A member's part of a tree that is verified.

    Attributes:
        asked: layers that were asked for; 0 if it was left out.
        layers: tokens expected of the nodes that nobody else proposed, and their number, by layer.
        others, beside: tokens expected of the other nodes, and their number.
    """

    name: str
    asked: int
    layers: list[tuple[float, float]]
    others: float
    beside: float


@dataclass
class SlotRecord:
    """What is known of one slot: its own correction of path values, and per member how its proposals compare with those
    for other slots, its gate, the step in which it was last asked, and its part of the tree that is being verified."""

    ratio: Ratio = field(default_factory=lambda: Ratio(0.97))
    compared: dict[str, Ratio] = field(default_factory=dict)
    pending: list[Part] = field(default_factory=list)
    gates: dict[str, Gate] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)

    def gate(self, member: str, pause: int = FIRST_PAUSE) -> Gate:
        if (gate := self.gates.get(member)) is None:
            gate = self.gates[member] = Gate(pause=pause)
        return gate

    def comparison(self, member: str) -> Ratio:
        if (compared := self.compared.get(member)) is None:
            compared = self.compared[member] = Ratio(0.9, largest=math.inf)
        return compared


@dataclass
class MemberRecord:
    """What is known of one drafter, over all slots.

    Attributes:
        outcomes: by the size of the crowd that shares a step (``DraftCost.size``): where rows are dear trees are small.
        silent: proposals in a row that held nothing.
        resting: for how many slots, together, it did not pay when it was looked at last; 0 if it did.
        free: it takes too little time to think about it.
        least: what a further layer must promise, and of which nodes (``Drafter.least_gain``, ``least_value``).
        steady: all slots that it is asked for now were drafted for in the step before.
        pause, longest_pause: where the back-off of a new slot begins, and its bound.
    """

    cost: DraftCost = field(default_factory=DraftCost)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    silent: int = 0
    resting: int = 0
    free: bool = True
    least: tuple[float, float] = (0.0, 0.0)
    steady: bool = False
    pause: int = FIRST_PAUSE
    longest_pause: int = PAUSES[0]

    def outcome(self, slots: int) -> Outcome:
        size = DraftCost.size(slots)
        if (outcome := self.outcomes.get(size)) is None:
            outcome = self.outcomes[size] = Outcome()
        return outcome

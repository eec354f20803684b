"""How many nodes a step verifies, and who drafts for it: what maximises expected tokens per second.

A step with R rows costs ``cost(R)`` seconds. A node whose walk probability is p adds p expected tokens. Over all slots
together the best nodes are taken as long as (roots + sum of p) / cost keeps its maximum (the objective of Sequoia, Chen
et al. 2024, arXiv 2402.12374, section 4, applied to the step at hand). The same rate decides, before anything is
drafted, for which slots a drafter works and how deep; depth 0 is a valid answer, and then it is not even asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minispec.calibration import Calibration, Ratio, Source, Survival
from minispec.costs import DraftCost, RunningCost, StepCost
from minispec.drafters.base import Drafter
from minispec.scheduler import Slot
from minispec.tree import MAX_NODES, DraftTree
from minispec.verify import Acceptance

FREE = 0.02
"""A drafter that takes less than this share of a step is asked without asking whether it pays."""
_WORTHLESS = math.log(0.01)  # what is reached less often is not verified, however cheap a row is
_MARGIN = 1.03  # what a drafter must promise to begin, or cost to stop: estimates near the break-even would flicker
_FIRST_PAUSE = 16  # steps to the first probe; each failure doubles it
_PAUSES = (32, 512)  # bounds of the longest pause; between them probing takes _PROBING of the time
_PROBING = 0.01
_PROBE_NODES = 4
_PROBE_DEPTH = 2
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # that are weighed, beside the deepest
_RECKONING = 1e-4
"""Seconds that a slot with a tree costs in Python, beside drafting and forward: cutting, learning, keeping books."""
_SLOW = 0.05  # rate of the averages below
_LONG_MEMORY = 0.99  # of what is known over all slots, per verification: it is where a new slot begins
_LEAST_HIT = 0.3  # of what is reached, what another layer is reckoned to gain at least
_MUTE = 0.02  # coverage of a drafter that was asked 76 times and never proposed anything


@dataclass(frozen=True)
class Prefill:
    """What else is in a step: prompts that are read.

    Attributes:
        rows: prompt tokens computed.
        tokens: what they are worth in the reckoning; a slot counts as one, as it does while decoding.
    """

    rows: int = 0
    tokens: int = 0


class Budget(Protocol):
    """Decides what is drafted and verified; the text is the same whatever it decides."""

    @property
    def step_cost(self) -> StepCost | None:
        """What a step is reckoned to cost at present, if that matters."""

    def limits(self, drafter: Drafter, slots: Sequence[Slot], wanted: Sequence[int], prefill: Prefill) -> list[int]:
        """Most nodes to draft for each decoding slot; 1 is none. Sets how deep the drafter and its members go."""

    def cut(
        self, drafter: Drafter, slots: Sequence[Slot], trees: Sequence[DraftTree], nodes: int, prefill: Prefill
    ) -> list[DraftTree]:
        """Cut proposals to what is verified: at most ``nodes``, roots included, over all slots."""

    def learn(self, slot: Slot, tree: DraftTree, sources: Sequence[Source], acceptance: Acceptance) -> None:
        """What became of a slot's tree, if the request goes on."""

    def drafted(self, drafter: Drafter, slots: int, depth: int, seconds: float) -> None:
        """A proposal for ``slots`` slots, at most ``depth`` layers deep, took ``seconds``."""

    def observe(self, rows: int, slots: int, seconds: float) -> None:
        """A step without prefill chunks took ``seconds``, forward and sampling."""

    def end(self, slot: Slot) -> None:
        """The slot's request ended, or was preempted."""


class FixedBudget:
    """Uses the whole budget, whatever comes of it (``--tree-budget N``)."""

    step_cost: StepCost | None = None

    def limits(self, drafter: Drafter, slots: Sequence[Slot], wanted: Sequence[int], prefill: Prefill) -> list[int]:
        return list(wanted)

    def cut(
        self, drafter: Drafter, slots: Sequence[Slot], trees: Sequence[DraftTree], nodes: int, prefill: Prefill
    ) -> list[DraftTree]:
        return allot(trees, nodes, None)

    def learn(self, slot: Slot, tree: DraftTree, sources: Sequence[Source], acceptance: Acceptance) -> None:
        pass

    def drafted(self, drafter: Drafter, slots: int, depth: int, seconds: float) -> None:
        pass

    def observe(self, rows: int, slots: int, seconds: float) -> None:
        pass

    def end(self, slot: Slot) -> None:
        pass


@dataclass
class _Gate:
    """Whether a member drafts for a slot, where it does not pay at present.

    Attributes:
        waited: steps since it last paid or was last probed.
        pause: steps from there to the next probe.
        failed: probes in a row that found nothing.
    """

    waited: int = 0
    pause: int = _FIRST_PAUSE
    failed: int = 0

    @property
    def due(self) -> bool:
        return self.waited >= self.pause

    @property
    def dormant(self) -> bool:
        """Two probes have failed: there is no need to ask before the next."""
        return self.failed >= 2 and not self.due

    def pays(self) -> None:
        self.waited, self.pause, self.failed = 0, _FIRST_PAUSE, 0

    def probed(self, found: bool, longest: int) -> None:
        """After a find the next step probes again, until the estimates have caught up."""
        if found:
            self.failed = 0
        else:
            self.waited, self.pause, self.failed = 0, min(2 * self.pause, longest), self.failed + 1


@dataclass
class _SlotRecord:
    """What is known of one slot: its own correction of path values, and per member its survival, its gate, and the
    step in which it was last asked."""

    ratio: Ratio = field(default_factory=lambda: Ratio(0.97))
    survival: dict[str, Survival] = field(default_factory=dict)
    gates: dict[str, _Gate] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)

    def gate(self, member: str, pause: int = _FIRST_PAUSE) -> _Gate:
        return self.gates.setdefault(member, _Gate(pause=pause))


@dataclass
class _MemberRecord:
    """What is known of one drafter, over all slots.

    Attributes:
        layers: deepest proposal so far.
        width: nodes verified per layer of depth, as far as walks reach it.
        coverage: share of the proposals it was asked for that held anything.
        alone: share of its accepted tokens that nobody else proposed.
        others: accepted tokens per verification that it did not propose.
        beside: nodes per verification that it did not propose.
        drafting: it drafted for some slot in the last step because that pays.
        free: it takes too little time to think about it.
        least_gain: what a further layer must promise (``Drafter.least_gain``).
        steady: all slots that it is asked for now were drafted for in the step before.
        pause, longest_pause: where the back-off of a new slot begins, and its bound.
    """

    cost: DraftCost = field(default_factory=DraftCost)
    survival: Survival = field(default_factory=lambda: Survival(_LONG_MEMORY))
    layers: int = 0
    width: float = 1.0
    coverage: float = 1.0
    alone: float = 1.0
    others: float = 0.0
    beside: float = 0.0
    drafting: bool = True
    free: bool = True
    least_gain: float = 0.0
    steady: bool = False
    pause: int = _FIRST_PAUSE
    longest_pause: int = _PAUSES[0]


class AutoBudget:
    """Follows load and luck (``--tree-budget auto``): measured costs, calibrated values, and back-off.

    A member that does not pay for a slot is left out and probed again after 16, 32, 64, … steps. Its estimates are
    kept: where it is the load that makes it not pay, it returns in the step in which the load has gone.

    Args:
        start: the target's step cost, measured at start.
    """

    def __init__(self, start: StepCost) -> None:
        self._cost = RunningCost(start)
        self._calibration = Calibration()
        self._members: dict[str, _MemberRecord] = {}
        self._slots: dict[Slot, _SlotRecord] = {}
        self._draft_seconds = 0.0  # of this step
        self._asked: set[Slot] = set()  # slots drafted for in this step
        self._step = 0

    @property
    def step_cost(self) -> StepCost | None:
        return self._cost.line

    def limits(self, drafter: Drafter, slots: Sequence[Slot], wanted: Sequence[int], prefill: Prefill) -> list[int]:
        self._draft_seconds = 0.0
        self._step += 1
        asked: set[int] = set()
        deepest = 0
        for member in drafter.members:
            able = [i for i, slot in enumerate(slots) if wanted[i] > 1 and slot.request.may_draft(member.name)]
            chosen, depth = self._choose(member.name, slots, able, prefill) if able else ([], 0)
            member.depth_limit = depth if chosen else 0
            member.least_gain = self._member(member.name).least_gain
            deepest = max(deepest, member.depth_limit)
            asked.update(chosen)
            records = [self._slot(slots[i]) for i in chosen]
            self._member(member.name).steady = all(r.asked.get(member.name) == self._step - 1 for r in records)
            for record in records:
                record.asked[member.name] = self._step
        drafter.depth_limit = deepest
        self._asked = {slots[i] for i in asked}
        return [count if i in asked else 1 for i, count in enumerate(wanted)]

    def cut(
        self, drafter: Drafter, slots: Sequence[Slot], trees: Sequence[DraftTree], nodes: int, prefill: Prefill
    ) -> list[DraftTree]:
        line = self._cost.line
        cost = line.plus(self._draft_seconds)
        sources = [drafter.sources(slot, tree) for slot, tree in zip(slots, trees, strict=True)]
        values = [
            [value if value > _WORTHLESS else -math.inf for value in self._calibration.values(tree, own, record.ratio)]
            for tree, own, record in zip(trees, sources, map(self._slot, slots), strict=True)
        ]
        kept = allot(trees, nodes, cost, prefill, values)
        probes = [
            self._judge(drafter, slot, tree, own, len(cut) > 1)
            for slot, tree, own, cut in zip(slots, trees, sources, kept, strict=True)
        ]
        if not any(probes):
            return kept
        for own_values, probe in zip(values, probes, strict=True):
            for node in probe:
                own_values[node] = 0.0
        return allot(trees, nodes, cost, prefill, values)

    def learn(self, slot: Slot, tree: DraftTree, sources: Sequence[Source], acceptance: Acceptance) -> None:
        if len(tree) == 1:
            return
        record = self._slot(slot)
        self._calibration.learn(tree, sources, acceptance, record.ratio)
        accepted = acceptance.path[1:]
        for name in {name for own in sources[1:] for name in own}:
            member, gate = self._member(name), record.gate(name)
            # a member's nodes are a tree: it proposed the parents of whatever it proposed
            nodes = [0, *(i for i in range(1, len(tree)) if name in sources[i])]
            path = tuple(nodes.index(node) for node in acceptance.path if node == 0 or name in sources[node])
            part, walk = tree.keep(nodes), Acceptance(path, acceptance.tokens[: len(path)])
            for survival in (member.survival, record.survival.setdefault(name, Survival())):
                survival.learn(part, walk)
            deep = max(part.depth)
            reached = 1.0 + member.survival.gains(deep - 1)[-1]
            member.width += _SLOW * ((len(part) - 1) / reached - member.width)
            member.others += _SLOW * (len(accepted) - len(path) + 1 - member.others)
            member.beside += _SLOW * (len(tree) - len(part) - member.beside)
            if len(path) > 1:
                alone = sum(sources[node] == (name,) for node in accepted) / (len(path) - 1)
                member.alone += _SLOW * (alone - member.alone)
            if gate.due:
                gate.probed(len(path) > 1, member.longest_pause)
                member.pause = gate.pause

    def drafted(self, drafter: Drafter, slots: int, depth: int, seconds: float) -> None:
        self._draft_seconds = seconds
        if drafter.depth_limit == 0:
            return
        members = [member for member in drafter.members if member.depth_limit > 0]
        # a union says what each of its members took; what it takes itself is the members' to bear
        rest = max(seconds - sum(member.seconds for member in members if member is not drafter), 0.0)
        for member in members:
            record = self._member(member.name)
            own, layers = rest / len(members), depth
            if member is not drafter:
                own, layers = own + member.seconds, member.grown
            record.layers = max(record.layers, layers)
            record.cost.observe(slots, layers, own, steady=record.steady)

    def observe(self, rows: int, slots: int, seconds: float) -> None:
        self._cost.observe(rows, slots, seconds)

    def end(self, slot: Slot) -> None:
        self._slots.pop(slot, None)

    def _choose(self, name: str, slots: Sequence[Slot], able: list[int], prefill: Prefill) -> tuple[list[int], int]:
        """For which of the ``able`` slots a member drafts, and how deep."""
        member = self._member(name)
        member.least_gain = 0.0
        gates = [self._slot(slots[i]).gate(name, member.pause) for i in able]
        line = self._cost.line
        rows = prefill.rows + len(slots)
        plain = line(rows)
        member.free = member.cost.dearest(len(able)) <= FREE * plain
        if not member.cost.settled or (member.layers == 0 and member.coverage > _MUTE):
            return able, _PROBE_DEPTH  # what it costs is not known yet: begin with little
        # probes: forwards of the drafter, which serve all slots, and each slot's own rows
        probe = 0.0 if member.free else member.cost(len(able), _PROBE_DEPTH)
        probe += line(rows + _PROBE_NODES * len(slots)) - plain
        member.longest_pause = int(min(max(probe / plain / _PROBING, _PAUSES[0]), _PAUSES[1]))
        if member.free:
            for gate in gates:
                if gate.dormant:
                    gate.waited += 1
            return [i for i, gate in zip(able, gates, strict=True) if not gate.dormant], MAX_NODES
        chosen, depth, rate = self._best(name, slots, able, prefill)
        member.drafting = bool(chosen)
        if chosen:
            # an average says little of the text at hand: a drafter that knows how sure it is goes by that
            layer = member.cost(len(chosen), depth + 1) - member.cost(len(chosen), depth)
            member.least_gain = rate * layer / max(member.survival.gains(1)[1], _LEAST_HIT)
        for i, gate in zip(able, gates, strict=True):
            if i in chosen:
                gate.pays()
                member.pause = _FIRST_PAUSE
            else:
                gate.waited += 1
        if any(gate.due for gate in gates):
            depth = max(depth, _PROBE_DEPTH)
            for i, gate in zip(able, gates, strict=True):
                # a forward serves many as well as one: whoever is half way to a probe comes along
                if i not in chosen and 2 * gate.waited >= gate.pause:
                    gate.waited = gate.pause
                    chosen.append(i)
        return chosen, depth

    def _best(
        self, name: str, slots: Sequence[Slot], able: list[int], prefill: Prefill
    ) -> tuple[list[int], int, float]:
        """The slots and the depth with the most tokens per second, and that rate; none if plain decoding has."""
        member, line = self._member(name), self._cost.line
        deepest = member.layers + 1  # a layer more than ever was tried, if the survival so far promises that it pays
        share = member.alone * member.coverage
        gains = [
            self._slot(slots[i]).survival.setdefault(name, Survival()).gains(deepest, member.survival) for i in able
        ]
        # what comes without this member
        tokens = len(slots) + prefill.tokens + member.others * len(able)
        rows = prefill.rows + len(slots) + member.beside * len(able)
        # slots that wait for one another gain less than the mean of them, so several do not draft on in doubt
        best = tokens / line(rows) * (1 / _MARGIN if member.drafting and len(slots) == 1 else _MARGIN)
        choice: tuple[list[int], int] = ([], 0)  # slots and depth
        for depth in (*(depth for depth in _DEPTHS if depth < deepest), deepest):
            order = sorted(range(len(able)), key=lambda n: -gains[n][depth])
            more = 0.0
            nodes = 0.0  # of a layer as many as walks come to it
            for count, n in enumerate(order, 1):
                more += share * gains[n][depth]
                nodes += member.coverage * member.width * (1.0 + gains[n][depth - 1])
                seconds = line(rows + nodes) + member.cost(count, depth) + count * _RECKONING
                if (rate := (tokens + more) / seconds) > best:
                    best, choice = rate, ([able[m] for m in order[:count]], depth)
        return *choice, best

    def _judge(
        self, drafter: Drafter, slot: Slot, tree: DraftTree, sources: Sequence[Source], any_kept: bool
    ) -> list[int]:
        """Note for each member whether its proposal was worth verifying; returns what to verify even so, as a probe."""
        if slot not in self._asked:
            return []
        record, probe = self._slot(slot), []
        for member in drafter.members:
            if member.depth_limit == 0 or not slot.request.may_draft(member.name):
                continue
            known, gate = self._member(member.name), record.gate(member.name)
            nodes = [i for i in range(1, len(tree)) if member.name in sources[i]]
            known.coverage += _SLOW * (bool(nodes) - known.coverage)
            if not nodes:
                if gate.due and not known.free:
                    if known.layers:  # nothing to say at present (a draft that still reads): ask later
                        gate.waited -= gate.pause // 4
                    else:  # nothing to say ever (a draft whose logits are not finite)
                        gate.probed(False, known.longest_pause)
                        known.pause = gate.pause
            elif any_kept:
                if known.free:
                    gate.pays()
            elif known.free and not gate.due:
                gate.waited += 1
            elif not gate.due:  # drafted in the belief that it pays, and nothing did
                for survival in (known.survival, record.survival.setdefault(member.name, Survival())):
                    survival.learn(tree, Acceptance((0,), (tree.tokens[0],)))
            if nodes and not any_kept and gate.due:
                probe += sorted(nodes, key=lambda i: -tree.values[i])[:_PROBE_NODES]
        return probe

    def _slot(self, slot: Slot) -> _SlotRecord:
        return self._slots.setdefault(slot, _SlotRecord())

    def _member(self, name: str) -> _MemberRecord:
        return self._members.setdefault(name, _MemberRecord())


def allot(
    trees: Sequence[DraftTree],
    budget: int,
    cost: StepCost | None,
    prefill: Prefill = Prefill(),
    values: Sequence[Sequence[float]] | None = None,
) -> list[DraftTree]:
    """Cut the trees, taken together, to the nodes that pay.

    Args:
        trees: one per decoding slot.
        budget: most nodes over all trees, roots included; every tree keeps its root.
        cost: measured step cost; None keeps as many nodes as the budget allows.
        prefill: what else is in the step.
        values: path values to go by, instead of the trees' own; they fall along a path too.

    Returns:
        The trees cut; each is closed under taking the parent, as values fall along a path.
    """
    if values is None:
        values = [tree.values for tree in trees]
    drafted = [(-own[i], t, i) for t, own in enumerate(values) for i in range(1, len(own))]
    drafted.sort()
    drafted = drafted[: max(budget - len(trees), 0)]
    count = len(drafted)
    if cost is not None and drafted:
        best, tokens = 0.0, float(len(trees) + prefill.tokens)
        for n in range(len(drafted) + 1):
            if n:
                tokens += math.exp(-drafted[n - 1][0])
            rate = tokens / cost(prefill.rows + len(trees) + n)
            if rate > best:
                best, count = rate, n
    kept: list[list[int]] = [[0] for _ in trees]
    for _, t, i in drafted[:count]:
        kept[t].append(i)
    return [tree if len(nodes) == len(tree) else tree.keep(nodes) for tree, nodes in zip(trees, kept, strict=True)]

"""How many nodes a step verifies, and who drafts for it: what brings its requests forward fastest.

What ``allot`` maximises decides, before anything is drafted, for which slots a drafter works, and what a layer
of a tree must promise to be grown. Nobody is a valid answer, and then the drafter is not even asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from minispec.allot import Prefill, allot, choose
from minispec.calibration import Calibration, Source
from minispec.costs import RunningCost, StepCost, TreeCost
from minispec.draft_records import FIRST_PAUSE, PAUSES, MemberRecord, Part, SlotRecord
from minispec.drafters.base import Drafter
from minispec.scheduler import Slot
from minispec.tree import MAX_NODES, DraftTree
from minispec.verify import Acceptance

FREE = 0.04
"""A drafter that takes less than this share of a step is asked without asking whether it pays."""
_WORTHLESS = math.log(0.01)  # what is reached less often is not verified, however cheap a row is
_DOUBT = 1.08  # what it may seem to cost: who drafts goes on learning what it brings, who comes back has to read up
_PROBING = 0.01
_PROBE_NODES = 4  # of one slot; several are probed together with one each
_TRUST = 0.25  # in what a tree was expected to bring, beside what it brought
_PROBE_DEPTH = 2
_FREE_ROOM = 32  # nodes of a slot in a crowd, where a drafter that is free is asked
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # that are weighed, beside the deepest
_LOOK = 4  # steps after which several slots are looked at again, where a drafter rests
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)  # of slots to draft for, beside all
_MISJUDGED = 4.0  # how much likelier than its drafter says a node may be
_LEAST_HIT = 0.5  # of what is reached, what another layer is reckoned to gain at least
_FIRST = 3  # proposals that are made before it is asked whether they pay
_MUTE = 76  # proposals in a row that held nothing: of a drafter that has nothing to say


class Budget(Protocol):
    """Decides what is drafted and verified; the text is the same whatever it decides."""

    @property
    def step_cost(self) -> StepCost | None:
        """What a step is reckoned to cost at present, if that matters."""

    def limits(self, drafter: Drafter, slots: Sequence[Slot], wanted: Sequence[int], prefill: Prefill) -> list[int]:
        """Most nodes to draft for each decoding slot; 1 is none. Tells the drafter and its members how deep to go."""

    def cut(
        self, drafter: Drafter, slots: Sequence[Slot], trees: Sequence[DraftTree], nodes: int, prefill: Prefill
    ) -> list[DraftTree]:
        """Cut proposals to what is verified: at most ``nodes``, roots included, over all slots."""

    def learn(self, slot: Slot, tree: DraftTree, sources: Sequence[Source], acceptance: Acceptance) -> None:
        """What became of a slot's tree, if the request goes on."""

    def drafted(self, drafter: Drafter, slots: int, depth: int, seconds: float) -> None:
        """A proposal for ``slots`` slots, at most ``depth`` layers deep, took ``seconds``."""

    def observe(self, rows: int, slots: int, seconds: float, rest: float) -> None:
        """A step without prefill chunks took ``seconds``, forward and sampling, and ``rest`` for all else."""

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

    def observe(self, rows: int, slots: int, seconds: float, rest: float) -> None:
        pass

    def end(self, slot: Slot) -> None:
        pass


class AutoBudget:
    """Follows load and luck (``--tree-budget auto``): measured costs, calibrated values, and back-off.

    A member that does not pay for a slot is left out and probed again after 16, 32, 64, … steps. Its estimates are
    kept: where it is the load that makes it not pay, it returns in the step in which the load has gone.

    Args:
        start: the target's step cost, measured at start.
    """

    def __init__(self, start: StepCost) -> None:
        self._cost = RunningCost(start)
        self._line = start  # what the rows of this step's slots cost, prompts apart
        self._trees = TreeCost()
        self._calibration = Calibration()
        self._members: dict[str, MemberRecord] = {}
        self._slots: dict[Slot, SlotRecord] = {}
        self._draft_seconds = 0.0  # of this step
        self._asked: set[Slot] = set()  # slots drafted for in this step
        self._step = 0
        self._crowd = 0  # slots of this step, those whose prompts are read too

    @property
    def step_cost(self) -> StepCost | None:
        return self._cost.line

    def limits(self, drafter: Drafter, slots: Sequence[Slot], wanted: Sequence[int], prefill: Prefill) -> list[int]:
        self._draft_seconds = 0.0
        self._step += 1
        self._crowd = len(slots) + prefill.slots
        asked: set[int] = set()
        deepest = 0
        # what a row costs in tokens, at least: other rows bring more than plain decoding does
        self._line = line = self._cost.line.beside(prefill.rows, prefill.slots, rows := len(slots))
        price = (rows + prefill.slots) * (line(rows + 1) / line(rows) - 1) if line(rows) > 0 else 0.0
        for member in drafter.members:
            able = [i for i, slot in enumerate(slots) if wanted[i] > 1 and slot.request.may_draft(member.name)]
            chosen, depth = self._choose(member.name, slots, able) if able else ([], 0)
            member.depth_limit = depth if chosen else 0
            member.least_gain, member.least_value = self._member(member.name).least
            member.least_node = price / _MISJUDGED
            deepest = max(deepest, member.depth_limit)
            asked.update(chosen)
            records = [self._slot(slots[i]) for i in chosen]
            self._member(member.name).steady = all(r.asked.get(member.name) == self._step - 1 for r in records)
            for record in records:
                record.asked[member.name] = self._step
        drafter.depth_limit = deepest
        self._asked = {slots[i] for i in asked}
        room = self._room(drafter)
        return [min(count, room) if i in asked else 1 for i, count in enumerate(wanted)]

    def cut(
        self, drafter: Drafter, slots: Sequence[Slot], trees: Sequence[DraftTree], nodes: int, prefill: Prefill
    ) -> list[DraftTree]:
        cost = self._cost.line.plus(self._draft_seconds)
        sources = [drafter.sources(slot, tree) for slot, tree in zip(slots, trees, strict=True)]
        values = [
            self._calibration.values(tree, own, self._slot(slot).ratio, _WORTHLESS)
            for slot, tree, own in zip(slots, trees, sources, strict=True)
        ]
        kept = choose(values, nodes, cost, prefill)
        probes = [
            self._judge(drafter, slot, tree, own, nodes) if slot in self._asked else []
            for slot, tree, own, nodes in zip(slots, trees, sources, kept, strict=True)
        ]
        if any(probes):
            wanted = [list(own) for own in values]
            for own_values, probe in zip(wanted, probes, strict=True):
                for node in probe:
                    own_values[node] = 0.0
            kept = choose(wanted, nodes, cost, prefill)
        for t, slot in enumerate(slots):
            self._note(drafter, slot, trees[t], sources[t], values[t], kept[t])
            if probes[t] and len(kept[t]) == 1:  # rows are so dear that not even a probe is verified
                self._fail(drafter, slot)
        return [tree.keep(own) if len(own) < len(tree) else tree for tree, own in zip(trees, kept, strict=True)]

    def learn(self, slot: Slot, tree: DraftTree, sources: Sequence[Source], acceptance: Acceptance) -> None:
        if len(tree) == 1:
            return
        record = self._slot(slot)
        self._calibration.learn(tree, sources, acceptance, record.ratio)
        accepted = acceptance.path[1:]
        for part in record.pending:
            # what was expected wavers less than what happened, but that is right at once when the text changes
            layers, others = [(_TRUST * tokens, count) for tokens, count in part.layers], _TRUST * part.others
            for depth, node in enumerate(accepted):
                if sources[node] == (part.name,):
                    tokens, count = layers[depth]
                    layers[depth] = tokens + 1 - _TRUST, count
                else:
                    others += 1 - _TRUST
            part.layers, part.others = layers, others
            self._account(record, part)
        record.pending = []
        for name in set().union(*sources[1:]):
            member, gate = self._member(name), record.gate(name)
            if gate.due:
                gate.probed(any(name in sources[node] for node in accepted), member.longest_pause, self._crowd == 1)
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
            record.cost.observe(slots, layers, own, steady=record.steady)

    def observe(self, rows: int, slots: int, seconds: float, rest: float) -> None:
        line, trees = self._cost.line, len(self._asked)
        further = line(rows) - line(slots)
        self._cost.observe(rows, slots, seconds, trees > 0)
        self._trees.observe(slots, trees, seconds - further + rest - self._draft_seconds)

    def end(self, slot: Slot) -> None:
        self._slots.pop(slot, None)

    def _choose(self, name: str, slots: Sequence[Slot], able: list[int]) -> tuple[list[int], int]:
        """For which of the ``able`` slots a member drafts, and how deep."""
        member = self._member(name)
        member.least = (0.0, 0.0)
        gates = [self._slot(slots[i]).gate(name, member.pause) for i in able]
        line = self._line
        plain = line(len(slots))
        member.free = member.cost.dearest(len(able)) <= FREE * plain
        if not member.cost.settled:
            return able, _PROBE_DEPTH  # what it costs is not known yet: begin with little
        # probes: forwards of the drafter, which serve all slots, and each slot's own rows
        probe = 0.0 if member.free else member.cost(len(able), _PROBE_DEPTH)
        probe += line(len(slots) + max(_PROBE_NODES, len(slots))) - plain
        member.longest_pause = int(min(max(probe / plain / _PROBING, PAUSES[0]), PAUSES[1]))
        if member.free:
            for gate in gates:
                if gate.dormant:
                    gate.waited += 1
            return [i for i, gate in zip(able, gates, strict=True) if not gate.dormant], MAX_NODES
        outcome = member.outcome(self._crowd)
        if outcome.count < _FIRST and member.silent < _MUTE:
            return able, MAX_NODES
        if (
            member.resting == self._crowd > 1
            and self._step % _LOOK
            and not any(gate.waited + 1 >= gate.pause for gate in gates)
        ):
            for gate in gates:
                gate.waited += 1
            return [], 0
        chosen, depth, rate = self._best(name, slots, able)
        member.resting = 0 if chosen else self._crowd
        # an average says little of the text at hand: a drafter that knows how sure it is goes by that
        count = max(len(chosen), 1)
        deeper = member.cost(count, depth + 1)
        layer = max(deeper - member.cost(count, depth), deeper / (depth + 1) / 2)  # depths are measured at other times
        _, nodes = outcome.totals()[depth]
        rows = len(slots) + outcome.beside * len(able) + nodes * count
        hit = max(outcome.totals()[1][0], _LEAST_HIT)
        member.least = rate * layer / hit, rate * (line(rows + 1) - line(rows)) / hit
        for i, gate in zip(able, gates, strict=True):
            if i in chosen:
                gate.pays()
                member.pause = FIRST_PAUSE
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

    def _room(self, drafter: Drafter) -> int:
        """Nodes that a slot is asked for at most: some times what has been kept of them lately. In a crowd that is a
        few each, and every node costs Python."""
        if self._crowd == 1:
            return MAX_NODES
        asked = [self._member(member.name) for member in drafter.members if member.depth_limit]
        outcomes = [member.outcome(self._crowd) for member in asked]
        room = 8 + int(4 * max((outcome.totals()[-2][1] + outcome.beside for outcome in outcomes), default=0.0))
        # no account is kept of what is free, which may go on for long
        return max(room, _FREE_ROOM) if any(member.free for member in asked) else room

    def _best(self, name: str, slots: Sequence[Slot], able: list[int]) -> tuple[list[int], int, float]:
        """The slots and the depth that bring the requests forward fastest, as ``allot`` reckons it, none if that is
        plain decoding; and the tokens per second then."""
        member, line = self._member(name), self._line
        outcome = member.outcome(self._crowd)
        totals = outcome.totals()
        # a new slot is like the others until it has had some proposals of its own
        prior = max(_FIRST * totals[-2][0], 1e-3)
        compared = sorted(((self._slot(slots[i]).comparison(name)(prior), i) for i in able), reverse=True)
        # what comes without this member
        own = 1 + outcome.others
        tokens = self._crowd + outcome.others * len(able)
        rows = len(slots) + outcome.beside * len(able)
        best, rate = -math.log(line(rows) * _DOUBT), tokens / line(rows)
        choice: tuple[list[int], int] = ([], 0)  # slots and depth
        counts = {*(count for count in _COUNTS if count < len(compared)), len(compared)}
        for depth in (*(depth for depth in _DEPTHS if depth < len(totals) - 1), len(totals) - 1):
            gain, nodes = totals[depth]
            gained = further = 0.0
            for count, (ratio, _) in enumerate(compared, 1):
                gained += math.log1p(ratio * gain / own)
                further += ratio * gain
                if count not in counts:
                    continue
                seconds = line(rows + count * nodes) + member.cost(count, depth) + count * self._trees.per_slot
                if (speed := gained / self._crowd - math.log(seconds)) > best:
                    best, rate = speed, (tokens + further) / seconds
                    choice = [i for _, i in compared[:count]], depth
        return *choice, rate

    def _note(
        self,
        drafter: Drafter,
        slot: Slot,
        tree: DraftTree,
        sources: Sequence[Source],
        values: Sequence[float],
        kept: Sequence[int],
    ) -> None:
        """Note the members' parts of a slot's tree, of which ``kept`` is verified."""
        record = self._slot(slot)
        record.pending = []
        for drafted_by in drafter.members:
            name = drafted_by.name
            member, asked = self._member(name), record.asked.get(name) == self._step
            if member.free or not slot.request.may_draft(name):
                continue
            grown = max((tree.depth[i] for i in range(1, len(tree)) if name in sources[i]), default=0)
            if grown:
                member.silent = 0
            elif asked and member.silent < _MUTE:
                member.silent += 1  # a draft that still reads, or whose logits are not finite
                continue
            part = Part(name, max(drafted_by.depth_limit, grown) if asked else 0, [], 0.0, 0.0)
            for node in kept[1:]:
                chance, depth = math.exp(values[node]), tree.depth[node]
                if sources[node] != (name,):
                    part.others, part.beside = part.others + chance, part.beside + 1
                    continue
                part.layers += [(0.0, 0.0)] * (depth - len(part.layers))
                tokens, count = part.layers[depth - 1]
                part.layers[depth - 1] = tokens + chance, count + 1
            if len(kept) > 1:
                record.pending.append(part)
            else:  # nothing comes of it
                self._account(record, part)

    def _account(self, record: SlotRecord, part: Part) -> None:
        """Take in what a member's part of a tree came to."""
        outcome = self._member(part.name).outcome(self._crowd)
        if part.asked:
            totals = outcome.totals()
            expected, _ = totals[min(part.asked, len(totals) - 2)]
            record.comparison(part.name).learn(expected, sum(tokens for tokens, _ in part.layers))
            outcome.learn(part.layers, part.asked, part.others, part.beside)
        else:
            outcome.rest(part.others, part.beside)

    def _judge(
        self, drafter: Drafter, slot: Slot, tree: DraftTree, sources: Sequence[Source], kept: Sequence[int]
    ) -> list[int]:
        """Note for each member whether its proposal was worth verifying; returns what to verify even so, as a probe."""
        record, probe = self._slot(slot), []
        for member in drafter.members:
            if record.asked.get(member.name) != self._step:
                continue
            known, gate = self._member(member.name), record.gate(member.name)
            nodes = [i for i in range(1, len(tree)) if member.name in sources[i]]
            if not nodes:
                if gate.due and not known.free:
                    if known.silent < _MUTE:  # nothing to say at present (a draft that still reads): ask later
                        gate.waited -= gate.pause // 4
                    else:  # nothing to say ever (a draft whose logits are not finite)
                        gate.probed(False, known.longest_pause, True)
                        known.pause = gate.pause
            elif known.free and len(kept) > 1:
                gate.pays()
            elif any(member.name in sources[i] for i in kept[1:]):
                pass  # what is verified will tell
            elif gate.due:
                probe += sorted(nodes, key=lambda i: -tree.values[i])[: _PROBE_NODES if self._crowd == 1 else 1]
            elif known.free:
                gate.waited += 1
        return probe

    def _fail(self, drafter: Drafter, slot: Slot) -> None:
        """End the slot's probes that are due: there was nothing to find."""
        for member in drafter.members:
            known, gate = self._member(member.name), self._slot(slot).gate(member.name)
            if self._slot(slot).asked.get(member.name) == self._step and gate.due:
                gate.probed(False, known.longest_pause, True)
                known.pause = gate.pause

    def _slot(self, slot: Slot) -> SlotRecord:
        if (record := self._slots.get(slot)) is None:
            record = self._slots[slot] = SlotRecord()
        return record

    def _member(self, name: str) -> MemberRecord:
        if (record := self._members.get(name)) is None:
            record = self._members[name] = MemberRecord()
        return record

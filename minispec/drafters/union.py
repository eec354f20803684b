"""Several drafters at once: their trees are merged, and the budget goes to those that have been right lately."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minispec.drafters.base import BaseDrafter, Drafter
from minispec.drafters.rates import Rates
from minispec.request import Request
from minispec.scheduler import Slot
from minispec.tree import MAX_NODES, DraftTree
from minispec.verify import Acceptance

_BINS = 10
_MEMORY = 0.9  # what a member's success of one step before weighs against the latest


@dataclass
class _State:
    """What is known of one slot.

    Attributes:
        rates: how often children came true, by member and by the probability that the member gave them.
        success: per member, the accepted nodes that it proposed, averaged over recent verifications.
        guesses: per node of the last proposal, by its path of tokens: (member, probability after its parent) of all
            members that proposed it.
        asked: the members that took part in it.
    """

    rates: Rates
    success: list[float]
    guesses: dict[tuple[int, ...], list[tuple[int, float]]] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)


class UnionDrafter(BaseDrafter):
    """Asks every member that the request and the budget allow, and merges the answers: the same token after the same
    path is one node.

    A member's path values are its own estimates and need not be comparable with another's. So each probability of a
    child after its parent is corrected by what came of such guesses of that member, a node counts as the likeliest that
    any member makes it, and the best nodes by these values share the budget. Members behind the best one are asked for
    fewer nodes, in proportion to their recent success; never for none, or they could not recover.

    Args:
        members: at least two, with distinct names.
    """

    def __init__(self, members: Sequence[Drafter]) -> None:
        names = [member.name for member in members]
        if len(members) < 2 or len(set(names)) < len(names):
            raise ValueError(f"a union needs two drafters or more, each once, not {names}")
        self.name = ",".join(names)
        self.taps = tuple(sorted({tap for member in members for tap in member.taps}))
        self._members = tuple(members)
        self._rates = Rates([(b + 0.5) / _BINS for b in range(_BINS)] * len(members))
        self._success = [1.0] * len(members)
        self._states: dict[Slot, _State] = {}

    @property
    def members(self) -> Sequence[Drafter]:
        return self._members

    @property
    def invalid(self) -> int:  # type: ignore[override]
        return sum(member.invalid for member in self._members)

    def reusable(self, request: Request, positions: int) -> int:
        return min(member.reusable(request, positions) for member in self._members)

    def begin(self, slot: Slot) -> None:
        self._states[slot] = _State(Rates(self._rates), list(self._success))
        for member in self._members:
            member.begin(slot)

    def end(self, slot: Slot) -> None:
        del self._states[slot]
        for member in self._members:
            member.end(slot)

    def propose(self, slots: Sequence[Slot], max_nodes: Sequence[int]) -> list[DraftTree]:
        proposals: dict[Slot, list[tuple[int, DraftTree]]] = {slot: [] for slot in slots}
        for m, member in enumerate(self._members):
            asked = [
                (slot, self._share(slot, m, count))
                for slot, count in zip(slots, max_nodes, strict=True)
                if slot.request.may_draft(member.name)
            ]
            if not asked or not member.depth_limit:
                continue
            begin = time.perf_counter()
            trees = member.propose(*zip(*asked, strict=True))
            member.seconds, member.grown = time.perf_counter() - begin, max(max(tree.depth) for tree in trees)
            for (slot, _), tree in zip(asked, trees, strict=True):
                proposals[slot].append((m, tree))
        return [self._merge(slot, proposals[slot], count) for slot, count in zip(slots, max_nodes, strict=True)]

    def sources(self, slot: Slot, tree: DraftTree) -> Sequence[tuple[str, ...]]:
        guesses = self._states[slot].guesses
        return [tuple(self._members[m].name for m, _ in guesses.get(path, ())) for path in _paths(tree)]

    def observe(self, slot: Slot, features: Tensor) -> None:
        """Hand each member the columns of the hidden states that it taps."""
        blocks = dict(zip(self.taps, features.chunk(len(self.taps), dim=-1), strict=True))
        for member in self._members:
            if member.taps:
                whole = member.taps == self.taps
                own = features if whole else torch.cat([blocks[tap] for tap in member.taps], dim=-1)
                member.observe(slot, own)

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        """Count what came of every guess at a child of an accepted node. Members see the merged tree."""
        state = self._states[slot]
        paths = _paths(tree)
        right = [0] * len(self._members)  # accepted nodes that each had proposed
        for node, token in zip(acceptance.path, acceptance.tokens, strict=True):
            for child, index in tree.children[node].items():
                for m, probability in state.guesses.get(paths[index], ()):
                    state.rates.record(self._kind(m, probability), child == token)
                    right[m] += child == token
        for m in state.asked:
            for success in (state.success, self._success):
                success[m] = _MEMORY * success[m] + (1 - _MEMORY) * right[m]
        state.asked.clear()
        for member in self._members:
            member.accept(slot, tree, acceptance)

    def _share(self, slot: Slot, m: int, count: int) -> int:
        """How many of ``count`` nodes a member is asked for."""
        success = self._states[slot].success
        return min(count, max(2, math.ceil(count * (success[m] + 0.1) / (max(success) + 0.1))))

    @staticmethod
    def _kind(m: int, probability: float) -> int:
        return m * _BINS + min(int(probability * _BINS), _BINS - 1)

    def _corrected(self, rates: Rates, m: int, probability: float) -> float:
        kind = self._kind(m, probability)
        return min(max(probability * rates[kind] * _BINS / (kind % _BINS + 0.5), 1e-6), 0.995)

    def _merge(self, slot: Slot, proposals: Sequence[tuple[int, DraftTree]], max_nodes: int) -> DraftTree:
        state = self._states[slot]
        state.asked = [m for m, _ in proposals]
        nodes: dict[tuple[int, ...], list[tuple[int, float]]] = {(): []}  # parents before their children
        for m, tree in proposals:
            for i, path in enumerate(_paths(tree)):
                if i:
                    probability = math.exp(tree.values[i] - tree.values[tree.parents[i]])
                    nodes.setdefault(path, []).append((m, probability))
        values: dict[tuple[int, ...], float] = {(): 0.0}
        for path, guesses in nodes.items():
            if path:
                likeliest = max(self._corrected(state.rates, m, p) for m, p in guesses)
                values[path] = values[path[:-1]] + math.log(likeliest)
        # the sort is stable and children are worth less than their parents, so what is kept is a tree
        kept = sorted(nodes, key=lambda path: -values[path])[: min(max_nodes, MAX_NODES)]
        state.guesses = {path: nodes[path] for path in kept}
        index = {path: i for i, path in enumerate(kept)}
        return DraftTree(
            (slot.request.tokens[-1], *(path[-1] for path in kept[1:])),
            (-1, *(index[path[:-1]] for path in kept[1:])),
            tuple(values[path] for path in kept),
        )


def _paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Per node, the tokens on the way to it, the root's left out."""
    paths: list[tuple[int, ...]] = [()]
    for i in range(1, len(tree)):
        paths.append((*paths[tree.parents[i]], tree.tokens[i]))
    return paths

"""Several drafters at once: their trees are merged, and the budget goes to those that have been right lately."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from minispec.drafters.base import BaseDrafter, Drafter
from minispec.drafters.rates import Rates
from minispec.model.llama import Tapped
from minispec.request import Request
from minispec.scheduler import Slot
from minispec.tree import MAX_NODES, DraftTree
from minispec.verify import Acceptance

_BINS = 10
_LEAST, _MOST = 1e-6, 0.995  # how likely a child may seem after its parent
_MEMORY = 0.9  # what a member's success of one step before weighs against the latest


@dataclass
class _State:
    """What is known of one slot.

    Attributes:
        rates: how often children came true, by member and by the probability that the member gave them.
        success: per member, the accepted nodes that it proposed, averaged over recent verifications.
        tree: the last proposal.
        kept: its nodes among those that were merged, before it was cut.
        nodes: of those (node, token) → child.
        guesses: per node the kinds of guess at it (``_merge``), of all members that proposed it.
        sources: per node: their names.
        asked: the members that took part in it.
    """

    rates: Rates
    success: list[float]
    tree: DraftTree | None = None
    kept: Sequence[int] = (0,)
    nodes: dict[tuple[int, int], int] = field(default_factory=dict)
    guesses: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    sources: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    asked: list[int] = field(default_factory=list)

    def find(self, tree: DraftTree) -> Sequence[int | None]:
        """Per node of a tree, the node of the last proposal; None where that had none, and below there."""
        if tree is self.tree:
            return self.kept
        found: list[int | None] = [0]
        for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
            above = found[parent]
            found.append(None if above is None else self.nodes.get((above, token)))
        return found


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
        state = self._states[slot]
        return [() if node is None else state.sources[node] for node in state.find(tree)]

    def observe(self, slot: Slot, tapped: Tapped) -> None:
        """Hand each member the layers that it taps."""
        for member in self._members:
            if member.taps == self.taps:
                member.observe(slot, tapped)
            elif member.taps:
                member.observe(slot, Tapped(tapped.taps.of(member.taps), tapped.rows))

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        """Count what came of every guess at a child of an accepted node. Members see the merged tree."""
        state = self._states[slot]
        right = [0] * len(self._members)  # accepted nodes that each had proposed
        at: int | None = 0
        for node, token in zip(acceptance.path, acceptance.tokens, strict=True):
            if at is None:
                break
            for child in tree.children[node]:
                if (own := state.nodes.get((at, child))) is not None:
                    for kind in state.guesses[own]:
                        state.rates.record(kind, child == token)
                        right[kind // _BINS] += child == token
            at = state.nodes.get((at, token))
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

    def _merge(self, slot: Slot, proposals: Sequence[tuple[int, DraftTree]], max_nodes: int) -> DraftTree:
        state = self._states[slot]
        state.asked = [m for m, _ in proposals]
        nodes: dict[tuple[int, int], int] = {}
        guesses: list[tuple[int, ...]] = [()]
        sources: list[tuple[str, ...]] = [()]
        tokens, parents, likeliest = [slot.request.tokens[-1]], [-1], [1.0]
        rates: dict[int, float] = {}  # by kind
        for m, tree in proposals:
            name, at, own = (self._members[m].name,), [0], tree.values
            for token, above, value in zip(tree.tokens[1:], tree.parents[1:], own[1:], strict=True):
                parent, probability = at[above], math.exp(value - own[above])
                # guesses of a kind: of one member, about as likely by its own account
                bin_ = int(probability * _BINS) if probability < 1 else _BINS - 1
                kind = m * _BINS + bin_
                if (rate := rates.get(kind)) is None:
                    rate = rates[kind] = state.rates[kind]
                corrected = probability * rate * _BINS / (bin_ + 0.5)
                node = nodes.get((parent, token))
                if node is None:
                    node = nodes[parent, token] = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                    likeliest.append(corrected if corrected > _LEAST else _LEAST)
                    guesses.append((kind,))
                    sources.append(name)
                else:
                    if corrected > likeliest[node]:
                        likeliest[node] = corrected
                    guesses[node] += (kind,)
                    sources[node] += name
                at.append(node)
        values = [0.0]
        for parent, chance in zip(parents[1:], likeliest[1:], strict=True):
            values.append(values[parent] + math.log(chance if chance < _MOST else _MOST))
        # the sort is stable, in reverse too, and children are worth less than their parents: what is kept is a tree
        kept = sorted(range(len(tokens)), key=values.__getitem__, reverse=True)[: min(max_nodes, MAX_NODES)]
        index = {node: i for i, node in enumerate(kept)}
        index[-1] = -1
        merged = DraftTree(
            tuple([tokens[node] for node in kept]),
            tuple([index[parents[node]] for node in kept]),
            tuple([values[node] for node in kept]),
        )
        state.nodes, state.guesses, state.sources, state.tree, state.kept = nodes, guesses, sources, merged, kept
        return merged

"""N-gram prompt lookup (Saxena 2023, "Prompt Lookup Decoding"): what followed when this text occurred before.

Every earlier occurrence of the last token is a candidate; the longer its context agrees with the end of the text, the
likelier its continuation is right. Continuations are merged into a trie and grown best-first. How likely "the longer
the likelier" is, is learned while running: per length of agreement, per request with the whole server as prior.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from minispec.drafters.base import BaseDrafter
from minispec.scheduler import Slot
from minispec.tree import DraftTree
from minispec.verify import Acceptance

MAX_AGREEMENT = 12
"""Longest agreement told apart from longer ones."""
MAX_OCCURRENCES = 64
"""Most recent occurrences of the last token that are looked at."""
MAX_DEPTH = 24
_Places = list[tuple[int, int]]  # occurrences, with the agreement of each
_WEIGHTS = [4.0**agreement for agreement in range(MAX_AGREEMENT + 1)]  # of an occurrence, by its agreement


@dataclass
class Rates:
    """Acceptance per length of agreement, with pseudo-counts."""

    hits: list[float]
    tries: list[float]

    @staticmethod
    def prior() -> Rates:
        """A rough first guess, worth few observations: 0.15 at one token of agreement, towards 0.85 for long ones."""
        guess = [0.85 - 0.7 * 0.6 ** max(n - 1, 0) for n in range(MAX_AGREEMENT + 1)]
        return Rates([4 * g for g in guess], [4.0] * len(guess))

    def rate(self, agreement: int) -> float:
        return self.hits[agreement] / self.tries[agreement]


@dataclass
class _Text:
    """What is known of one slot's text.

    Attributes:
        seen: token → positions at which it stands, ascending.
        length: how many tokens have been indexed.
        rates: this request's own acceptance.
        agreement: per node of the last proposal; the root's means nothing.
        nodes: (parent, token) → node.
    """

    seen: dict[int, list[int]] = field(default_factory=dict)
    length: int = 0
    hits: list[float] = field(default_factory=lambda: [0.0] * (MAX_AGREEMENT + 1))
    tries: list[float] = field(default_factory=lambda: [0.0] * (MAX_AGREEMENT + 1))
    agreement: list[int] = field(default_factory=list)
    nodes: dict[tuple[int, int], int] = field(default_factory=dict)


class NgramDrafter(BaseDrafter):
    """Proposes continuations found in the slot's own prompt and output. Costs no forward pass."""

    name = "ngram"

    def __init__(self) -> None:
        self._rates = Rates.prior()
        self._texts: dict[Slot, _Text] = {}

    def begin(self, slot: Slot) -> None:
        self._texts[slot] = _Text()

    def end(self, slot: Slot) -> None:
        del self._texts[slot]

    def propose(self, slots: Sequence[Slot], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._propose(slot, count) for slot, count in zip(slots, max_nodes, strict=True)]

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        """Count a trial for every verified child of an accepted node."""
        text = self._texts[slot]
        at = 0
        for node, token in zip(acceptance.path, acceptance.tokens, strict=True):
            for child in tree.children[node]:
                if (own := text.nodes.get((at, child))) is not None:
                    for counts in (text, self._rates):
                        counts.tries[text.agreement[own]] += 1
                        counts.hits[text.agreement[own]] += child == token
            if (at := text.nodes.get((at, token), 0)) == 0:
                break
        text.nodes.clear()  # the next tree may come without this drafter having been asked

    def _propose(self, slot: Slot, max_nodes: int) -> DraftTree:
        tokens, text = slot.request.tokens, self._texts[slot]
        # The last token is looked up before it is indexed: it must not find itself.
        last = len(tokens) - 1
        for position in range(text.length, last):
            text.seen.setdefault(tokens[position], []).append(position)
        text.length = last
        text.nodes.clear()
        found = text.seen.get(tokens[last], ())[-MAX_OCCURRENCES:]
        if max_nodes <= 1 or not found:
            return DraftTree.root(tokens[last])
        before = tokens[last - 1]  # mostly something else
        occurrences = [
            (position, self._agreement(tokens, position) if position and tokens[position - 1] == before else 1)
            for position in found
        ]

        tree_tokens, parents, values, depths = [tokens[last]], [-1], [0.0], [0]
        text.agreement = [0]
        # heap of children not yet in the tree: (-value, tie-break, parent, token, agreement, occurrences behind it)
        heap: list[tuple[float, int, int, int, int, _Places]] = []
        pushed = 0
        rates = [0.0] * (MAX_AGREEMENT + 1)

        def push(node: int, token: int, agreement: int, weight: float, total: float, group: _Places) -> None:
            nonlocal pushed
            # the agreement before this token was appended is what its rate is about
            rate = rates[agreement] = rates[agreement] or self._rate(text, agreement)
            value = values[node] + math.log(rate * weight / total)
            heapq.heappush(heap, (-value, pushed, node, token, agreement, group))
            pushed += 1

        def push_children(node: int, at: _Places) -> None:
            if len(at) == 1:  # mostly, a few tokens on
                [(position, agreement)] = at
                if position < last:
                    behind = [(position + 1, agreement + 1 if agreement < MAX_AGREEMENT else MAX_AGREEMENT)]
                    push(node, tokens[position + 1], agreement, 1.0, 1.0, behind)
                return
            # token → (weight, longest agreement, the occurrences that go on with it)
            groups: dict[int, tuple[float, int, _Places]] = {}
            for position, agreement in at:
                if position < last:
                    token = tokens[position + 1]
                    weight, longest, group = groups.get(token) or (0.0, 0, [])
                    group.append((position + 1, agreement + 1 if agreement < MAX_AGREEMENT else MAX_AGREEMENT))
                    longest = agreement if agreement > longest else longest
                    groups[token] = (weight + _WEIGHTS[agreement], longest, group)
            total = sum([weight for weight, _, _ in groups.values()])
            for token, (weight, longest, group) in groups.items():
                push(node, token, longest, weight, total, group)

        push_children(0, occurrences)
        # of what remains nothing is worth more than the first
        most = -math.log(self.least_node) if self.least_node else math.inf
        while heap and len(tree_tokens) < max_nodes and (heap[0][0] <= most or len(tree_tokens) == 1):
            cost, _, parent, token, agreement, group = heapq.heappop(heap)
            node = text.nodes[parent, token] = len(tree_tokens)
            tree_tokens.append(token)
            parents.append(parent)
            values.append(-cost)
            depths.append(depths[parent] + 1)
            text.agreement.append(agreement)
            if depths[node] < MAX_DEPTH:
                push_children(node, group)
        return DraftTree(tuple(tree_tokens), tuple(parents), tuple(values))

    def _rate(self, text: _Text, agreement: int) -> float:
        prior = 4.0  # observations that the server-wide rate counts for against the request's own
        rate = (text.hits[agreement] + prior * self._rates.rate(agreement)) / (text.tries[agreement] + prior)
        return min(max(rate, 1e-3), 0.995)

    @staticmethod
    def _agreement(tokens: Sequence[int], position: int) -> int:
        """How many tokens up to ``position`` equal those at the end of the text; at least 1, at most MAX_AGREEMENT."""
        last, n = len(tokens) - 1, 1
        while n < MAX_AGREEMENT and n <= position and tokens[position - n] == tokens[last - n]:
            n += 1
        return n

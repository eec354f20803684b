"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): what followed in this text and in earlier answers.

Two suffix trees are asked, one over the request's own prompt and output, one over finished outputs of the same owner.
Every end of the text that occurred before is a place in a tree; a token's share is its count there, longer contexts
weighing more. Shares become probabilities by the acceptance seen for that length of context, and the draft grows
best-first, so that it is wide where the past disagrees and long where it does not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minispec.drafters.base import BaseDrafter
from minispec.drafters.rates import Rates
from minispec.drafters.suffix_tree import Place, Reader, SharedTrees, SuffixTree
from minispec.request import FinishReason
from minispec.scheduler import Slot
from minispec.tree import DraftTree
from minispec.verify import Acceptance

MAX_CONTEXT = 12
"""Longest context that is looked for."""
CONTEXTS = 4
"""Most contexts, the longest ones, that a tree's word is taken from."""
MAX_DEPTH = 48
READ_AT_ONCE = 4096
"""Most tokens of one text indexed before a proposal, so that a long prompt holds up nobody for long."""


READ_FINISHED = 64
"""Most tokens of finished outputs indexed before a proposal; what repeats takes 40 us a token."""


class _Guess(NamedTuple):
    """Why a node was proposed: kind of rate, share among its siblings, the finished text that it stands in."""

    kind: int
    share: float
    text: Sequence[int] | None


class _Found(NamedTuple):
    """A place that agrees with the end of a path: which tree it is of (0 the request's own), length of context."""

    source: int
    length: int
    place: Place


@dataclass
class _State:
    """What is known of one slot.

    Attributes:
        tree, reader: the request's own text.
        rates: its acceptance per kind.
        guesses: per node of the last proposal, by its path of tokens.
    """

    tree: SuffixTree
    reader: Reader
    rates: Rates
    guesses: dict[tuple[int, ...], _Guess] = field(default_factory=dict)


class SuffixDrafter(BaseDrafter):
    """Proposes continuations found in the request's own text and in outputs that finished before. Costs no forward.

    Outputs are learned from where they ended by themselves, and serve requests of the same ``Request.owner`` only.

    Args:
        capacity: most tokens of finished outputs kept; a token takes about 500 bytes, and up to 4 kB where it is part
            of a passage that stands in several of them.
    """

    name = "suffix"

    def __init__(self, capacity: int = 1 << 16) -> None:
        # a first guess per source and length of context, worth few observations
        guess = [0.85 - 0.7 * 0.6 ** max(n - 1, 0) for n in range(MAX_CONTEXT + 1)]
        self._rates = Rates(guess * 2)
        self._finished = SharedTrees(capacity)
        self._states: dict[Slot, _State] = {}

    def begin(self, slot: Slot) -> None:
        tree = SuffixTree()
        self._states[slot] = _State(tree, Reader(tree, slot.request.tokens), Rates(self._rates))

    def end(self, slot: Slot) -> None:
        del self._states[slot]
        if slot.request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._finished.add(slot.request.owner, slot.request.output)

    def propose(self, slots: Sequence[Slot], max_nodes: Sequence[int]) -> list[DraftTree]:
        self._finished.read(READ_FINISHED)
        return [self._propose(slot, count) for slot, count in zip(slots, max_nodes, strict=True)]

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        """Count a trial for every verified child of an accepted node."""
        state = self._states[slot]
        for node, token in zip(acceptance.path, acceptance.tokens, strict=True):
            path = tuple(tree.tokens[i] for i in tree.path(node)[1:])
            for child in tree.children[node]:
                guess = state.guesses.get((*path, child))
                if guess is None:
                    continue
                state.rates.record(guess.kind, child == token, guess.share)
                if child == token and guess.text is not None:
                    self._finished.touch(guess.text)
        state.guesses.clear()  # the next tree may come without this drafter having been asked

    def _propose(self, slot: Slot, max_nodes: int) -> DraftTree:
        state, tokens = self._states[slot], slot.request.tokens
        state.reader.advance(min(len(tokens), state.reader.read + READ_AT_ONCE))
        state.guesses.clear()
        draft_tokens, parents, values = [tokens[-1]], [-1], [0.0]
        paths: list[tuple[int, ...]] = [()]
        # children not yet in the tree: (-value, tie-break, parent, token, guess, places behind it)
        heap: list[tuple[float, int, int, int, _Guess, list[_Found]]] = []
        pushed = 0

        def push_children(node: int, found: list[_Found]) -> None:
            nonlocal pushed
            weights: dict[int, float] = {}
            behind: dict[int, list[_Found]] = {}
            for source, length, place in found:
                for token, after in place.next():
                    weights[token] = weights.get(token, 0.0) + after.count * 4.0 ** (length - 1)
                    behind.setdefault(token, []).append(_Found(source, min(length + 1, MAX_CONTEXT + 1), after))
            total = sum(weights.values())
            for token, after_token in behind.items():
                # the length of context before this token is what its rate is about
                source, length, place = max(after_token, key=lambda f: (f.length, -f.source))
                share = weights[token] / total
                guess = _Guess(source * (MAX_CONTEXT + 1) + length - 1, share, place.text if source else None)
                value = values[node] + math.log(state.rates[guess.kind] * share)
                heapq.heappush(heap, (-value, pushed, node, token, guess, after_token))
                pushed += 1

        if max_nodes > 1:
            push_children(0, self._find(slot, tokens))
        while heap and len(draft_tokens) < max_nodes:
            cost, _, parent, token, guess, found = heapq.heappop(heap)
            draft_tokens.append(token)
            parents.append(parent)
            values.append(-cost)
            paths.append((*paths[parent], token))
            state.guesses[paths[-1]] = guess
            if len(paths[-1]) < MAX_DEPTH:
                push_children(len(draft_tokens) - 1, found)
        return DraftTree(tuple(draft_tokens), tuple(parents), tuple(values))

    def _find(self, slot: Slot, tokens: Sequence[int]) -> list[_Found]:
        """The places that agree with the end of the text, over both trees."""
        end = tokens[-MAX_CONTEXT:]
        found = []
        for source, tree in enumerate((self._states[slot].tree, self._finished.tree(slot.request.owner))):
            if tree is not None:
                found += [_Found(source, *match) for match in tree.matches(end, MAX_CONTEXT)[:CONTEXTS]]
        return found

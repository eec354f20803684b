"""Grammars and trees: what a grammar forbids is not verified, and what it forces is drafted without any drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minispec.request import Request
from minispec.tree import DraftTree
from minispec.verify import Acceptance

SOURCE = "grammar"
"""Stands among the names of drafters for nodes that a grammar forces."""


@dataclass(frozen=True)
class Guided:
    """What is verified for one slot.

    Attributes:
        drafted: the drafter's part.
        tree: the whole. It begins with ``drafted``, node by node, though nodes that are forced are valued as sure.
        chain: the nodes of ``tree`` that the grammar forces, from below the root down.
    """

    drafted: DraftTree
    tree: DraftTree
    chain: tuple[int, ...] = ()

    @staticmethod
    def merge(drafted: DraftTree, forced: Sequence[int]) -> Guided:
        """The drafter's tree joined with a chain of tokens."""
        if not forced:
            return Guided(drafted, drafted)
        tokens, parents, values = list(drafted.tokens), list(drafted.parents), list(drafted.values)
        chain, node = [], 0
        for token in forced:
            child = drafted.children[node].get(token) if node < len(drafted) else None
            if child is None:
                tokens.append(token)
                parents.append(node)
                values.append(0.0)
                child = len(tokens) - 1
            values[child] = 0.0
            chain.append(child)
            node = child
        return Guided(drafted, DraftTree(tuple(tokens), tuple(parents), tuple(values)), tuple(chain))

    def sources(self, drafters: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Who proposed each node of ``tree``, given who proposed those of ``drafted``."""
        sources = [*drafters, *[()] * (len(self.tree) - len(drafters))]
        for node in self.chain:
            sources[node] += (SOURCE,)
        return sources

    def drafters_part(self, acceptance: Acceptance) -> Acceptance:
        """The walk through ``tree`` as far as it went through ``drafted``: what the drafter may learn from."""
        path = tuple(node for node in acceptance.path if node < len(self.drafted))
        return Acceptance(path, acceptance.tokens[: len(path)])


def forced_tokens(request: Request, room: int) -> tuple[int, ...]:
    """At most ``room`` tokens that the request's grammar is sure to see next, if it lets anything be drafted."""
    if request.constraint is None or not request.params.speculation.enabled:
        return ()
    # a walk of depth d emits d + 1 tokens
    return request.constraint.forced(min(room, request.remaining - 1))


def permitted(request: Request, tree: DraftTree) -> DraftTree:
    """The tree without what the request's grammar forbids."""
    return tree if request.constraint is None else request.constraint.prune(tree)

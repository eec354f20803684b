"""Verification by match: follow the target's own samples down the tree.

The target's keyed sample after a node decides which child is accepted, so the emitted text is the target's whatever the
tree held (Daliri, Musco & Suresh 2024, arXiv 2408.07978, for the coupling by shared Gumbel noise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minispec.tree import DraftTree


@dataclass(frozen=True)
class Acceptance:
    """What one verification emits.

    Attributes:
        path: accepted node indices from the root down; always starts with 0.
        tokens: the target's token after each node of ``path``. All but the last are the tokens of the following path
            nodes; the last is the bonus token. ``len(tokens) == len(path)``.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.path) != len(self.tokens) or self.path[0] != 0:
            raise ValueError(f"path {self.path} and tokens {self.tokens} do not form an acceptance")

    def cut(self, count: int) -> Acceptance:
        """The first ``count`` tokens only (a stop came inside the run)."""
        return Acceptance(self.path[:count], self.tokens[:count])


def verify(tree: DraftTree, samples: Sequence[int]) -> Acceptance:
    """Walk from the root to the child carrying the target's token until there is none.

    Args:
        tree: the proposed tree.
        samples: the target's token after each node; ``len(samples) == len(tree)``.
    """
    if len(tree) == 1:
        return Acceptance((0,), (samples[0],))
    path = [0]
    tokens = [samples[0]]
    while (child := tree.children[path[-1]].get(tokens[-1])) is not None:
        path.append(child)
        tokens.append(samples[child])
    return Acceptance(tuple(path), tuple(tokens))

"""A tree of fixed shape, from a file: which ranks of children are drafted after which.

The form is that of Medusa's and EAGLE-1's "choices" (Cai et al. 2024, arXiv 2401.10774, section 2.3): a JSON list of
paths, each a list of child ranks from the root down. ``[[0], [0, 0], [1]]`` is the best token, the best token after it,
and the second-best token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from minispec.errors import ConfigError
from minispec.tree import MAX_NODES, DraftTree

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class TreeShape:
    """Which children are drafted, by rank, after which path of ranks.

    Attributes:
        paths: one per node behind the root; closed under taking the parent.
    """

    paths: frozenset[Ranks]

    @staticmethod
    def of(entries: Iterable[object], source: str = "tree") -> TreeShape:
        """Check a list of paths.

        Args:
            entries: as in the file.
            source: what errors call it.

        Raises:
            ConfigError: an entry is no path, comes twice, or lacks its parent; or there are too many. Names the entry.
        """
        paths: dict[Ranks, int] = {}
        for number, entry in enumerate(entries):
            if not isinstance(entry, list) or not entry or not all(type(rank) is int and rank >= 0 for rank in entry):
                raise ConfigError(f"{source}: entry {number} is {entry!r}; it must be a list of ranks, 0 for the best")
            path = tuple(entry)
            if max(path) >= MAX_NODES:
                raise ConfigError(f"{source}: entry {number} is {entry!r}; ranks go up to {MAX_NODES - 1}")
            if path in paths:
                raise ConfigError(f"{source}: entry {number} is {entry!r}, and so is entry {paths[path]}")
            paths[path] = number
        if not 1 <= len(paths) < MAX_NODES:
            raise ConfigError(f"{source}: a tree has 1 to {MAX_NODES - 1} nodes besides its root, not {len(paths)}")
        for path, number in paths.items():
            if path[:-1] and path[:-1] not in paths:
                raise ConfigError(
                    f"{source}: entry {number} is {list(path)!r}, but its parent {list(path[:-1])!r} is no entry"
                )
        return TreeShape(frozenset(paths))

    @staticmethod
    def from_file(path: Path) -> TreeShape:
        """Read a JSON list of paths.

        Raises:
            ConfigError: there is no such file, or it holds something else; see ``of``.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"the tree file {path} cannot be read: {error}") from error
        if not isinstance(data, list):
            raise ConfigError(
                f"{path} holds a {type(data).__name__}; a tree is a list of paths, like [[0], [0, 0], [1]]"
            )
        return TreeShape.of(data, str(path))

    def require_depth(self, limit: int, drafter: str) -> None:
        """Check that a drafter can go that deep.

        Raises:
            ConfigError: it cannot; names the entry that is too deep.
        """
        if self.depth > limit:
            deepest = max(self.paths, key=lambda path: (len(path), path))
            raise ConfigError(
                f"the tree has an entry {list(deepest)!r} of depth {self.depth}; {drafter} drafts {limit} deep"
            )

    @cached_property
    def depth(self) -> int:
        """Layers behind the root."""
        return max(map(len, self.paths))

    @cached_property
    def children(self) -> int:
        """Children that must be ranked: the highest rank and one."""
        return max(map(max, self.paths)) + 1

    @cached_property
    def width(self) -> int:
        """Most nodes with children in one layer behind the root."""
        parents = {path[:-1] for path in self.paths if len(path) > 1}
        return max((sum(len(path) == depth for path in parents) for depth in range(1, self.depth + 1)), default=1)

    @cached_property
    def parents(self) -> frozenset[Ranks]:
        """Paths with children, the root's empty one among them."""
        return frozenset(path[:-1] for path in self.paths)

    def over(self, root: int, layers: Sequence[Sequence[tuple[int, float]]], max_nodes: int) -> DraftTree:
        """The tree in which every node of a layer has the same ranked children (Medusa), cut to the best nodes.

        Args:
            root: its token.
            layers: (token, log-probability) of the children, per layer.
            max_nodes: root included.
        """
        index: dict[Ranks, int] = {(): 0}
        tokens, parents, values = [root], [-1], [0.0]
        for path in sorted(self.paths, key=lambda path: (len(path), path)):
            depth, rank, parent = len(path), path[-1], index.get(path[:-1])
            if parent is None or depth > len(layers) or rank >= len(layers[depth - 1]):
                continue
            index[path] = len(tokens)
            token, value = layers[depth - 1][rank]
            tokens.append(token)
            parents.append(parent)
            values.append(values[parent] + value)
        return DraftTree(tuple(tokens), tuple(parents), tuple(values)).best(max_nodes)

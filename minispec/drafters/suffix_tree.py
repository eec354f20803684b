"""A counting suffix tree of bounded depth: what followed, and how often, wherever this text occurred before.

Unary tails are not spelt out: a string that occurred once is a leaf that points into its text, and grows a level when
it occurs again. Ordinary text then takes one to three nodes per token, and a leaf of a text that still grows is always
up to date (the open ends of Ukkonen 1995, "On-line construction of suffix trees"). Beyond the depth bound a node
points into the text of its latest occurrence.

Used as in SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

MAX_DEPTH = 32
"""Longest string with a node of its own, context and continuation together."""
MAX_CHILDREN = 32
"""Most children of a node that are looked at: the latest seen."""


class Node:
    """A string that occurred.

    Attributes:
        count: how often.
        children: next token → node, the latest seen last; None where there is only the pointer.
        text, at: the latest occurrence is followed by ``text[at]``; used where there are no children.
    """

    __slots__ = ("at", "children", "count", "text")

    def __init__(self, text: Sequence[int], at: int) -> None:
        self.count = 1
        self.children: dict[int, Node] | None = None
        self.text = text
        self.at = at


class Place:
    """Where a string ends in the tree: at a node, or in a text that a pointer led to."""

    __slots__ = ("at", "count", "node", "text")

    def __init__(self, node: Node | None, text: Sequence[int], at: int, count: int) -> None:
        self.node, self.text, self.at, self.count = node, text, at, count

    @staticmethod
    def of(node: Node) -> Place:
        return Place(node if node.children is not None else None, node.text, node.at, node.count)

    def next(self) -> Iterator[tuple[int, Place]]:
        """The tokens that followed, with the places they lead to; at most ``MAX_CHILDREN``, the latest first."""
        if self.node is None:
            if self.at < len(self.text):
                yield self.text[self.at], Place(None, self.text, self.at + 1, self.count)
            return
        assert self.node.children is not None
        for token, child in islice(reversed(self.node.children.items()), MAX_CHILDREN):
            yield token, Place.of(child)

    def follow(self, token: int) -> Place | None:
        """Where ``token`` leads; None if it never followed."""
        if self.node is None:
            known = self.at < len(self.text) and self.text[self.at] == token
            return Place(None, self.text, self.at + 1, self.count) if known else None
        assert self.node.children is not None
        child = self.node.children.get(token)
        return None if child is None else Place.of(child)

    @property
    def ends(self) -> bool:
        """Nothing is known to follow."""
        return self.at >= len(self.text) if self.node is None else not self.node.children


class Reader:
    """Adds a text to a tree token by token; the text may grow between calls. O(depth) per token at worst, and O(1)
    where the text does not repeat."""

    def __init__(self, tree: SuffixTree, text: Sequence[int]) -> None:
        self.read = 0
        self._text = text
        self._root = tree.root
        self._max_depth = tree.max_depth
        # the suffixes of what has been read that occurred before, longest first, as (node, depth)
        self._open: list[tuple[Node, int]] = []

    @property
    def left(self) -> int:
        """How many tokens there are to read."""
        return len(self._text) - self.read

    def advance(self, end: int) -> None:
        """Read up to, not including, position ``end``."""
        for at in range(self.read, end):
            self._add(self._text[at], at + 1)
        self.read = max(self.read, end)

    def _add(self, token: int, at: int) -> None:
        """Append one token to every open suffix; ``at`` is the position behind it."""
        still_open = []
        for node, depth in (*self._open, (self._root, 0)):
            children = node.children
            assert children is not None
            child = children.pop(token, None)  # and back in, so that the latest seen is last
            if child is None:
                children[token] = Node(self._text, at)
                continue
            children[token] = child
            child.count += 1
            if depth + 1 == self._max_depth:
                child.text, child.at = self._text, at
                continue
            if child.children is None:
                child.children = {}
                if child.at < len(child.text):
                    child.children[child.text[child.at]] = Node(child.text, child.at + 1)
            still_open.append((child, depth + 1))
        self._open = still_open


class SuffixTree:
    """Counts of all strings up to ``max_depth`` tokens of the texts that were added."""

    def __init__(self, max_depth: int = MAX_DEPTH) -> None:
        self.max_depth = max_depth
        self.root = Node((), 0)
        self.root.children = {}

    def add(self, text: Sequence[int]) -> None:
        """Add a whole text, which must not change any more."""
        Reader(self, text).advance(len(text))

    def remove(self, text: Sequence[int]) -> None:
        """Take back a text that was added whole."""
        for start in range(len(text)):
            node = self.root
            for token in text[start : start + self.max_depth]:
                assert node.children is not None
                child = node.children[token]
                child.count -= 1
                if not child.count:
                    del node.children[token]
                    break
                node = child
                if node.children is None:
                    break

    def matches(self, text: Sequence[int], longest: int) -> list[tuple[int, Place]]:
        """The ends of ``text`` that occurred with something behind them: (length, place), longest first.

        An end that occurred no oftener than a longer one tells nothing more and is left out. O(longest ** 2) at worst.
        """
        found: list[tuple[int, Place]] = []
        for length in range(1, min(longest, len(text)) + 1):
            place: Place | None = Place.of(self.root)
            for at in range(len(text) - length, len(text)):
                assert place is not None
                place = place.follow(text[at])
                if place is None:
                    break
            if place is None or place.ends:
                break
            if found and found[-1][1].count == place.count:
                found.pop()
            found.append((length, place))
        found.reverse()
        return found


class SharedTrees:
    """Finished texts in one suffix tree per owner, bounded over all owners together; the least recently used text goes
    first. Adding a text is quick; ``read`` then takes it into the tree, as much at a time as the caller can spare.

    Args:
        capacity: most tokens kept.
    """

    def __init__(self, capacity: int) -> None:
        self.tokens = 0
        self._capacity = capacity
        self._trees: dict[str, SuffixTree] = {}
        # keyed by the identity of the text, which the entry keeps alive
        self._texts: OrderedDict[int, tuple[str, Sequence[int]]] = OrderedDict()
        self._unread: OrderedDict[int, Reader] = OrderedDict()

    def tree(self, owner: str) -> SuffixTree | None:
        """The tree of one owner's texts, if there are any."""
        return self._trees.get(owner)

    def add(self, owner: str, text: Sequence[int]) -> None:
        """Keep a finished text; of one longer than a quarter of the capacity, its end."""
        text = tuple(text[-max(self._capacity // 4, 1) :])
        if not text:
            return
        self._texts[id(text)] = owner, text
        self._unread[id(text)] = Reader(self._trees.setdefault(owner, SuffixTree()), text)
        self.tokens += len(text)
        while self.tokens > self._capacity:
            key, (old_owner, old) = self._texts.popitem(last=False)
            self.tokens -= len(old)
            tree, reader = self._trees[old_owner], self._unread.pop(key, None)
            if reader is None or reader.read:
                if reader is not None:  # half a text cannot be taken back: others may have spelt out more of it
                    reader.advance(len(old))
                tree.remove(old)
            if not tree.root.children and all(owner != old_owner for owner, _ in self._texts.values()):
                del self._trees[old_owner]

    def read(self, tokens: int) -> None:
        """Take up to ``tokens`` tokens more of the texts that were added into their trees, the oldest first."""
        while tokens > 0 and self._unread:
            key, reader = next(iter(self._unread.items()))
            count = min(tokens, reader.left)
            reader.advance(reader.read + count)
            tokens -= count
            if not reader.left:
                del self._unread[key]

    def touch(self, text: Sequence[int]) -> None:
        """A draft from this text was right."""
        if id(text) in self._texts:
            self._texts.move_to_end(id(text))

"""Which pages hold which text, so that a prompt that begins as an earlier one did need not be read again.

Full pages of committed text are remembered under a hash chained over the pages before them (as in vLLM's automatic
prefix caching; the tree it spells is SGLang's RadixAttention: Zheng et al. 2023, arXiv 2312.07104). The hash is keyed
with a secret of the process, so that nobody can look for collisions, and a find counts only if the tokens, and the page
before, are the same: a collision costs a hit and never serves another text's KV.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class Node:
    """A page whose content is remembered.

    Attributes:
        key: hash of all the text up to the page's end, and of its owner.
        parent: the page before; None for the first.
        owner: whose text it is (``Request.owner``).
        tokens: the page's own.
        page: its id.
        alive: False once it was forgotten.
    """

    key: bytes
    parent: Node | None
    owner: str
    tokens: tuple[int, ...]
    page: int
    alive: bool = True


class PrefixCache:
    """An index of pages by text; who holds the pages is the pool's business.

    Owners are kept apart: how long the first token takes would tell what others have asked.

    Args:
        page_size: tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._secret = secrets.token_bytes(32)
        self._nodes: dict[bytes, Node] = {}
        self._by_page: dict[int, Node] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def match(self, owner: str, tokens: Sequence[int]) -> list[Node]:
        """The remembered pages that the text begins with, in order; full pages only."""
        chain: list[Node] = []
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            node = self.find(chain[-1] if chain else None, owner, tokens[start : start + self.page_size])
            if node is None:
                break
            chain.append(node)
        return chain

    def find(self, parent: Node | None, owner: str, tokens: Sequence[int]) -> Node | None:
        """The node of a full page behind ``parent``, if it is remembered."""
        node = self.under_key(parent, owner, tokens)
        # a node says what its page holds only behind the very parent it was computed behind
        if node is None or node.parent is not parent or node.owner != owner or node.tokens != tuple(tokens):
            return None
        return node

    def under_key(self, parent: Node | None, owner: str, tokens: Sequence[int]) -> Node | None:
        """Whatever bears the hash of such a page: the page itself, one whose predecessor is gone, or a collision."""
        return self._nodes.get(self._key(parent, owner, tokens))

    def add(self, parent: Node | None, owner: str, tokens: Sequence[int], page: int) -> Node:
        """Remember a full page behind ``parent``; nothing may bear its hash."""
        node = Node(self._key(parent, owner, tokens), parent, owner, tuple(tokens), page)
        assert len(tokens) == self.page_size and node.key not in self._nodes and page not in self._by_page
        self._nodes[node.key] = self._by_page[page] = node
        return node

    def move(self, node: Node, page: int) -> None:
        """The node's content is in another page from now on, of which nothing is remembered."""
        assert node.alive and page not in self._by_page
        del self._by_page[node.page]
        node.page = page
        self._by_page[page] = node

    def forget(self, node: Node) -> None:
        """Remember the page no longer. Pages behind it are not found any more, and age until they are evicted."""
        node.alive = False
        del self._nodes[node.key]
        del self._by_page[node.page]

    def on(self, page: int) -> Node:
        """The node of a remembered page."""
        return self._by_page[page]

    def check(self) -> None:
        """Assert that both indices hold the same nodes, alive, each a page of its own."""
        assert {id(node) for node in self._nodes.values()} == {id(node) for node in self._by_page.values()}
        for page, node in self._by_page.items():
            assert node.alive and node.page == page and self._nodes[node.key] is node

    def _key(self, parent: Node | None, owner: str, tokens: Sequence[int]) -> bytes:
        before = parent.key if parent is not None else owner.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16, key=self._secret).digest()

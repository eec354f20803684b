"""The paged KV cache: PagePool hands out page ids, KVCache holds the tensors.

A page is a fixed-size block of KV positions (PagedAttention: Kwon et al. 2023, arXiv 2309.06180). A ``kv_index`` is a
physical position: ``page * page_size + offset``.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from minispec import kernels
from minispec.prefix_cache import Node, PrefixCache

if TYPE_CHECKING:
    from minispec.native.library import Library


class OutOfPages(Exception):
    """More pages were asked for than are free. The scheduler trims trees or preempts before this can happen."""


class PagePool:
    """Page ids and who holds them; knows nothing of tensors.

    A page is free, or owned, by one holder or by several that share it and are counted, or cached: nobody holds it, and
    its content is remembered until the room is needed. ``free + owned + cached == total``.

    Args:
        total: how many there are.
        page_size: tokens per page, to remember their content; None remembers nothing.

    Attributes:
        prefixes: what is remembered, or None.
        evictions: cached pages given up for other content, since start.
    """

    def __init__(self, total: int, page_size: int | None = None) -> None:
        self.total = total
        self.prefixes = PrefixCache(page_size) if page_size else None
        self.evictions = 0
        self._free = dict.fromkeys(reversed(range(total)))  # the last is taken first
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def free(self) -> int:
        """Number of pages without content."""
        return len(self._free)

    @property
    def owned(self) -> int:
        """Number of pages in use; one that is shared counts once."""
        return len(self._holders)

    @property
    def cached(self) -> int:
        """Number of pages that nobody uses and whose content is remembered."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Number of pages that can be allocated now."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int, near: int = 0) -> list[int]:
        """Take ``count`` pages: ``near, near + 1, …`` as far as they are free, then any; cached ones last.

        Consecutive pages let attention on a CPU read a context in place instead of gathering it.

        Raises:
            OutOfPages: fewer than ``count`` pages are available; none is taken.
        """
        if count > self.available:
            raise OutOfPages(
                f"{count} pages wanted, {len(self._free)} of {self.total} free"
                + (f" and {len(self._cached)} cached" if self._cached else "")
            )
        while len(self._free) < count:
            self._evict(next(iter(self._cached)))
        pages = []
        for _ in range(count):
            page = near if near in self._free else next(reversed(self._free))
            del self._free[page]
            self._holders[page] = 1
            pages.append(page)
            near = page + 1
        return pages

    def allocate_at(self, pages: range) -> list[int]:
        """Take these pages, all of them available."""
        for page in pages:
            if page in self._cached:
                self._evict(page)
            del self._free[page]
            self._holders[page] = 1
        return list(pages)

    def place(self, room: int, claimed: Iterable[range] = ()) -> int | None:
        """The first of ``room`` consecutive available pages outside ``claimed``, or None.

        Of several places, the one whose pages have all been out of use for longest, free ones best of all.
        """
        age: list[float] = [math.inf] * self.total
        for page in self._free:
            age[page] = -1
        for i, page in enumerate(self._cached):
            age[page] = i
        for pages in claimed:
            for page in pages:
                if page < self.total:
                    age[page] = math.inf
        # the window's oldest-first maximum, sliding
        best, at = math.inf, None
        tops: deque[int] = deque()
        for page in range(self.total):
            while tops and age[tops[-1]] <= age[page]:
                tops.pop()
            tops.append(page)
            if tops[0] <= page - room:
                tops.popleft()
            if page >= room - 1 and age[tops[0]] < best:
                best, at = age[tops[0]], page - room + 1
                if best < 0:
                    break
        return at

    def is_free(self, pages: range) -> bool:
        """Whether all of these are free."""
        return all(page in self._free for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages that others hold, or that are cached. No page of a prefix is written again, so all may read it."""
        for page in pages:
            if page in self._cached:
                del self._cached[page]
            else:
                assert page in self._holders, "a free page has no content to share"
            self._holders[page] = self._holders.get(page, 0) + 1

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. Those that nobody holds any more are cached if they are remembered, or else free.

        Raises:
            ValueError: a page is not held or not of this pool; nothing is released.
        """
        if len(set(pages)) != len(pages) or any(page not in self._holders for page in pages):
            raise ValueError(f"pages {list(pages)} are not all owned")
        for page in reversed(pages):  # a text's end is used less than its beginning, and is nothing without it
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if self.prefixes is not None and page in self.prefixes:
                    self._cached[page] = None
                else:
                    self._free[page] = None

    def match(self, owner: str, tokens: Sequence[int]) -> list[Node]:
        """The remembered pages that a text begins with; to be shared by whoever uses them."""
        return [] if self.prefixes is None else self.prefixes.match(owner, tokens)

    def remember(
        self, chain: list[Node], pages: Sequence[int], owner: str, tokens: Sequence[int], num_cached: int
    ) -> None:
        """Note the content of a holder's pages that are full and committed.

        Args:
            chain: what is noted of the holder's text, one node per page; grows. A node's page need not be the holder's:
                of equal pages only one is remembered.
            pages: of the holder, in logical order.
            tokens: its text, one token per position.
            num_cached: committed positions.
        """
        if self.prefixes is None or num_cached // self.prefixes.page_size <= len(chain):
            return
        size = self.prefixes.page_size
        # what was evicted meanwhile is noted again, with the pages that this holder has
        del chain[next((i for i, node in enumerate(chain) if not node.alive), len(chain)) :]
        for i in range(len(chain), num_cached // size):
            own = tokens[i * size : (i + 1) * size]
            parent = chain[-1] if chain else None
            node = self.prefixes.find(parent, owner, own)
            if node is None:
                if (stale := self.prefixes.under_key(parent, owner, own)) is not None:
                    self._forget(stale)
                node = self.prefixes.add(parent, owner, own, pages[i])
            chain.append(node)

    def move(self, chain: Sequence[Node], pages: Sequence[int]) -> None:
        """The nodes' content is copied to ``pages``: those whose pages nobody holds are remembered there instead."""
        for node, page in zip(chain, pages, strict=True):
            if node.alive and node.page in self._cached:
                assert self.prefixes is not None
                del self._cached[node.page]
                self._free[node.page] = None
                self.prefixes.move(node, page)

    def forget(self, chain: Sequence[Node]) -> None:
        """Remember these pages no longer: what they hold is in doubt."""
        for node in chain:
            if node.alive:
                self._forget(node)

    def check(self, owned: Sequence[Sequence[int]]) -> None:
        """Assert that ``owned`` (the pages of every holder), the free and the cached ones are the whole pool."""
        held = Counter(page for pages in owned for page in pages)
        assert all(len(set(pages)) == len(pages) for pages in owned), "a holder has a page twice"
        assert self._free.keys().isdisjoint(held), "an owned page is free"
        assert self._cached.keys().isdisjoint(held), "an owned page is up for eviction"
        assert self._free.keys().isdisjoint(self._cached)
        lost = self.total - len(held) - len(self._free) - len(self._cached)
        assert lost == 0, f"{lost} pages leaked"
        assert held == self._holders, "a page has more owners than are counted"
        if self.prefixes is not None:
            self.prefixes.check()
            assert all(page in self.prefixes for page in self._cached)
            assert not any(page in self.prefixes for page in self._free)
        else:
            assert not self._cached

    def _evict(self, page: int) -> None:
        assert self.prefixes is not None
        self._forget(self.prefixes.on(page))
        self.evictions += 1

    def _forget(self, node: Node) -> None:
        assert self.prefixes is not None
        self.prefixes.forget(node)
        if node.page in self._cached:
            del self._cached[node.page]
            self._free[node.page] = None


class KVCache:
    """Keys and values of all layers.

    Attributes:
        k, v: [layers, kv_heads, pages * page_size, head_dim], which stay where they are. KV heads come before positions
            so that consecutive pages are one contiguous context per head.
        place: for compiled code: addresses of k and v, and their strides over layers and over heads, in entries.
        native: the compiled library, once it is in use on a CPU, for moves; may be set while requests run.
    """

    native: Library | None = None

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.page_size = page_size
        shape = (layers, kv_heads, pages * page_size, head_dim)
        row = head_dim * dtype.itemsize
        self._layout = layers * kv_heads, pages * page_size * row, row  # planes, and bytes of a plane and of a row
        # Left uninitialised: no position is read before it is written, and a CPU maps memory only when it is touched.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.place = self.k.data_ptr(), self.v.data_ptr(), self.k.stride(0), self.k.stride(1)

    @property
    def in_place(self) -> bool:
        """Whether contexts are read where they lie if their pages are consecutive, and gathered if not: on a CPU."""
        return self.k.device.type == "cpu"

    def pages_for(self, positions: int) -> int:
        """Pages that hold ``positions`` positions."""
        return -(-positions // self.page_size)

    def kv_index(self, pages: Sequence[int], position: int) -> int:
        """Physical index of logical ``position`` in the row of ``pages``."""
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the content of whole pages; no page is both read and written."""
        size, start = self.page_size, 0
        for end in range(1, len(source) + 1):
            # a run of pages that are consecutive on both sides is one copy
            if end < len(source) and all(pages[end] == pages[start] + end - start for pages in (source, target)):
                continue
            run = (end - start) * size
            old, new = source[start] * size, target[start] * size
            for cache in (self.k, self.v):
                cache[:, :, new : new + run].copy_(cache[:, :, old : old + run])
            start = end

    def commit(self, rows: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> None:
        """Move the accepted nodes' KV to the front of the tree region; what lies behind it is then dead.

        Args:
            rows: per slot (pages, num_cached, path): node ``path[i]`` lies at position ``num_cached + path[i]`` and
                belongs at ``num_cached + i``.
        """
        source, target = [], []
        for pages, num_cached, path in rows:
            for i, node in enumerate(path):
                if node != i:
                    source.append(self.kv_index(pages, num_cached + node))
                    target.append(self.kv_index(pages, num_cached + i))
        if not source:
            return
        if self.native is None:
            kernels.kv_commit(self.k, self.v, source, target)
            return
        before, after = array("q", source), array("q", target)
        for cache in self.place[:2]:
            self.native.move(cache, *self._layout, before.buffer_info()[0], after.buffer_info()[0], len(before))

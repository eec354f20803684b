"""The paged KV cache: PagePool hands out page ids, KVCache holds the tensors.

A page is a fixed-size block of KV positions (PagedAttention: Kwon et al. 2023, arXiv 2309.06180). A ``kv_index`` is a
physical position: ``page * page_size + offset``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minispec import kernels


class OutOfPages(Exception):
    """More pages were asked for than are free. The scheduler trims trees or preempts before this can happen."""


class PagePool:
    """Page ids and who holds them; knows nothing of tensors.

    Invariant: each page is either free or owned by exactly one holder, so ``free + owned == total``.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = set(range(total))

    @property
    def free(self) -> int:
        """Number of pages that can be allocated now."""
        return len(self._free)

    @property
    def owned(self) -> int:
        """Number of pages in use."""
        return self.total - len(self._free)

    def allocate(self, count: int, near: int = 0) -> list[int]:
        """Take ``count`` pages: ``near, near + 1, …`` as far as they are free, then any.

        Consecutive pages let attention on a CPU read a context in place instead of gathering it.

        Raises:
            OutOfPages: fewer than ``count`` pages are free; none is taken.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.total} free")
        pages = []
        for _ in range(count):
            page = near if near in self._free else min(self._free)
            self._free.remove(page)
            pages.append(page)
            near = page + 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back.

        Raises:
            ValueError: a page is free already or not of this pool; nothing is released.
        """
        if len(set(pages)) != len(pages) or any(p in self._free or not 0 <= p < self.total for p in pages):
            raise ValueError(f"pages {list(pages)} are not all owned")
        self._free.update(pages)

    def check(self, owned: Sequence[Sequence[int]]) -> None:
        """Assert that ``owned`` (the pages of every holder) and the free pages are the whole pool, each page once."""
        held = [page for pages in owned for page in pages]
        assert len(held) == len(set(held)), "a page has two owners"
        assert self._free.isdisjoint(held), "an owned page is free"
        assert len(held) + len(self._free) == self.total, f"{self.total - len(held) - len(self._free)} pages leaked"


class KVCache:
    """Keys and values of all layers.

    Attributes:
        k, v: [layers, kv_heads, pages * page_size, head_dim]. KV heads come before positions so that consecutive pages
            are one contiguous context per head.
    """

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
        # Left uninitialised: no position is read before it is written, and a CPU maps memory only when it is touched.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)

    def pages_for(self, positions: int) -> int:
        """Pages that hold ``positions`` positions."""
        return -(-positions // self.page_size)

    def kv_index(self, pages: Sequence[int], position: int) -> int:
        """Physical index of logical ``position`` in the row of ``pages``."""
        return pages[position // self.page_size] * self.page_size + position % self.page_size

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
        if source:
            kernels.kv_commit(self.k, self.v, source, target)

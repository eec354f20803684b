from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minispec.kv_cache import KVCache, OutOfPages, PagePool
from native_library import needs_machine


class PoolMachine(RuleBasedStateMachine):
    """Holders take and give back pages in any order; the pool always knows where each page is."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(13)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, 6), near=st.integers(0, 20))
    def allocate(self, count, near):
        free = self.pool.free
        if count > free:
            with pytest.raises(OutOfPages, match=f"{count} pages wanted, {free} of 13 free"):
                self.pool.allocate(count, near)
            assert self.pool.free == free
        else:
            self.holders.append(self.pool.allocate(count, near))
            assert len(self.holders[-1]) == count

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(pages)
        if pages:
            free = self.pool.free
            with pytest.raises(ValueError, match="not all owned"):
                self.pool.release(pages)
            assert self.pool.free == free

    @rule(page=st.sampled_from([-1, 13, 100]))
    def release_foreign(self, page):
        with pytest.raises(ValueError, match="not all owned"):
            self.pool.release([page])

    @invariant()
    def every_page_is_in_one_place(self):
        self.pool.check(self.holders)
        assert self.pool.owned + self.pool.free == self.pool.total
        assert self.pool.owned == sum(map(len, self.holders))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_pages_are_consecutive_where_they_can_be():
    pool = PagePool(8)
    assert pool.allocate(2, near=4) == [4, 5]
    assert pool.allocate(3, near=3) == [3, 0, 1]
    assert pool.allocate(2, near=6) == [6, 7]


def test_check_finds_leaks_and_double_owners():
    pool = PagePool(4)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="leaked"):
        pool.check([])
    with pytest.raises(AssertionError, match="more owners than are counted"):
        pool.check([pages, pages])
    with pytest.raises(AssertionError, match="free"):
        pool.check([[*pages, 3]])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_machine)])
def test_commit_moves_scattered_nodes_to_the_front(page_size, native, request):
    kv = KVCache(layers=2, kv_heads=3, head_dim=4, pages=80, page_size=page_size, dtype=torch.float32, device="cpu")
    if native:
        kv.native = request.getfixturevalue("team").library
    kv.k.normal_()
    kv.v.normal_()
    pages = torch.randperm(80).tolist()
    rows = []
    taken = 0
    for num_cached, path in [(5, (0, 3, 7)), (9, (0,)), (0, (0, 1, 2, 5, 6, 7))]:
        count = kv.pages_for(num_cached + 8)
        rows.append((pages[taken : taken + count], num_cached, path))
        taken += count
    index = torch.tensor
    wanted = [index([kv.kv_index(p, n + node) for node in path]) for p, n, path in rows]
    k, v = kv.k.clone(), kv.v.clone()
    kv.commit(rows)
    for (p, n, path), source in zip(rows, wanted, strict=True):
        target = index([kv.kv_index(p, n + i) for i in range(len(path))])
        assert torch.equal(kv.k[:, :, target], k[:, :, source])
        assert torch.equal(kv.v[:, :, target], v[:, :, source])
        prefix = index([kv.kv_index(p, i) for i in range(n)], dtype=torch.int64)
        assert torch.equal(kv.k[:, :, prefix], k[:, :, prefix])
        assert torch.equal(kv.v[:, :, prefix], v[:, :, prefix])


@pytest.mark.parametrize("source", [[2], [1, 2, 3], [7, 3, 4, 0, 9], []])
def test_whole_pages_are_copied(source):
    kv = KVCache(layers=2, kv_heads=3, head_dim=4, pages=20, page_size=4, dtype=torch.float32, device="cpu")
    kv.k.normal_()
    kv.v.normal_()
    target = list(range(11, 11 + len(source)))
    k, v = (cache.clone().unflatten(2, (20, 4)) for cache in (kv.k, kv.v))
    kv.copy(source, target)
    for cache, before in ((kv.k, k), (kv.v, v)):
        before[:, :, target] = before[:, :, source]
        assert torch.equal(cache.unflatten(2, (20, 4)), before)

"""What is remembered of texts, what is found again, and what goes first when room is needed."""

from __future__ import annotations

import pytest

from minispec.kv_cache import PagePool
from minispec.prefix_cache import PrefixCache

PAGE = 4
TEXT = list(range(100, 118))  # four pages and two tokens


def remembered(pool: PagePool, text: list[int], owner: str = "") -> list[int]:
    """Read a text and let go of it; returns its pages."""
    pages = pool.allocate(-(-len(text) // PAGE))
    pool.remember([], pages, owner, text, len(text))
    pool.check([pages])
    pool.release(pages)
    pool.check([])
    return pages


def found(pool: PagePool, text: list[int], owner: str = "") -> list[int]:
    return [node.page for node in pool.match(owner, text)]


@pytest.mark.parametrize("length", range(19))
def test_full_pages_are_found_as_far_as_the_text_is_the_same(length):
    pool = PagePool(16, PAGE)
    pages = remembered(pool, TEXT)
    assert (pool.free, pool.cached, pool.owned) == (12, 4, 0)
    assert found(pool, TEXT[:length] + [1] * 20) == found(pool, TEXT[:length]) == pages[: length // PAGE]


def test_a_page_is_the_same_only_behind_the_same_text():
    pool = PagePool(16, PAGE)
    pages = remembered(pool, TEXT)
    assert found(pool, TEXT[4:]) == []
    assert found(pool, [1, *TEXT[1:]]) == []
    other = remembered(pool, [*TEXT[:4], *TEXT[8:16]])
    assert found(pool, [*TEXT[:4], *TEXT[8:16]]) == [pages[0], *other[1:]]
    assert found(pool, TEXT) == pages[:4]


def test_owners_do_not_see_each_other():
    pool = PagePool(32, PAGE)
    mine, theirs = remembered(pool, TEXT, "me"), remembered(pool, TEXT, "they")
    assert found(pool, TEXT, "me") == mine[:4] and found(pool, TEXT, "they") == theirs[:4]
    assert found(pool, TEXT) == [] and set(mine[:4]).isdisjoint(theirs[:4])


def test_hashes_are_secret_to_the_process():
    keys = {PrefixCache(PAGE).add(None, "", TEXT[:4], 0).key for _ in range(3)}
    assert len(keys) == 3


@pytest.mark.parametrize("clashing", [lambda *_: b"same", lambda self, parent, owner, tokens: bytes([len(owner)])])
def test_texts_whose_hashes_clash_are_told_apart(monkeypatch, clashing):
    monkeypatch.setattr(PrefixCache, "_key", clashing)
    pool = PagePool(16, PAGE)
    pages = remembered(pool, TEXT[:4])
    assert found(pool, [1, 2, 3, 4]) == [] and found(pool, TEXT) == pages
    other = remembered(pool, [1, 2, 3, 4])  # takes the place of the first
    assert found(pool, TEXT) == [] and found(pool, [1, 2, 3, 4]) == other and pool.cached == 1


def test_of_equal_pages_one_is_remembered():
    pool = PagePool(16, PAGE)
    first, second = pool.allocate(4), pool.allocate(4)
    chains: list[list] = [[], []]
    for chain, pages in zip(chains, (first, second), strict=True):
        pool.remember(chain, pages, "", TEXT, 8)
    assert [node.page for node in chains[1]] == first[:2]
    pool.remember(chains[1], second, "", TEXT, 16)  # the second is faster now
    pool.remember(chains[0], first, "", TEXT, 16)
    assert found(pool, TEXT) == [*first[:2], *second[2:]]
    pool.check([first, second])
    pool.release(first)
    pool.release(second)
    assert (pool.free, pool.cached) == (12, 4)
    pool.check([])


def test_shared_pages_stay_until_the_last_holder_goes():
    pool = PagePool(8, PAGE)
    pages = remembered(pool, TEXT[:8])
    pool.share(pages)
    pool.share(pages)
    pool.check([pages, pages])
    assert (pool.owned, pool.cached, pool.available) == (2, 0, 6)
    with pytest.raises(AssertionError, match="more owners than are counted"):
        pool.check([pages])
    pool.release(pages)
    pool.check([pages])
    assert pool.owned == 2
    pool.release(pages)
    assert (pool.owned, pool.cached) == (0, 2)
    with pytest.raises(ValueError, match="not all owned"):
        pool.release(pages)


def test_what_was_used_longest_ago_goes_first_and_a_texts_end_before_its_beginning():
    pool = PagePool(8, PAGE)
    old, new = remembered(pool, TEXT[:16]), remembered(pool, [1, *TEXT[1:16]])
    pool.share(old[:2])  # used again: younger than the other text now
    pool.release(old[:2])
    taken = []
    while pool.available:
        taken += pool.allocate(1)
    assert taken == [old[3], old[2], *reversed(new), old[1], old[0]]
    assert pool.evictions == 8 and found(pool, TEXT) == []


def test_free_pages_are_taken_before_remembered_ones():
    pool = PagePool(6, PAGE)
    pages = remembered(pool, TEXT[:8])
    assert not set(pool.allocate(4)) & set(pages) and pool.evictions == 0
    assert found(pool, TEXT) == pages


def test_a_page_whose_predecessor_is_gone_comes_back_with_it():
    pool = PagePool(16, PAGE)
    first, second = pool.allocate(4), pool.allocate(4)
    chain: list = []
    pool.remember([], first, "", TEXT, 4)
    pool.remember(chain, second, "", TEXT, 16)
    pool.release(first)
    held = pool.allocate(pool.free)
    held += pool.allocate(1)  # evicts the first page, on which those of the second holder stand
    assert pool.evictions == 1 and found(pool, TEXT) == []
    again = pool.allocate(0)
    pool.remember([], second, "", TEXT, 16)  # somebody has read the text again
    assert found(pool, TEXT) == second
    pool.check([second, held, again])


def test_a_holder_notes_again_what_was_evicted():
    pool = PagePool(16, PAGE)
    first, second = pool.allocate(4), pool.allocate(4)
    chain: list = []
    pool.remember([], first, "", TEXT, 8)
    pool.remember(chain, second, "", TEXT, 8)
    pool.release(first)
    held = pool.allocate(pool.available)
    assert not any(node.alive for node in chain)
    pool.remember(chain, second, "", TEXT, 12)
    assert found(pool, TEXT) == second[:3] and len(chain) == 3
    pool.check([second, held])


def test_doubtful_pages_are_forgotten():
    pool = PagePool(8, PAGE)
    pages, chain = pool.allocate(4), []
    pool.remember(chain, pages, "", TEXT, 16)
    pool.forget(chain)
    assert found(pool, TEXT) == []
    pool.release(pages)
    assert (pool.free, pool.cached) == (8, 0)
    cached, again = remembered(pool, TEXT[:8]), []
    pool.remember(again, pool.allocate(2), "", TEXT, 8)  # a second holder of the same text, whose pages are the first's
    assert [node.page for node in again] == cached
    pool.forget(again)
    assert pool.cached == 0 and found(pool, TEXT) == []


def test_nothing_is_remembered_where_that_is_off():
    pool = PagePool(8)
    remembered(pool, TEXT)
    assert pool.match("", TEXT) == [] and pool.cached == 0 and pool.free == 8


def test_places_are_free_or_long_out_of_use():
    pool = PagePool(12, PAGE)
    assert pool.place(12) == 0 and pool.place(13) is None
    old = remembered(pool, TEXT[:16])
    new = remembered(pool, [1, *TEXT[1:16]])
    assert (old, new) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert pool.place(4) == 8  # free
    assert pool.place(8, [range(8, 12)]) == 0  # all that there is
    assert pool.place(4, [range(8, 12)]) == 0 and pool.place(3, [range(8, 12)]) == 1  # the old text, its end first
    assert pool.place(5) == 7  # and this way only one page is lost
    held = pool.allocate_at(range(7, 12))
    assert pool.evictions == 1 and found(pool, [1, *TEXT[1:16]]) == new[:3]
    assert pool.place(9) is None and pool.place(5) == 0
    pool.check([held])

"""tree_attention: the kernel under the interpreter against the torch reference."""

import pytest
import torch

from minispec.kernels.tree_attention import tree_attention_ref, tree_attention_triton
from paged_steps import filled_cache, random_step

MIXED = [("tree", 63, 70), ("chunk", 1, 33), ("chunk", 0, 5), ("chunk", 37, 0), ("grown", 9, 31), ("chunk", 20, 65)]


def check(spans, *, heads=3, kv_heads=3, head_dim=64, page_size=16, window=None, splits=None):
    torch.manual_seed(0)
    batch, pages = random_step(spans, page_size, window)
    k, v = filled_cache(batch, pages, kv_heads, head_dim)
    q = torch.randn(len(batch.tokens), heads, head_dim)
    expected = tree_attention_ref(q, k, v, batch, head_dim**-0.5)
    actual = tree_attention_triton(q, k, v, batch, head_dim**-0.5, splits=splits)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
def test_rows_of_every_kind_in_one_batch(window):
    check(MIXED, heads=9, window=window)


@pytest.mark.parametrize(("splits", "window"), [(2, None), (3, 20), (64, None)])
def test_split_over_the_keys(splits, window):
    """With 64 splits most of them are empty."""
    check([("tree", 9, 70), ("chunk", 1, 133), ("chunk", 0, 5), ("grown", 2, 31)], window=window, splits=splits)


@pytest.mark.parametrize("nodes", [1, 63, 64, 65])
def test_tree_sizes_around_a_block(nodes):
    check([("tree", nodes, 17), ("chunk", 1, 3)])


def test_largest_tree():
    check([("tree", 256, 40)], heads=1, kv_heads=1)


@pytest.mark.parametrize("num_cached", [0, 1, 15, 16, 17, 63, 64, 65])
def test_prefix_around_page_and_block_boundaries(num_cached):
    check([("tree", 5, num_cached), ("chunk", 1, num_cached)], kv_heads=1)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(head_dim):
    check([("tree", 9, 33), ("chunk", 18, 7)], heads=2, kv_heads=1, head_dim=head_dim)


@pytest.mark.parametrize("heads", [1, 4, 7, 32])
def test_query_heads_per_kv_head(heads):
    check([("tree", 7, 21), ("chunk", 5, 2)], heads=heads, kv_heads=1)


@pytest.mark.parametrize("page_size", [1, 16, 24, 64, 256])
def test_page_sizes(page_size):
    check([("tree", 9, 70), ("chunk", 3, 255)], kv_heads=1, heads=1, page_size=page_size)


@pytest.mark.parametrize("window", [1, 4, 16, 64])
def test_window_with_deep_trees_and_long_chunks(window):
    check([("tree", 33, 40), ("chunk", 70, 9)], kv_heads=1, heads=1, window=window)


def test_many_spans_find_their_rows():
    check([("chunk", n % 4, n) for n in range(23)], kv_heads=1, heads=1)


def test_no_rows():
    check([("chunk", 0, 3)])


def test_keys_narrower_than_queries_are_widened():
    batch, pages = random_step([("tree", 6, 20)], 16)
    k, v = (t.half() for t in filled_cache(batch, pages, 1, 64))
    q = torch.randn(6, 2, 64)
    expected = tree_attention_ref(q, k.float(), v.float(), batch, 0.125)
    torch.testing.assert_close(tree_attention_triton(q, k, v, batch, 0.125), expected, atol=2e-5, rtol=1e-5)


def test_half_precision():
    batch, pages = random_step([("tree", 12, 40), ("chunk", 20, 0)], 16)
    k, v = filled_cache(batch, pages, 1, 64)
    q = torch.randn(32, 2, 64)
    expected = tree_attention_ref(q, k, v, batch, 0.125)
    actual = tree_attention_triton(q.half(), k.half(), v.half(), batch, 0.125).float()
    torch.testing.assert_close(actual, expected, atol=5e-3, rtol=5e-3)

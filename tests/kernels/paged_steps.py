"""Random step batches over a paged cache, for the kernels' tests."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from minispec.batch import Span, StepBatch
from minispec.tree import DraftTree


def random_tree(rng: random.Random, size: int) -> DraftTree:
    """A tree whose siblings all differ."""
    parents = [-1, *(rng.randrange(max(0, i - 8), i) for i in range(1, size))]
    return DraftTree(tuple(range(size)), tuple(parents), (0.0,) * size)


def random_span(rng: random.Random, kind: str, rows: int, num_cached: int, pages: Sequence[int]) -> Span:
    """A span of ``rows`` rows: ``chunk``, ``tree``, or ``grown``, the last rows of a tree whose others came earlier."""
    if kind == "chunk":
        return Span.chunk(range(rows), pages, num_cached, sample_last=rows > 0)
    if kind == "tree":
        return Span.tree(random_tree(rng, rows), pages, num_cached)
    first = 3 * rows
    tree = random_tree(rng, first + rows)
    depths, ancestors = tree.depth[first:], tree.ancestors[first:]
    return Span(tree.tokens[first:], pages, num_cached, depths, ancestors, range(rows), first_key=first)


def random_step(
    spans: Sequence[tuple[str, int, int]], page_size: int, window: int | None = None, seed: int = 0
) -> tuple[StepBatch, int]:
    """A batch of (kind, rows, num_cached) spans on scattered pages, and how many pages the cache needs."""
    rng = random.Random(seed)
    needed = [-(-(cached + (4 * rows if kind == "grown" else rows)) // page_size) for kind, rows, cached in spans]
    total = sum(needed) + 2
    free = rng.sample(range(total), total)
    built = []
    for (kind, rows, cached), count in zip(spans, needed, strict=True):
        pages, free = free[:count], free[count:]
        built.append(random_span(rng, kind, rows, cached, pages))
    return StepBatch.build(built, page_size, window=window), total


def filled_cache(batch: StepBatch, pages: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values [kv_heads, positions, head_dim]: random where a span of the batch may look, NaN elsewhere."""
    size = batch.page_size
    k = torch.full((kv_heads, pages * size, head_dim), float("nan"))
    v = k.clone()
    for span in batch.spans:
        index = [span.pages[p // size] * size + p % size for p in range(span.num_cached + span.tree_size)]
        k[:, index] = torch.randn(kv_heads, len(index), head_dim)
        v[:, index] = torch.randn(kv_heads, len(index), head_dim)
    return k, v

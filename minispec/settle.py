"""After the forward: walk the trees along the target's samples, move the accepted KV, fetch the tokens.

Where the cache lies on a GPU all of it happens there, queued behind the forward, and the host waits once, for the
tokens. On a CPU the same is done in Python.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from minispec import kernels
from minispec.kv_cache import KVCache
from minispec.tree import DraftTree
from minispec.upload import upload
from minispec.verify import Acceptance, verify

Place = tuple[Sequence[int], int]
"""Where a slot's KV lies: its pages, and the length of the committed prefix."""

_MIN_DEPTH = 8
"""The kernels are compiled per power of two of the depth; from here on, so that most trees share one."""


def settle(
    kv: KVCache, samples: Tensor | array[int], trees: Sequence[DraftTree], places: Sequence[Place]
) -> tuple[list[int], list[Acceptance]]:
    """Verify every tree and commit its accepted nodes.

    Args:
        kv: the target's cache.
        samples: [others + nodes] int64, the target's tokens: of rows that belong to no tree, then after every node of
            all trees. On a GPU a tensor.
        trees, places: one each.

    Returns:
        The tokens of the rows that belong to no tree, and what each tree's verification emits.
    """
    if not len(samples):
        return [], []
    if isinstance(samples, Tensor) and samples.is_cuda:
        return settle_on_device(kv, samples, trees, places)
    drawn: list[int] = samples.tolist()
    others, accepted = _split(drawn, trees)
    kv.commit([(*place, acceptance.path) for place, acceptance in zip(places, accepted, strict=True)])
    return others, accepted


def settle_on_device(
    kv: KVCache, samples: Tensor, trees: Sequence[DraftTree], places: Sequence[Place]
) -> tuple[list[int], list[Acceptance]]:
    """The same without a wait between verification and commit."""
    if all(len(tree) == 1 for tree in trees):  # nothing to walk or to move
        return _split(samples.tolist(), trees)
    others = samples.shape[0] - sum(map(len, trees))
    depth = max(_MIN_DEPTH, 1 << max(max(tree.depth) for tree in trees).bit_length())
    size = kv.page_size
    # only the pages that hold nodes: positions count from the first of them
    pages = [
        list(own[cached // size : (cached + len(tree) - 1) // size + 1])
        for tree, (own, cached) in zip(trees, places, strict=True)
    ]
    width = max(map(len, pages))
    tokens, parents, start, prefix, table = upload(
        [
            torch.tensor([token for tree in trees for token in tree.tokens], dtype=torch.int64),
            torch.tensor([parent for tree in trees for parent in tree.parents], dtype=torch.int32),
            torch.tensor([0, *itertools.accumulate(map(len, trees))], dtype=torch.int32),
            torch.tensor([cached % size for _, cached in places], dtype=torch.int32),
            torch.tensor([[*own, *[0] * (width - len(own))] for own in pages], dtype=torch.int32),
        ],
        samples.device,
    )
    # cloned: a view into the middle may not be aligned, which would be another kernel
    path, _, _ = kernels.verify(tokens, parents, samples[others:].clone() if others else samples, start, depth)
    kernels.kv_commit_path(kv.k, kv.v, path, prefix, table, size)
    fetched: list[int] = torch.cat([samples, path.flatten()]).tolist()
    drawn, rows = fetched[: samples.shape[0]], iter(fetched[samples.shape[0] :])
    accepted, first = [], others
    for tree in trees:
        nodes = tuple(node for node in itertools.islice(rows, depth) if node >= 0)
        accepted.append(Acceptance(nodes, tuple(drawn[first + node] for node in nodes)))
        first += len(tree)
    return drawn[:others], accepted


def _split(drawn: list[int], trees: Sequence[DraftTree]) -> tuple[list[int], list[Acceptance]]:
    others = len(drawn) - sum(map(len, trees))
    rest = iter(drawn[others:])
    return drawn[:others], [verify(tree, list(itertools.islice(rest, len(tree)))) for tree in trees]

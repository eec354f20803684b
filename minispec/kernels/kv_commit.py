"""The selective KV update: move accepted nodes' keys and values to consecutive positions, in all layers.

Roofline for m moved nodes: 4 m layers kv_heads head_dim b bytes read and written (b bytes per element), no FLOPs; a
path has a few nodes, so one launch's latency bounds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.kernels._triton import cdiv, jit, power_of_2
from minispec.upload import tensor_of, upload

if TYPE_CHECKING:
    import triton.language as tl

MAX_MOVES = 1024
"""Most moves one program can hold between reading and writing."""


def kv_commit_ref(k: Tensor, v: Tensor, source: Sequence[int], target: Sequence[int]) -> None:
    """Torch reference, and the path of a CPU.

    Args:
        k, v: [layers, kv_heads, positions, head_dim], changed in place.
        source, target: kv_index of each node before and after; targets are distinct. A target may be another node's
            source, so everything is gathered before anything is written.
    """
    before, after = upload([tensor_of(array("q", index)) for index in (source, target)], k.device)
    # not by advanced indexing, which takes twice as long for a few
    for cache in (k, v):
        cache.index_copy_(2, after, cache.index_select(2, before))


def kv_commit_path_ref(
    k: Tensor, v: Tensor, path: Tensor, num_cached: Tensor, page_table: Tensor, page_size: int
) -> None:
    """The same for paths that lie on the device, as ``verify`` leaves them. Torch reference, and the path of a CPU.

    Args:
        k, v: [layers, kv_heads, positions, head_dim], changed in place.
        path: [slots, depth] int32, accepted nodes in order, padded with -1: node ``path[s, i]`` moves from logical
            position ``num_cached[s] + path[s, i]`` to ``num_cached[s] + i``.
        num_cached: [slots] int32.
        page_table: [slots, pages] int32.
        page_size: positions per page.
    """
    slot, i = torch.nonzero(path >= 0, as_tuple=True)

    def kv_index(logical: Tensor) -> list[int]:
        index: list[int] = (page_table[slot, logical // page_size] * page_size + logical % page_size).tolist()
        return index

    kv_commit_ref(k, v, kv_index(num_cached[slot] + path[slot, i]), kv_index(num_cached[slot] + i))


def kv_commit_triton(k: Tensor, v: Tensor, source: Sequence[int], target: Sequence[int]) -> None:
    """Triton launcher; arguments as in the reference."""
    if len(source) > MAX_MOVES:  # hundreds of slots: two passes through memory cost no more than the moves
        kv_commit_ref(k, v, source, target)
    elif source:
        before, after = upload([tensor_of(array("q", index)) for index in (source, target)], k.device)
        _launch(k, v, before, after, before, len(source), slots=1, width=0, page_size=0)


def kv_commit_path_triton(
    k: Tensor, v: Tensor, path: Tensor, num_cached: Tensor, page_table: Tensor, page_size: int
) -> None:
    """Triton launcher; arguments as in the reference. The grid depends on shapes only."""
    slots, depth = path.shape
    if slots:
        _launch(k, v, path, num_cached, page_table, depth, slots, page_table.shape[1], page_size)


def _launch(
    k: Tensor,
    v: Tensor,
    first: Tensor,
    second: Tensor,
    table: Tensor,
    moves: int,
    slots: int,
    width: int,
    page_size: int,
) -> None:
    layers, kv_heads, _, head_dim = k.shape
    block_n = power_of_2(moves)
    block_d = min(power_of_2(head_dim), max(8, 4096 // block_n))
    _kv_commit_kernel[(layers * kv_heads, slots, cdiv(head_dim, block_d))](
        k, v, first, second, table, moves, width, k.stride(1), k.stride(2),
        HEAD_DIM=head_dim, PAGE_SIZE=page_size, BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=max(1, min(8, block_n * block_d // 512)),
    )  # fmt: skip


@jit
def _kv_commit_kernel(
    k: tl.tensor,
    v: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    table: tl.tensor,
    moves: tl.tensor,
    width: tl.tensor,
    head_stride: tl.tensor,
    position_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: all moves of one slot in one layer and head, BLOCK_D entries of each vector.

    k, v [layers, kv_heads, positions, HEAD_DIM]. With PAGE_SIZE: first is path [slots, moves], second num_cached
    [slots], table [slots, width]. Without: first and second are source and target [moves].
    """
    slot = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_N)
    if PAGE_SIZE > 0:
        node = tl.load(first + slot * moves + i, mask=i < moves, other=-1)
        moved = (node >= 0) & (node != i)
        prefix = tl.load(second + slot)
        table += slot * width
        before = prefix + node
        after = prefix + i
        source = tl.load(table + before // PAGE_SIZE, mask=moved, other=0).to(tl.int64) * PAGE_SIZE + before % PAGE_SIZE
        target = tl.load(table + after // PAGE_SIZE, mask=moved, other=0).to(tl.int64) * PAGE_SIZE + after % PAGE_SIZE
    else:
        moved = i < moves
        source = tl.load(first + i, mask=moved, other=0)
        target = tl.load(second + i, mask=moved, other=0)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = moved[:, None] & (d < HEAD_DIM)[None, :]
    head = tl.program_id(0).to(tl.int64) * head_stride
    read = (head + source * position_stride)[:, None] + d[None, :]
    write = (head + target * position_stride)[:, None] + d[None, :]
    keys = tl.load(k + read, mask=inside)
    values = tl.load(v + read, mask=inside)
    # one node's target may be another's source: nobody writes before everybody has read
    tl.debug_barrier()
    tl.store(k + write, keys, mask=inside)
    tl.store(v + write, values, mask=inside)

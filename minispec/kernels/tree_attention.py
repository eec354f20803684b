"""Attention of a step's rows over the paged KV cache: prefill chunks, trees and single tokens in one call.

    out[r] = softmax(scale * q[r] K[visible(r)]^T) V[visible(r)]

where ``visible(r)`` is the committed prefix of r's span and, past it, the keys of a causal chunk up to r or r's own
ancestors in the tree (SpecInfer: arXiv 2305.09781, section 4.2).

The kernel is FlashAttention-2 (Dao 2023, arXiv 2307.08691) over pages (Kwon et al. 2023, arXiv 2309.06180), with the KV
length split over programs and combined where rows alone would not fill the device (flash-decoding: Dao et al. 2023).
A program takes ``BLOCK_M`` (row, query head) pairs that share a KV head: each key is read once for the whole group.

Roofline per call, with n rows, L keys per span, H query heads, G KV heads, D = head_dim, b bytes per element:
    bytes  2 L G D b per span (the KV, once per block of rows) + 2 n H D b (q and out)
    FLOPs  4 n H D L, half of it for a causal chunk without a prefix
One node or a small tree (n H / G below the ~300 FLOPs per byte a device has to offer) is bound by reading the KV; long
prefill chunks are bound by the tensor cores. Splitting adds 8 S n H D bytes for S splits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.batch import Span, StepBatch
from minispec.kernels._triton import cdiv, device, jit, power_of_2

if TYPE_CHECKING:
    import triton.language as tl


def tree_attention_ref(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch, scale: float) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        q: [rows, heads, head_dim], rotated.
        k_cache, v_cache: [kv_heads, positions, head_dim], one layer's cache; this step's rows are written already.
        batch: the step.
        scale: factor on the scores, usually ``head_dim ** -0.5``.

    Returns:
        [rows, heads, head_dim].
    """
    heads, head_dim = q.shape[1:]
    kv_heads = k_cache.shape[0]
    group = heads // kv_heads
    out = torch.empty_like(q)
    start = 0
    for span, bias in zip(batch.spans, batch.bias(q.dtype, group), strict=True):
        n = len(span.tokens)
        if n == 0:
            continue
        k, v = context(k_cache, span, batch.page_size), context(v_cache, span, batch.page_size)
        # Fold the query heads that share a KV head into the rows: one call serves GQA without repeating K and V.
        folded = q[start : start + n].view(n, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        folded = folded.reshape(1, kv_heads, group * n, head_dim)
        attended = F.scaled_dot_product_attention(folded, k[None], v[None], attn_mask=bias, scale=scale)
        out[start : start + n] = attended.view(kv_heads, group, n, head_dim).permute(2, 0, 1, 3).reshape(n, heads, -1)
        start += n
    return out


def context(cache: Tensor, span: Span, page_size: int) -> Tensor:
    """What a span sees: [kv_heads, num_cached + tree_size, head_dim]; in place where pages are consecutive."""
    length = span.num_cached + span.tree_size
    pages = span.pages[: -(-length // page_size)]
    first = pages[0]
    if all(page == first + i for i, page in enumerate(pages)):
        return cache[:, first * page_size : first * page_size + length]
    index = torch.tensor(pages, device=cache.device)[:, None] * page_size + torch.arange(page_size, device=cache.device)
    return cache[:, index.flatten()[:length]]


def tree_attention_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch, scale: float, *, splits: int | None = None
) -> Tensor:
    """Triton launcher; arguments as in the reference. Nothing is read back from the device.

    Args:
        k_cache, v_cache: may be narrower than q; what is loaded is converted to q's dtype.
        splits: parts of the KV length that run side by side; None fits the device. The grid depends on the number of
            rows and spans and on the page table's width only: a captured launch serves every batch of that size.
    """
    rows, heads, head_dim = q.shape
    spans, width = batch.page_table.shape
    kv_heads = k_cache.shape[0]
    group = heads // kv_heads
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    gpu = device(q)
    wide = q.element_size() == 4
    block_d = max(16, power_of_2(head_dim))
    # Large tiles for long chunks, small ones for trees: few idle lanes, and registers for what is loaded ahead. float32
    # runs on the plain cores, whose layouts need small ones throughout.
    largest = 16 if wide else 128 if block_d <= 128 else 64
    block_m = max(16, power_of_2(group), min(largest, power_of_2(cdiv(rows, spans) * group)))
    block_n = 16 if wide else (64 if block_d <= 128 else 32) >> (block_m >= 32 and not gpu.hopper)
    blocks = rows // (block_m // group) + spans
    if splits is None:
        splits = _fitting_splits(blocks * kv_heads, width * batch.page_size, gpu.processors)
    split = splits > 1
    # unsplit launches get `out` in their place; the kernel does not touch them
    partial = q.new_empty((splits, rows, heads, head_dim), dtype=torch.float32) if split else out
    lse = q.new_empty((splits, rows, heads), dtype=torch.float32) if split else out
    _tree_attention_kernel[(blocks, kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        lse,
        batch.row_start,
        batch.num_cached,
        batch.tree_size,
        batch.causal,
        batch.ancestors,
        batch.positions,
        batch.page_table,
        spans,
        scale * 1.4426950408889634,  # log2(e): powers of two are what the hardware computes
        batch.window or 0,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        width,
        batch.ancestors.shape[1],
        rows,
        heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        PAGE_SIZE=batch.page_size,
        WINDOW=batch.window is not None,
        SPLIT=split,
        PRECISION="ieee" if wide else "tf32",  # fp32 means fp32; 16-bit operands ignore it
        num_warps=8 if wide or block_m >= 128 or (block_m >= 32 and block_d > 128) else 4,
        num_stages=2,
    )
    if split:
        _combine_kernel[(rows, heads)](
            out,
            partial,
            lse,
            splits,
            rows,
            heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_S=power_of_2(splits),
            num_warps=4 if splits * block_d > 1024 else 1,
        )
    return out


def _fitting_splits(programs: int, keys: int, available: int) -> int:
    """Splits that give each multiprocessor about two programs, none with fewer than 256 keys of the longest context."""
    wanted = min(2 * available // programs, cdiv(keys, 256), 64)
    return 1 << max(wanted.bit_length() - 1, 0)


@jit
def _tree_attention_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    row_start: tl.tensor,
    num_cached: tl.tensor,
    tree_size: tl.tensor,
    causal: tl.tensor,
    ancestors: tl.tensor,
    positions: tl.tensor,
    page_table: tl.tensor,
    spans: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    cache_head: tl.tensor,
    cache_position: tl.tensor,
    width: tl.tensor,
    words: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program: BLOCK_M // GROUP rows of one span, all query heads of one KV head, one part of the keys.

    q, out [rows, heads, HEAD_DIM]; caches [kv_heads, positions, HEAD_DIM]; partial [splits, rows, heads, HEAD_DIM] and
    lse [splits, rows, heads] float32, lse in base 2; the rest as in StepBatch.
    """
    ROWS: tl.constexpr = BLOCK_M // GROUP
    block = tl.program_id(0)
    kv_head = tl.program_id(1)

    # Which span? Give span s the blocks from row_start[s] // ROWS + s on: at least as many as it needs, known without
    # counting. Search the last span that begins at or before this block.
    span = tl.full((), 0, tl.int32)
    behind = span + spans
    while span + 1 < behind:
        middle = (span + behind) // 2
        before = tl.load(row_start + middle) // ROWS + middle <= block
        span = tl.where(before, middle, span)
        behind = tl.where(before, behind, middle)
    first = tl.load(row_start + span)
    n = tl.load(row_start + span + 1) - first
    first_row = (block - first // ROWS - span) * ROWS
    if first_row >= n:
        return

    lane = tl.arange(0, BLOCK_M)
    row = first_row + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    live = (lane < ROWS * GROUP) & (row < n)
    d = tl.arange(0, BLOCK_D)
    d_inside = d < HEAD_DIM
    at = (first + row).to(tl.int64)
    q_tile = tl.load(
        q + (at * q_row + head * q_head)[:, None] + d[None, :], mask=live[:, None] & d_inside[None, :], other=0.0
    )

    prefix = tl.load(num_cached + span)
    size = tl.load(tree_size + span)
    is_causal = tl.load(causal + span).to(tl.int32) != 0
    newest = tl.where(is_causal, size - n + row, -1)  # last key past the prefix that a causal row sees
    words_seen = tl.where(live, tl.where(is_causal, 0, tl.cdiv(size, 32)), 0)
    last_row = tl.minimum(first_row + ROWS, n) - 1
    end = tl.where(is_causal, size - n + last_row + 1, size)  # keys past the prefix that this block of rows may see
    oldest = tl.full((BLOCK_M,), -1, tl.int32)  # a row sees keys at positions above it
    prefix_blocks = tl.cdiv(prefix, BLOCK_N)
    blocks = prefix_blocks + tl.cdiv(end, BLOCK_N)
    begin = tl.full((), 0, tl.int32)
    if WINDOW:
        oldest = tl.load(positions + at, mask=live, other=2147483647).to(tl.int32) - window
        nearest = tl.maximum(tl.min(oldest, 0) + 1, 0)
        past = tl.where(is_causal, (nearest - prefix) // BLOCK_N, 0)
        begin = tl.where(nearest < prefix, nearest // BLOCK_N, prefix_blocks + past)
    share = tl.cdiv(blocks - begin, tl.num_programs(2))
    begin += tl.program_id(2) * share
    blocks = tl.minimum(begin + share, blocks)

    k_head = k_cache + kv_head.to(tl.int64) * cache_head
    v_head = v_cache + kv_head.to(tl.int64) * cache_head
    table = page_table + span.to(tl.int64) * width
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    key_lane = tl.arange(0, BLOCK_N)

    for i in range(begin, tl.minimum(blocks, prefix_blocks)):
        keys = i * BLOCK_N + key_lane
        inside = keys < prefix
        visible = inside[None, :] & (keys[None, :] > oldest[:, None])
        top, total, acc = _attend(
            q_tile, k_head, v_head, table, keys, inside, visible, top, total, acc, scale, cache_position, d, d_inside,
            PAGE_SIZE, PRECISION,
        )  # fmt: skip

    # past the prefix the blocks are counted from its end, so that a block's ancestor bits lie in whole words
    for i in range(tl.maximum(begin, prefix_blocks), blocks):
        node = (i - prefix_blocks) * BLOCK_N + key_lane
        inside = node < end
        keys = prefix + node
        first_word = (i - prefix_blocks) * BLOCK_N // 32
        word = tl.load(ancestors + at * words + first_word, mask=first_word < words_seen, other=0)[:, None]
        if BLOCK_N == 64:
            other_half = tl.load(ancestors + at * words + first_word + 1, mask=first_word + 1 < words_seen, other=0)
            word = tl.where(key_lane[None, :] < 32, word, other_half[:, None])
        ancestor = ((word >> (node % 32)[None, :]) & 1) != 0
        before = (node[None, :] <= newest[:, None]) & (keys[None, :] > oldest[:, None])
        visible = inside[None, :] & (before | ancestor)
        top, total, acc = _attend(
            q_tile, k_head, v_head, table, keys, inside, visible, top, total, acc, scale, cache_position, d, d_inside,
            PAGE_SIZE, PRECISION,
        )  # fmt: skip

    # a row may see no key of this split: total is 0 there, and its lse says so
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        at += tl.program_id(2).to(tl.int64) * rows
        tl.store(
            lse + at * heads + head,
            tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-30)), float("-inf")),
            mask=live,
        )
        out = partial
    target = out + ((at * heads + head) * HEAD_DIM)[:, None] + d[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=live[:, None] & d_inside[None, :])


@jit
def _attend(
    q_tile: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    table: tl.tensor,
    keys: tl.tensor,
    inside: tl.tensor,
    visible: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    scale: tl.tensor,
    cache_position: tl.tensor,
    d: tl.tensor,
    d_inside: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One block of keys into the running maximum, sum and weighted values (online softmax)."""
    page = tl.load(table + keys // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    offset = ((page * PAGE_SIZE + keys % PAGE_SIZE) * cache_position)[:, None] + d[None, :]
    loaded = inside[:, None] & d_inside[None, :]
    k = tl.load(k_head + offset, mask=loaded, other=0.0).to(q_tile.dtype)
    scores = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet: -inf - -inf would be NaN
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    v = tl.load(v_head + offset, mask=loaded, other=0.0).to(q_tile.dtype)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return new_top, total * fade + tl.sum(weights, 1), acc


@jit
def _combine_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    splits: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """One program: one row and head. out = sum_s 2^lse[s] partial[s] / sum_s 2^lse[s]."""
    at = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    split = s.to(tl.int64) * rows * heads + at
    log = tl.load(lse + split, mask=s < splits, other=float("-inf"))
    weights = tl.exp2(log - tl.max(log, 0))
    # what an empty split left unwritten is not read: 0 * NaN would be NaN
    used = (log > float("-inf"))[:, None] & (d < HEAD_DIM)[None, :]
    parts = tl.load(partial + (split * HEAD_DIM)[:, None] + d[None, :], mask=used, other=0.0)
    mixed = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + at * HEAD_DIM + d, mixed.to(out.dtype.element_ty), mask=d < HEAD_DIM)

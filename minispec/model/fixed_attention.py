"""Attention on a CPU whose result for a row depends on the keys it sees, in order of position, and on nothing else.

    out[r] = softmax(scale * q[r] K[visible(r)]^T) V[visible(r)]

The same bits come out whether a token is decoded alone, is a node of a tree, or is read in a chunk of a prompt, whoever
shares the step. What makes it so:

- Scores are float32 products over ``head_dim``: one sum each, made alike whatever the number of rows (from
  ``_LEAST`` on) and of keys.
- Keys are cut into tiles of ``TILE`` *positions*. Within a tile a float32 product sums key by key in ascending order,
  and a key that is not seen adds an exact zero: where in the tree region a path's nodes lie makes no difference.
- The tiles' sums are added, and divided by the softmax's sum, in float64. Adding float32 numbers there is exact unless
  they differ by more than 2^29; otherwise the order shows at 1e-16, 13 digits below what bfloat16 keeps.

That a matrix product sums this way is a property of the BLAS at hand; ``check`` tries it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.batch import StepBatch
from minispec.errors import ConfigError
from minispec.kernels.tree_attention import context
from minispec.tree import MAX_NODES

TILE = 128
"""Positions per tile. A tile and the largest tree lie in one product; from 384 keys on MKL splits its sums."""

_LEAST = 16
"""Products of fewer rows or keys take other paths through the BLAS."""

_BLOCK = 64
"""Rows at a time: bounds the scores' memory and, in chunks, leaves out most keys that none of them sees."""


@dataclass(frozen=True)
class _Block:
    """Some rows of a span, and the keys they see.

    Attributes:
        span: index of the span.
        first, count: its rows, counted over the whole step.
        keys: keys from the span's first position on that some row may see.
        full: of them, the first ``full`` lie in whole tiles that every row sees, but for a sliding window.
        bias: [group * count, keys - from_key] float32 added to the scores of the last keys: 0, or -inf where unseen.
        from_key: the first key that ``bias`` is about.
        tiles: for each further tile, [keys - full] float32: 1 for its keys, 0 for others. None where there is one tile.
    """

    span: int
    first: int
    count: int
    keys: int
    full: int
    bias: Tensor | None
    from_key: int
    tiles: tuple[Tensor, ...] | None


def fixed_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch, scale: float) -> Tensor:
    """As ``kernels.tree_attention``.

    Args:
        q: [rows, heads, head_dim], rotated.
        k_cache, v_cache: [kv_heads, positions, head_dim], one layer's cache; this step's rows are written already.
        batch: the step.
        scale: factor on the scores.

    Returns:
        [rows, heads, head_dim] in q's dtype.
    """
    heads, head_dim = q.shape[1:]
    kv_heads = k_cache.shape[0]
    group = heads // kv_heads
    key = "fixed_attention", group
    if key not in batch.memo:
        batch.memo[key] = _blocks(batch, group)
    out = torch.empty_like(q)
    span, k, v = -1, k_cache, v_cache
    for block in batch.memo[key]:
        if block.span != span:
            span = block.span
            k = context(k_cache, batch.spans[span], batch.page_size).float()
            v = context(v_cache, batch.spans[span], batch.page_size).float()
        rows = slice(block.first, block.first + block.count)
        # the query heads that share a KV head become further rows, as in tree_attention_ref
        folded = q.new_zeros((kv_heads, max(group * block.count, _LEAST), head_dim), dtype=torch.float32)
        mine = folded[:, : group * block.count].view(kv_heads, group, block.count, head_dim)
        mine.copy_(q[rows].view(block.count, kv_heads, group, head_dim).permute(1, 2, 0, 3))
        attended = _attend(folded.mul_(scale), k[:, : block.keys], v[:, : block.keys], block)
        attended = attended[:, : group * block.count].view(kv_heads, group, block.count, head_dim)
        out[rows].view(block.count, kv_heads, group, head_dim).copy_(attended.permute(2, 0, 1, 3))
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, block: _Block) -> Tensor:
    """q [kv_heads, rows, head_dim], k and v [kv_heads, keys, head_dim], float32; gives q's shape in float64."""
    weights = torch.bmm(q, F.pad(k, (0, 0, 0, max(_LEAST - block.keys, 0))).transpose(1, 2))[:, :, : block.keys]
    if block.bias is not None:
        weights[:, : block.bias.shape[0], block.from_key :] += block.bias
    # the maximum is the same in any order
    weights.sub_(weights.amax(-1, keepdim=True)).exp_()
    kv_heads, rows, _ = weights.shape
    full, head_dim = block.full, v.shape[2]
    rest, rest_v = weights[:, :, full:], v[:, full:]
    parts = [(rest, rest_v)] if block.tiles is None else [(rest * tile, rest_v) for tile in block.tiles]
    total = torch.zeros((kv_heads, rows), dtype=torch.float64)
    value = torch.zeros((kv_heads, rows, head_dim), dtype=torch.float64)
    for part, part_v in parts:
        value += torch.bmm(part, part_v)
        total += part.sum(-1, dtype=torch.float64)
    if full:
        tiles = full // TILE
        part = weights[:, :, :full].unflatten(-1, (tiles, TILE)).transpose(1, 2)
        of_tile = torch.bmm(part.reshape(-1, rows, TILE), v[:, :full].reshape(-1, TILE, head_dim))
        value += of_tile.view(kv_heads, tiles, rows, head_dim).sum(1, dtype=torch.float64)
        total += part.sum((1, 3), dtype=torch.float64)
    return value.div_(total[:, :, None])


def _blocks(batch: StepBatch, group: int) -> list[_Block]:
    """The step's rows in blocks; made once for all layers."""
    blocks = []
    start = 0
    for index, (span, visible) in enumerate(zip(batch.spans, batch.visible, strict=True)):
        n, prefix = len(span.tokens), span.num_cached
        # Where keys lie in the text. Those that an earlier forward of the same tree wrote are taken to be a chain: only
        # drafters grow trees so, and what they draft need not be the same in any company.
        past = torch.tensor([*range(span.first_key), *span.depths], dtype=torch.int64) + prefix
        tile_of = torch.cat([torch.arange(prefix), past]) // TILE
        for row in range(0, n, _BLOCK):
            count = min(_BLOCK, n - row)
            seen, keys = prefix, prefix + span.tree_size
            if span.ancestors is None:  # all rows of a chunk's block see the chunk up to the block
                seen += span.first_key + row
                keys = seen + count
            full = seen // TILE * TILE
            from_key = full if batch.window is None else 0
            bias = None
            if visible is not None and not (mask := visible[row : row + count, from_key:keys]).all():
                bias = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf")).repeat(group, 1)
            tile = tile_of[full:keys]
            tiles = tile.unique().tolist()
            blocks.append(
                _Block(
                    span=index,
                    first=start + row,
                    count=count,
                    keys=keys,
                    full=full,
                    bias=bias,
                    from_key=from_key,
                    tiles=None if len(tiles) == 1 else tuple((tile == one).float() for one in tiles),
                )
            )
        start += n
    return blocks


def check(kv_heads: int, head_dim: int, group: int) -> None:
    """Whether products of float32 matrices on this machine sum as described above.

    Raises:
        ConfigError: they do not.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    longest = TILE - 1 + MAX_NODES
    most = max(group * _BLOCK, _LEAST)
    q, k, v = random(kv_heads, most, head_dim), random(kv_heads, 4 * TILE, head_dim), random(kv_heads, TILE, head_dim)
    scores, weights = torch.bmm(q, k.transpose(1, 2)), random(kv_heads, most, TILE)
    values = torch.bmm(weights, v)
    same = True
    for rows in sorted({max(group * count, _LEAST) for count in range(1, _BLOCK + 1)}):
        some = rows in (_LEAST, most) or rows // group in (12, 33)
        for keys in (_LEAST, _LEAST + 1, 33, TILE, TILE + 5, 4 * TILE) if some else (TILE + 5,):
            same &= torch.equal(torch.bmm(q[:, :rows], k[:, :keys].transpose(1, 2)), scores[:, :rows, :keys])
        for width in (TILE, TILE + 33, longest) if some else (TILE + 33,):
            # a path spread over the tree, with keys between that are not seen
            spread = torch.randperm(width, generator=generator)[:TILE].sort().values
            wide, wide_v = torch.zeros(kv_heads, rows, width), random(kv_heads, width, head_dim)
            wide[:, :, spread], wide_v[:, spread] = weights[:, :rows], v
            same &= torch.equal(torch.bmm(wide, wide_v), values[:, :rows])
        for few in (1, 2, 3, 9) if some else ():
            alone = torch.bmm(weights[:, :rows, :few], v[:, :few])
            padded = torch.bmm(F.pad(weights[:, :rows, :few], (0, TILE - few)), v)
            same &= torch.equal(alone, padded)
    if not same:
        raise ConfigError(
            "--deterministic cannot be had on this machine: its matrix library sums in an order that depends on the "
            "shapes. Leave it out, or use a build of torch with MKL"
        )

"""Argmax and top-k of long rows on a CPU, in two passes: the maxima of blocks first, then the few blocks that matter.

Torch's maxima without an index are vectorised; its argmax and top-k walk a row one by one. 32 rows of 49,152 float32
take 0.3 ms instead of 2.7 for the argmax and 0.5 instead of 2.8 for the best eight.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ARGMAX_BLOCK = 256
_TOP_BLOCK = 64


def argmax(x: Tensor) -> Tensor:
    """``x.argmax(-1)``: [rows] int64, the first of equals.

    Args:
        x: [rows, columns] of any float dtype.
    """
    columns, block = x.shape[1], _ARGMAX_BLOCK
    if columns < 4 * block:
        return x.argmax(-1)
    best = _maxima(x, block).argmax(-1, keepdim=True)
    # the last block may be short; its window reaches back to columns that are smaller, or their block would be the best
    start = (best * block).clamp(max=columns - block)
    window = x.gather(1, start + torch.arange(block, device=x.device))
    return window.argmax(-1) + start[:, 0]


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``x.topk(k)``: (values, indices), both [rows, k], best first; equals in any order.

    Args:
        x: [rows, columns] of any float dtype.
        k: at most columns.
    """
    columns, block = x.shape[1], _TOP_BLOCK
    if k * block * 2 > columns:
        values, indices = x.topk(k, dim=-1)
        return values, indices
    # the k largest lie in the k blocks with the largest maxima
    blocks = _maxima(x, block).topk(k, dim=-1, sorted=False).indices
    at = (blocks[:, :, None] * block + torch.arange(block, device=x.device)).flatten(1)
    window = x.gather(1, at.clamp(max=columns - 1)).masked_fill_(at >= columns, float("-inf"))
    values, indices = window.topk(k, dim=-1)
    return values, at.gather(1, indices)


def _maxima(x: Tensor, block: int) -> Tensor:
    """[rows, blocks]: the largest of each ``block`` columns; the last block may be shorter."""
    whole = x.shape[1] // block
    maxima = x[:, : whole * block].unflatten(1, (whole, block)).amax(-1)
    if whole * block < x.shape[1]:
        maxima = torch.cat([maxima, x[:, whole * block :].amax(-1, keepdim=True)], dim=1)
    return maxima

"""The shapes the kernels are compiled for: every dtype and head size they claim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from minispec.batch import Span, StepBatch
from minispec.kernels.tree_attention import tree_attention_triton

Case = tuple[str, Callable[[], object]]

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def cases(*, quick: bool) -> Iterator[Case]:
    """Named calls of launchers on tensors without storage.

    Args:
        quick: a representative subset.
    """
    yield from _attention(quick)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _step(rows: int, page_size: int = 32, window: int | None = None) -> StepBatch:
    span = Span.chunk(range(rows), range(4096 // page_size), 2048, sample_last=True)
    return StepBatch.build([span], page_size, "meta", window)


def _attend(dtype: torch.dtype, head_dim: int, rows: int, window: int | None, splits: int) -> None:
    batch = _step(rows, window=window)
    q = _empty(rows, 32, head_dim, dtype=dtype)
    cache = _empty(8, 4096, head_dim, dtype=dtype)
    tree_attention_triton(q, cache, cache, batch, head_dim**-0.5, splits=splits)


def _attention(quick: bool) -> Iterator[Case]:
    combinations = [
        (dtype, head_dim, rows, window, splits)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for head_dim in (64, 80, 96, 128, 256)
        for rows, window, splits in ((1, None, 8), (8, None, 1), (16, 4096, 1), (512, None, 1))
    ]
    if quick:
        combinations = [
            (torch.bfloat16, 128, 1, None, 8),
            (torch.float16, 80, 512, None, 1),
            (torch.float32, 256, 16, 4096, 1),
        ]
    for dtype, head_dim, rows, window, splits in combinations:
        name = f"tree_attention {_SHORT[dtype]} d={head_dim} rows={rows}"
        name += (f" window={window}" if window else "") + (f" splits={splits}" if splits > 1 else "")
        yield name, partial(_attend, dtype, head_dim, rows, window, splits)

"""Memory for what a call of the library writes and nobody keeps."""

from __future__ import annotations

import torch
from torch import Tensor

_MOST = 1 << 24
"""Bytes; what is larger, for prompts that are to be scored, is not kept."""


class Scratch:
    """Rows that are written again and again: the first call into torch behind a forward, such as for a new tensor,
    takes 50 µs (``upload.tensor_of`` says why).

    Args:
        width: of a row.
        dtype: of its entries.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._memory = torch.empty((0, width), dtype=dtype)
        self._views: dict[int, tuple[Tensor, int]] = {}

    def __call__(self, rows: int) -> tuple[Tensor, int]:
        """[rows, width], and its address. The content is what it happens to be; the next call gives the same memory."""
        view = self._views.get(rows)
        if view is None:
            memory = self._memory
            if rows > len(memory):
                memory = torch.empty((rows, memory.shape[1]), dtype=memory.dtype)
                if memory.nbytes > _MOST:
                    return memory, memory.data_ptr()
                self._memory = memory
                self._views.clear()
            view = self._views[rows] = memory[:rows], memory.data_ptr()
        return view

"""A graph capture for machines without a GPU: replaying calls the captured function again, over the same buffers.

While it runs, nothing but the tensors of the batch is known, as on a GPU: attention is computed from them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minispec import kernels
from minispec.batch import StepBatch


class FakeGraphs:
    """Counts what was captured and replayed."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        launch()

        def replay() -> None:
            self.replayed += 1
            launch()

        return replay


def attention_from_tensors(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: StepBatch, scale: float) -> Tensor:
    """What the kernel computes, read off the batch's tensors. Rows of no span are poisoned."""
    out = torch.full_like(q, float("nan"))
    starts, size = batch.row_start.tolist(), batch.page_size
    for span, (first, end) in enumerate(pairwise(starts)):
        n = end - first
        if n == 0:
            continue
        cached, nodes = int(batch.num_cached[span]), int(batch.tree_size[span])
        key = torch.arange(cached + nodes)
        index = batch.page_table[span, key // size].long() * size + key % size
        node = key - cached
        if batch.causal[span]:
            visible = node <= torch.arange(nodes - n, nodes)[:, None]
            aligned = key
        else:
            words = batch.ancestors[first:end]
            bits = (words[:, node.clamp(min=0) // 32] >> (node.clamp(min=0) % 32)) & 1 == 1
            visible = (node < 0) | bits
            aligned = torch.where(node < 0, key, 1 << 30)  # the window was applied to the words
        if batch.window is not None:
            visible = visible & (aligned > batch.positions[first:end, None] - batch.window)
        group = q.shape[1] // k_cache.shape[0]
        k, v = (cache[:, index].repeat_interleave(group, 0) for cache in (k_cache, v_cache))
        mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
        out[first:end] = F.scaled_dot_product_attention(
            q[first:end].transpose(0, 1), k, v, attn_mask=mask, scale=scale
        ).transpose(0, 1)
    return out


class HostReads:
    """Counts reads of tensors by the host, outside of kernels and graphs."""

    METHODS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._on_device = 0
        for name in self.METHODS:
            patch.setattr(Tensor, name, self._counted(getattr(Tensor, name)))
        for name in ("sample", "verify", "kv_commit_path", "kv_commit", "top_children", "tree_attention"):
            patch.setattr(kernels, name, self.device(getattr(kernels, name)))

    def device(self, fn: Callable) -> Callable:
        """``fn`` as something that a GPU does: its reads do not count."""

        def run(*args, **kwargs):
            with self.on_device():
                return fn(*args, **kwargs)

        return run

    @contextmanager
    def on_device(self):
        self._on_device += 1
        try:
            yield
        finally:
            self._on_device -= 1

    def _counted(self, method: Callable) -> Callable:
        def read(*args, **kwargs):
            self.count += not self._on_device
            return method(*args, **kwargs)

        return read

"""HeadRunner: an EAGLE head with its cache, and what computes its forwards, which may change while it is in use."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from minispec import kernels
from minispec.batch import Span, StepBatch
from minispec.drafters.eagle_head import EagleHead
from minispec.drafters.grow import Best, fetched
from minispec.kv_cache import KVCache
from minispec.model.llama import Tapped, features_of
from minispec.upload import tensor_of, upload


class HeadForward(Protocol):
    """One way to compute a head's forwards."""

    def fuse(self, tapped: Sequence[Tapped]) -> Tensor:
        """``EagleHead.fuse`` of rows of the target's hidden states: [rows, hidden], good until the next call."""

    def __call__(
        self, batch: StepBatch, gaps: Sequence[int], hidden: Tensor, rows: Sequence[int] | None, kv: KVCache
    ) -> tuple[Tensor, Tensor]:
        """Run the rows of ``batch`` and write their KV.

        Args:
            batch: tokens one position further than ``hidden``; its positions are places in the cache.
            gaps: per span, how much further on in the text its positions are: not 0 where the head remembers less than
                all of it.
            hidden: [n, hidden], contiguous: ``EagleHead.fuse``'s h, or the g of the last forward.
            rows: which of them each row reads; None is all in order.
            kv: the head's cache.

        Returns:
            g [samples, hidden] and float32 logits [samples, ``vocabulary.size``] of the sampled rows, good until the
            next call; g may be handed to it.
        """

    def best(self, logits: Tensor, k: int) -> Best:
        """The k likeliest of each row of a forward's logits: the target's ids and log-probabilities. A row that is not
        finite has NaN for values; k is at most the row's length."""


class EagerHead:
    """Forwards in torch."""

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        self._scale = head.config.layer.head_dim**-0.5

    @torch.inference_mode()
    def fuse(self, tapped: Sequence[Tapped]) -> Tensor:
        return self._head.fuse(features_of(tapped))

    @torch.inference_mode()
    def __call__(
        self, batch: StepBatch, gaps: Sequence[int], hidden: Tensor, rows: Sequence[int] | None, kv: KVCache
    ) -> tuple[Tensor, Tensor]:
        if rows is not None:
            # not by advanced indexing, which wakes torch's threads, and they spin where a compiled step wants to run
            hidden = hidden.index_select(0, tensor_of(array("q", rows)).to(hidden.device))
        positions = batch.positions
        if any(gaps):
            [positions] = upload([tensor_of(batch.positions_after(gaps))], batch.device)
        cos, sin = self._head.rope.cos_sin(positions)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = kernels.rope_kv_write(q, k, v, cos, sin, kv.k[layer], kv.v[layer], batch)
            return kernels.tree_attention(q, kv.k[layer], kv.v[layer], batch, self._scale)

        g = self._head.forward(batch.tokens, hidden, attend)[batch.sample_rows]
        return g, self._head.logits(g)

    @torch.inference_mode()
    def best(self, logits: Tensor, k: int) -> Best:
        # what a row without numbers gives is undefined, so it is kept from the kernel
        finite = logits.amax(-1, keepdim=True).isfinite()
        tokens, values = kernels.top_logprobs(logits.where(finite, 0.0), k)
        return fetched(self._head.vocabulary.targets(tokens), values.where(finite, math.nan))


class HeadRunner:
    """Runs rows of one head.

    Attributes:
        head: the weights.
        kv: its cache, one layer per decoder layer of the head.
        device: where it runs.
    """

    def __init__(self, head: EagleHead, *, pages: int, page_size: int) -> None:
        shape = head.config.layer
        self.head = head
        self.device = head.device
        self.kv = KVCache(
            layers=shape.num_layers,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            pages=pages,
            page_size=page_size,
            dtype=head.dtype,
            device=head.device,
        )
        self._forward: HeadForward = EagerHead(head)

    def use(self, forward: HeadForward) -> None:
        """Compute with ``forward`` from the next call on. May be called from any thread."""
        self._forward = forward

    def fuse(self, tapped: Sequence[Tapped]) -> Tensor:
        """As ``HeadForward.fuse``."""
        return self._forward.fuse(tapped)

    def forward(
        self, spans: Sequence[Span], gaps: Sequence[int], hidden: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the rows of ``spans`` in one pass and write their KV.

        Args:
            spans: the rows, in the places of the cache.
            gaps: per span, how much further on in the text its positions are.
            hidden, rows: as ``HeadForward`` has them, and the result too.
        """
        batch = StepBatch.build(spans, self.kv.page_size, self.device)
        return self._forward(batch, gaps, hidden, rows, self.kv)

    def best(self, logits: Tensor, k: int) -> Best:
        """As ``HeadForward.best``."""
        return self._forward.best(logits, k)

"""StepBatch: everything the model and the kernels see of a step, built once on the host and then frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from minispec.tree import DraftTree
from minispec.upload import upload

WORD_BITS = 32
"""Bits per ancestor word."""


@dataclass(frozen=True)
class Span:
    """One slot's rows in a step: a causal chunk of the text, or nodes of a tree.

    Row ``i`` writes its KV at logical position ``num_cached + first_key + i`` of the slot's pages.

    Attributes:
        tokens: token ids, one per row.
        pages: the slot's pages, in logical order; they cover ``num_cached + tree_size`` positions.
        num_cached: length of the committed prefix, which every row sees.
        depths: distance of each row's token from the first position past the prefix; its position is
            ``num_cached + depths[i]``, whatever its index.
        ancestors: bit mask per row over the keys past the prefix: bit ``j`` is set iff the row sees key
            ``num_cached + j``. None for a causal chunk, where row ``i`` sees keys ``0..first_key + i``.
        samples: the rows whose logits are wanted, ascending.
        first_key: keys past the prefix that earlier forwards of the same tree wrote (drafters grow trees by layers).
    """

    tokens: Sequence[int]
    pages: Sequence[int]
    num_cached: int
    depths: Sequence[int]
    ancestors: Sequence[int] | None
    samples: Sequence[int]
    first_key: int = 0

    @staticmethod
    def chunk(
        tokens: Sequence[int], pages: Sequence[int], num_cached: int, *, sample_last: bool, sample_all: bool = False
    ) -> Span:
        """A run of text behind the prefix. Sampled are all its rows, the last, or none."""
        n = len(tokens)
        samples = range(n) if sample_all else range(n - 1, n) if sample_last else ()
        return Span(tokens, pages, num_cached, range(n), None, samples)

    @staticmethod
    def tree(tree: DraftTree, pages: Sequence[int], num_cached: int) -> Span:
        """A whole tree; every node is sampled. The tree with one node is a chunk of one token."""
        if len(tree) == 1:
            return Span.chunk(tree.tokens, pages, num_cached, sample_last=True)
        return Span(tree.tokens, pages, num_cached, tree.depth, tree.ancestors, range(len(tree)))

    @property
    def tree_size(self) -> int:
        """Keys past the committed prefix that this step's rows may see."""
        return self.first_key + len(self.tokens)


@dataclass(frozen=True)
class StepBatch:
    """The rows of all spans, one behind the other.

    Attributes:
        spans: host copy of what the batch was built from.
        page_size: positions per page.
        window: sliding window in positions, or None: a row at position p sees keys at positions > p - window.
        tokens: [rows] int64.
        positions: [rows] int64, committed length + depth.
        kv_index: [rows] int64, where each row's KV is written.
        row_start: [spans + 1] int32, first row of each span and the total.
        num_cached: [spans] int32, committed prefix of each span.
        tree_size: [spans] int32, keys past the prefix.
        causal: [spans] bool, True where row i of n sees keys 0..tree_size - n + i past the prefix.
        ancestors: [rows, words] int32 bit words for the other spans: bit ``j % 32`` of word ``j // 32`` says whether
            the row sees key ``num_cached + j``; zero in causal rows. With a window, nodes outside it are cleared.
        page_table: [spans, pages] int32, padded with 0.
        sample_rows: [samples] int64, rows whose logits are wanted.
    """

    spans: tuple[Span, ...]
    page_size: int
    window: int | None
    tokens: Tensor
    positions: Tensor
    kv_index: Tensor
    row_start: Tensor
    num_cached: Tensor
    tree_size: Tensor
    causal: Tensor
    ancestors: Tensor
    page_table: Tensor
    sample_rows: Tensor

    @staticmethod
    def build(
        spans: Sequence[Span], page_size: int, device: torch.device | str = "cpu", window: int | None = None
    ) -> StepBatch:
        """Lay the spans out as tensors on ``device``."""
        tokens: list[int] = []
        positions: list[int] = []
        kv_index: list[int] = []
        row_start = [0]
        sample_rows: list[int] = []
        words = max((-(-s.tree_size // WORD_BITS) for s in spans if s.ancestors is not None), default=1)
        ancestors: list[bytes] = []
        width = max((len(s.pages) for s in spans), default=0)
        for span in spans:
            start = span.num_cached + span.first_key
            tokens += span.tokens
            positions += (span.num_cached + d for d in span.depths)
            kv_index += (
                span.pages[p // page_size] * page_size + p % page_size for p in range(start, start + len(span.tokens))
            )
            sample_rows += (row_start[-1] + r for r in span.samples)
            row_start.append(len(tokens))
            for i in range(len(span.tokens)):
                bits = 0 if span.ancestors is None else span.ancestors[i]
                if window is not None and bits:
                    bits = _within_window(bits, window)
                ancestors.append(bits.to_bytes(words * WORD_BITS // 8, "little"))

        fields = upload(
            [
                torch.tensor(tokens, dtype=torch.int64),
                torch.tensor(positions, dtype=torch.int64),
                torch.tensor(kv_index, dtype=torch.int64),
                torch.tensor(row_start, dtype=torch.int32),
                torch.tensor([s.num_cached for s in spans], dtype=torch.int32),
                torch.tensor([s.tree_size for s in spans], dtype=torch.int32),
                torch.tensor([s.ancestors is None for s in spans], dtype=torch.bool),
                _int32(b"".join(ancestors)).view(len(tokens), words),
                torch.tensor([[*s.pages, *[0] * (width - len(s.pages))] for s in spans], dtype=torch.int32).view(
                    len(spans), width
                ),
                torch.tensor(sample_rows, dtype=torch.int64),
            ],
            device,
        )
        return StepBatch(tuple(spans), page_size, window, *fields)

    @cached_property
    def visible(self) -> tuple[Tensor | None, ...]:
        """Per span: bool [rows, num_cached + tree_size], which keys each row sees; None where it sees all of them.

        The dense form of the mask, for the torch references; built once a step and shared by all layers.
        """
        return tuple(self._visible(i) for i in range(len(self.spans)))

    def bias(self, dtype: torch.dtype, repeat: int) -> tuple[Tensor | None, ...]:
        """``visible`` as an additive mask: per span [repeat * rows, keys] of ``dtype``, 0 where seen, -inf elsewhere.

        Built once a step for all layers. On a CPU attention is faster with it than with a boolean mask.
        """
        key = dtype, repeat
        if key not in self._biases:
            self._biases[key] = tuple(
                None
                if mask is None
                else torch.zeros(mask.shape, dtype=dtype, device=mask.device)
                .masked_fill_(~mask, float("-inf"))
                .repeat(repeat, 1)
                for mask in self.visible
            )
        return self._biases[key]

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What is derived from the batch once a step and shared by all layers, under keys of those who derive it."""
        return {}

    @cached_property
    def _biases(self) -> dict[tuple[torch.dtype, int], tuple[Tensor | None, ...]]:
        return {}

    def _visible(self, index: int) -> Tensor | None:
        span = self.spans[index]
        n, prefix, size = len(span.tokens), span.num_cached, span.tree_size
        start = sum(len(s.tokens) for s in self.spans[:index])
        if n == 1 and span.ancestors is None and (self.window is None or prefix + size <= self.window):
            return None
        device = self.tokens.device
        keys = torch.arange(size, device=device)
        if span.ancestors is None:
            tree = keys <= torch.arange(span.first_key, size, device=device)[:, None]
        else:
            tree = (self.ancestors[start : start + n][:, keys // WORD_BITS] >> (keys % WORD_BITS)) & 1 == 1
        mask = torch.cat([tree.new_ones(n, prefix), tree], dim=1)
        if self.window is not None:
            oldest = self.positions[start : start + n, None] - self.window
            # keys past a causal prefix lie at their own position; a tree's were cleared in its ancestor words
            bound = prefix + size if span.ancestors is None else prefix
            mask[:, :bound] &= torch.arange(bound, device=device) > oldest
        return mask


def _int32(data: bytes) -> Tensor:
    """Bytes as words of 32 bits, as they lie in memory: every machine with a GPU is little-endian."""
    return torch.frombuffer(bytearray(data), dtype=torch.int32) if data else torch.empty(0, dtype=torch.int32)


def _within_window(bits: int, window: int) -> int:
    """Keep the ``window`` nearest ancestors: along a path each ancestor is one position further away."""
    kept = 0
    for _ in range(window):
        if not bits:
            break
        top = 1 << (bits.bit_length() - 1)
        kept |= top
        bits ^= top
    return kept

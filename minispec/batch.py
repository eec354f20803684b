"""StepBatch: everything the model and the kernels see of a step, built once on the host and then frozen."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import add
from typing import Any

import torch
from torch import Tensor

from minispec.tree import DraftTree
from minispec.upload import OnDemand

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


@dataclass(frozen=True, eq=False)
class StepBatch(OnDemand):
    """The rows of all spans, one behind the other. The compiled step of a CPU reads ``arrays``, others the tensors.

    Attributes:
        spans: host copy of what the batch was built from.
        page_size: positions per page.
        window: sliding window in positions, or None: a row at position p sees keys at positions > p - window.
        words: 32-bit words per row of ``ancestors``.
        arrays, device: see ``OnDemand``; of a batch that was made of tensors the arrays are empty.
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
    words: int
    arrays: dict[str, array[int]]
    device: torch.device | str
    tokens: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    kv_index: Tensor = field(init=False)
    row_start: Tensor = field(init=False)
    num_cached: Tensor = field(init=False)
    tree_size: Tensor = field(init=False)
    causal: Tensor = field(init=False)
    ancestors: Tensor = field(init=False)
    page_table: Tensor = field(init=False)
    sample_rows: Tensor = field(init=False)

    @staticmethod
    def build(
        spans: Sequence[Span], page_size: int, device: torch.device | str = "cpu", window: int | None = None
    ) -> StepBatch:
        """Lay the spans out."""
        tokens, positions, kv_index, sample_rows = array("q"), array("q"), array("q"), array("q")
        row_start, page_table = array("i", [0]), array("i")
        ancestors: list[bytes] = []
        words = max([-(-s.tree_size // WORD_BITS) for s in spans if s.ancestors is not None], default=1)
        width = max([len(s.pages) for s in spans], default=0)
        size = words * WORD_BITS // 8
        for span in spans:
            first, pages = len(tokens), span.pages
            tokens.extend(span.tokens)
            positions.extend([span.num_cached + depth for depth in span.depths])
            key, end = span.num_cached + span.first_key, span.num_cached + span.tree_size
            while key < end:  # a page at a time
                page, offset = divmod(key, page_size)
                index, count = pages[page] * page_size + offset, min(page_size - offset, end - key)
                kv_index.extend(range(index, index + count))
                key += count
            sample_rows.extend([first + row for row in span.samples])
            row_start.append(len(tokens))
            if span.ancestors is None:
                ancestors.append(bytes(len(span.tokens) * size))
            else:
                seen = span.ancestors
                if window is not None:
                    seen = [_within_window(bits, window) for bits in seen]
                ancestors += [bits.to_bytes(size, "little") for bits in seen]
            page_table.extend(pages)
            page_table.extend([0] * (width - len(pages)))
        arrays = {
            "tokens": tokens,
            "positions": positions,
            "kv_index": kv_index,
            "row_start": row_start,
            "num_cached": array("i", [s.num_cached for s in spans]),
            "tree_size": array("i", [s.tree_size for s in spans]),
            "causal": array("b", [s.ancestors is None for s in spans]),
            # as words lie in memory: every machine with a GPU is little-endian
            "ancestors": array("i", b"".join(ancestors)),
            "page_table": page_table,
            "sample_rows": sample_rows,
        }
        return StepBatch(tuple(spans), page_size, window, words, arrays, device)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.arrays["tokens"])

    @property
    def samples(self) -> int:
        """Number of rows whose logits are wanted."""
        return len(self.arrays["sample_rows"])

    def positions_after(self, gaps: Sequence[int]) -> array[int]:
        """``positions``, on the host, moved on by a gap per span."""
        places = self.arrays["positions"]
        if not any(gaps):
            return places
        shifts = [gap for span, gap in zip(self.spans, gaps, strict=True) for _ in span.tokens]
        return array("q", map(add, places, shifts))

    @staticmethod
    def of_tensors(page_size: int, window: int | None, tensors: Sequence[Tensor]) -> StepBatch:
        """A batch without spans, of tensors in the order of the attributes."""
        batch = StepBatch((), page_size, window, tensors[7].shape[1], {}, tensors[0].device)
        batch.__dict__.update(zip(_TENSORS, tensors, strict=True))
        return batch

    def shape(self, name: str) -> tuple[int, ...]:
        if name == "ancestors":
            return len(self.arrays["tokens"]), self.words
        if name == "page_table":
            return len(self.spans), max([len(span.pages) for span in self.spans], default=0)
        return super().shape(name)

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


_TENSORS = tuple(field.name for field in fields(StepBatch) if not field.init)

"""CapturedRunner: forwards replayed as CUDA graphs, with the batch in buffers that stay where they are.

Launching the few hundred kernels of a decode step from Python takes longer than a GPU takes to run them. A graph
launches all of them at once, but with the addresses and sizes it was captured with. So there is one graph per *bucket*,
a number of rows and spans, and a smaller step is padded:

- A row of padding belongs to no span, so that attention skips it; what it computes is nobody's. It writes its KV into a
  page behind the pool's, which no slot owns.
- A span of padding has no rows.
- The page table is as wide as the longest context; entries behind a span's own are not read.

Attention reads lengths from the device, so one graph serves any context. Steps that fit no bucket, such as long prefill
chunks, run eagerly: their launches hide behind the work they start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minispec.batch import WORD_BITS, Span, StepBatch
from minispec.model.llama import Llama, Taps
from minispec.runner import ModelRunner
from minispec.tree import MAX_NODES
from minispec.upload import Packing

log = logging.getLogger(__name__)

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Record what a function launches; the result launches it again. The function may be run on the way."""

MAX_ROWS = 256
"""Most rows of a captured step, unless told otherwise."""


class CudaGraphs:
    """Captures into one memory pool: graphs never run side by side, so all may use the same memory in between."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        # Once for real first: Triton compiles and loads its kernels, cuBLAS takes its workspace. Neither may happen
        # while capturing.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            launch()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread of the process may use the GPU meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            launch()
        replay: Callable[[], None] = graph.replay
        return replay


class StaticStep:
    """The tensors of a StepBatch at fixed addresses, for up to ``spans`` spans and ``rows`` rows.

    Attributes:
        batch: what the captured kernels see. Its ``spans`` are empty: nothing captured may depend on the host's copy.
        wanted: [rows] int64, rows whose logits are wanted, then zeros. ``batch.sample_rows`` are all of them.
    """

    def __init__(
        self,
        *,
        spans: int,
        rows: int,
        width: int,
        page_size: int,
        padding_page: int,
        window: int | None,
        device: torch.device,
    ) -> None:
        self._padding = padding_page * page_size + torch.arange(rows) % page_size
        long, short = torch.int64, torch.int32
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((rows,), long),  # tokens
            ((rows,), long),  # positions
            ((rows,), long),  # kv_index
            ((spans + 1,), short),  # row_start
            ((spans,), short),  # num_cached
            ((spans,), short),  # tree_size
            ((spans,), torch.bool),  # causal
            ((rows, MAX_NODES // WORD_BITS), short),  # ancestors
            ((spans, width), short),  # page_table
            ((rows,), long),  # wanted
        ]
        self._packing = Packing([torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes])
        self._buffer = torch.zeros(self._packing.nbytes, dtype=torch.uint8, device=device)
        *fields, self.wanted = self._packing.views(self._buffer)
        every_row = torch.arange(rows, dtype=long, device=device)
        self.batch = StepBatch.of_tensors(page_size, window, [*fields, every_row])
        self.fill(StepBatch.build([], page_size))

    def fill(self, batch: StepBatch) -> None:
        """Take over a batch that was built on the CPU: one copy to the device, not waited for."""
        rows, after = batch.tokens.shape[0], self.batch.row_start.shape[0] - batch.row_start.shape[0]
        packed = self._packing.pack(
            [
                batch.tokens,
                batch.positions,
                torch.cat([batch.kv_index, self._padding[rows:]]),
                torch.cat([batch.row_start, batch.row_start[-1:].expand(after)]),
                batch.num_cached,
                batch.tree_size,
                batch.causal,
                batch.ancestors,
                batch.page_table,
                batch.sample_rows,
            ],
            pin=self._buffer.is_cuda,
        )
        self._buffer.copy_(packed, non_blocking=True)


@dataclass(frozen=True)
class Key:
    """What a graph was captured for: the bucket, and the arguments of ``ModelRunner.forward``."""

    rows: int
    spans: int
    layers: int | None
    taps: tuple[int, ...]


@dataclass(frozen=True)
class _Captured:
    replay: Callable[[], None]
    hidden: list[Tensor]  # [rows, hidden] per tapped layer


class CapturedRunner(ModelRunner):
    """A ModelRunner that replays captured forwards.

    The logits it returns lie in a buffer of its own, which its next forward overwrites.

    Attributes:
        failures: why buckets could not be captured; they run eagerly.

    Args:
        model, pages, page_size: as in ModelRunner; the cache gets one page more.
        max_context: most tokens of one request; longer ones run eagerly. None is what the cache holds.
        max_rows: most rows of a captured step.
        capture: how to; CUDA graphs unless told otherwise.
    """

    def __init__(
        self,
        model: Llama,
        *,
        pages: int,
        page_size: int,
        max_context: int | None = None,
        max_rows: int = MAX_ROWS,
        capture: Capture | None = None,
    ) -> None:
        super().__init__(model, pages=pages + 1, page_size=page_size, max_context=max_context or pages * page_size)
        self._padding_page = pages
        self._width = min(self.kv.pages_for(self.max_context + MAX_NODES), pages)
        self._row_buckets = row_buckets(max_rows)
        self._capture = capture or CudaGraphs(model.device)
        self._steps: dict[tuple[int, int], StaticStep] = {}
        self._graphs: dict[Key, _Captured | None] = {}
        self.failures: list[str] = []
        with torch.inference_mode():
            self._logits = torch.empty((max_rows, model.vocab_size), dtype=torch.float32, device=model.device)

    def forward(self, spans: Sequence[Span], *, layers: int | None = None, taps: Taps | None = None) -> Tensor:
        key = self._key(spans, layers, taps.layers if taps else ())
        if key is None:
            return super().forward(spans, layers=layers, taps=taps)
        with torch.inference_mode():
            batch = StepBatch.build(spans, self.kv.page_size, "cpu", self.model.config.sliding_window)
            step = self._step(key)
            step.fill(batch)
            captured = self._graph(key)
            if captured is None:
                return super().forward(spans, layers=layers, taps=taps)
            captured.replay()
            rows, wanted = batch.tokens.shape[0], batch.sample_rows.shape[0]
            if taps is not None:
                taps.hidden.extend(hidden[:rows].clone() for hidden in captured.hidden)
            logits = self._logits[:rows]
            return logits if wanted == rows else logits[step.wanted[:wanted]]

    def prepare(self, slots: int, *, layers: int | None = None, taps: tuple[int, ...] = ()) -> None:
        """Capture the buckets of up to ``slots`` spans, so that no request waits for it. The largest come first: what
        they needed in between is enough for the others."""
        begin = time.monotonic()
        keys = [
            Key(rows, spans, layers, taps)
            for rows in self._row_buckets
            for spans in (1 << i for i in range(_power_of_2(slots).bit_length()))
            if spans <= _power_of_2(rows)
        ]
        with torch.inference_mode():
            for key in sorted(keys, key=lambda key: (key.rows, key.spans), reverse=True):
                if key not in self._graphs:
                    self._step(key).fill(StepBatch.build([], self.kv.page_size))
                    self._graph(key)
        log.info("captured %d graphs in %.1f s", len(keys) - len(self.failures), time.monotonic() - begin)

    def _key(self, spans: Sequence[Span], layers: int | None, taps: tuple[int, ...]) -> Key | None:
        """The smallest bucket that holds a step; None if none does."""
        rows = sum(len(span.tokens) for span in spans)
        bucket = next((size for size in self._row_buckets if size >= rows), None)
        if rows == 0 or bucket is None or len(spans) > bucket:
            return None
        if any(
            len(span.pages) > self._width or (span.ancestors is not None and span.tree_size > MAX_NODES)
            for span in spans
        ):
            return None
        return Key(bucket, _power_of_2(len(spans)), layers, taps)

    def _step(self, key: Key) -> StaticStep:
        step = self._steps.get((key.spans, key.rows))
        if step is None:
            step = self._steps[key.spans, key.rows] = StaticStep(
                spans=key.spans,
                rows=key.rows,
                width=self._width,
                page_size=self.kv.page_size,
                padding_page=self._padding_page,
                window=self.model.config.sliding_window,
                device=self.device,
            )
        return step

    def _graph(self, key: Key) -> _Captured | None:
        if key not in self._graphs:
            try:
                self._graphs[key] = self._record(key)
            except RuntimeError as error:  # out of memory, or an operation that cannot be captured
                log.warning("%s cannot be captured and runs eagerly, which is slower: %s", key, error)
                self.failures.append(f"{key}: {error}")
                self._graphs[key] = None
        return self._graphs[key]

    def _record(self, key: Key) -> _Captured:
        batch = self._step(key).batch
        hidden: list[Tensor] = []

        def launch() -> None:
            taps = Taps(key.taps)
            # copied, so that the logits of each graph are free for the next one's use
            self._logits[: key.rows].copy_(self.model.forward(batch, self.kv, layers=key.layers, taps=taps))
            hidden[:] = taps.hidden

        return _Captured(self._capture(launch), hidden)


def runner_for(model: Llama, *, pages: int, page_size: int, max_context: int | None = None) -> ModelRunner:
    """The runner for where the model lies."""
    kind = CapturedRunner if model.device.type == "cuda" else ModelRunner
    return kind(model, pages=pages, page_size=page_size, max_context=max_context)


def row_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, … up to ``most``: padding adds at most half, and a quarter on average."""
    powers = [1 << i for i in range(most.bit_length())]
    halfway = [size + size // 2 for size in powers if size >= 16]
    return tuple(sorted({size for size in powers + halfway if size < most} | {most}))


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()

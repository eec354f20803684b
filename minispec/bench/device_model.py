"""Whole steps for ``minispec.bench.device``: the engine's text, and the time of a decode step of a random Llama."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from minispec import kernels
from minispec.batch import Span, StepBatch
from minispec.bench.device_kernels import binary_tree, spread_pages
from minispec.bench.timing import Stopwatch
from minispec.drafters.base import Drafter, NoDrafter
from minispec.drafters.draft_model import DraftModelDrafter
from minispec.drafters.ngram import NgramDrafter
from minispec.engine import Engine
from minispec.graphs import Capture, CapturedRunner
from minispec.kv_cache import PagePool
from minispec.model.config import ModelConfig
from minispec.model.llama import Llama
from minispec.model.rope import RopeConfig
from minispec.request import Request, SamplingParams
from minispec.runner import ModelRunner, kv_bytes_per_position
from minispec.sampling import Noise, SamplingBatch
from minispec.settle import settle

Result = dict[str, Any]
Case = tuple[str, Callable[[], Result]]

LLAMA_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, rms_norm_eps=1e-5, rope=RopeConfig(theta=500000.0), max_position=131072,
)  # fmt: skip
TINY = ModelConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    rms_norm_eps=1e-5, max_position=512,
)  # fmt: skip
TWO_LAYERS = ModelConfig(
    vocab_size=32000, hidden_size=1024, intermediate_size=2048, num_layers=2, num_heads=12, num_kv_heads=4,
    head_dim=128, rms_norm_eps=1e-5, max_position=4096, qk_norm=True,
)  # fmt: skip
_STEPS = [(batch, nodes, context) for context in (1024, 8192) for batch in (1, 8, 32) for nodes in (1, 16, 32, 64)]
_SMALL_STEPS = [(1, 1, 40), (2, 5, 40)]
_PAGE_SIZE = 32
_DRIFT = 0.05  # root mean square of a difference in logits, relative to theirs, that rounding in 16 bits may make


def captures() -> dict[str, Capture | None]:
    """How steps can be run here: eagerly, and as graphs where the kernels need nothing of the host."""
    if kernels.BACKEND != "triton":
        return {"eager": None}
    return {"eager": None, "graphs": None if torch.cuda.is_available() else lambda launch: launch}


def forward_cases(device: torch.device, *, small: bool) -> Iterator[Case]:
    """A whole forward over chunk, tree and single token is what the references give."""
    for dtype in (torch.float32,) if small else (torch.float32, torch.bfloat16, torch.float16):
        for way in captures():
            yield f"forward {str(dtype).removeprefix('torch.')}, {way}", partial(_forward, device, dtype, way, small)


def _forward(device: torch.device, dtype: torch.dtype, way: str, small: bool) -> Result:
    model = Llama.random(TINY if small else TWO_LAYERS, device=device, dtype=dtype, std=0.03)
    runner = _runner(model, way=way, pages=16, max_context=200, max_rows=64)
    runner.kv.k.normal_()
    runner.kv.v.normal_()
    spans = [
        Span.chunk(range(7), [3, 9], 30, sample_last=True),
        Span.tree(binary_tree(9), [5, 2], 29),
        Span.chunk([4], [7, 1, 11], 64, sample_last=True),
    ]
    got = runner.forward(spans).clone()
    with _references():
        batch = StepBatch.build(spans, _PAGE_SIZE, device)
        want = model.forward(batch, runner.kv)
    drift = _drift(got, want) / (1e-4 if dtype == torch.float32 else _DRIFT)
    return {"ok": drift <= 1, "error": drift} | _failures(runner)


@contextmanager
def _references() -> Iterator[None]:
    """Exchanges the kernels of a forward for their torch references."""
    names = ("rms_norm", "qk_norm", "silu_mul", "rope_kv_write", "tree_attention")
    chosen = {name: getattr(kernels, name) for name in names}
    try:
        for name in names:
            setattr(kernels, name, getattr(import_module(f"minispec.kernels.{name}"), f"{name}_ref"))
        yield
    finally:
        for name, kernel in chosen.items():
            setattr(kernels, name, kernel)


def text_cases(device: torch.device) -> Iterator[Case]:
    """The engine's text with each drafter, captured or not, is what plain eager decoding gives; in float32."""
    for way in captures():
        for draft in ("none", "ngram", "itself"):
            for mode in ("greedy", "sampled"):
                yield f"text {draft}, {mode}, {way}", partial(_same_text, device, draft, mode, way)


def _failures(*runners: ModelRunner) -> Result:
    """What makes a result a failure: steps that ran eagerly in spite of their name."""
    found = [note for runner in runners if isinstance(runner, CapturedRunner) for note in runner.failures]
    return {"ok": False, "note": f"not captured: {found[0][:300]}"} if found else {}


def _same_text(device: torch.device, draft: str, mode: str, way: str) -> Result:
    (got, runners), (want, _) = _texts(device, draft, mode, way), _texts(device, "none", mode, "eager")
    return {"ok": got == want, "error": sum(a != b for a, b in zip(got, want, strict=True))} | _failures(*runners)


def _texts(device: torch.device, draft: str, mode: str, way: str) -> tuple[list[list[int]], list[ModelRunner]]:
    torch.manual_seed(0)
    model = Llama.random(TINY, device=device, dtype=torch.float32, std=0.2)
    pages, noise = 64, Noise(TINY.vocab_size, device)
    runners = [
        _runner(model, way=way, pages=pages, max_context=200, max_rows=64) for _ in range(2 if draft == "itself" else 1)
    ]
    drafter: Drafter = NgramDrafter() if draft == "ngram" else NoDrafter()
    if draft == "itself":
        drafter = DraftModelDrafter(draft, runners[1], PagePool(pages), noise, depth=3, width=2, children=2)
    engine = Engine(runners[0], PagePool(pages), drafter, noise, max_slots=2, max_context=200, max_step_tokens=48)
    settings: dict[str, Any] = {"temperature": 0.0} if mode == "greedy" else {"temperature": 0.8, "top_p": 0.95}
    tokens = 32 if device.type == "cuda" else 6  # the interpreter takes a second for each
    rng = random.Random(0)
    prompts = [[rng.randrange(TINY.vocab_size) for _ in range(n)] * 2 for n in (1, 25, 9)]
    requests = [
        engine.make_request(prompt, SamplingParams(max_tokens=tokens, seed=i, **settings))
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check()
    return [request.output for request in requests], runners


def _runner(model: Llama, *, way: str, pages: int, max_context: int, max_rows: int) -> ModelRunner:
    if way == "eager":
        return ModelRunner(model, pages=pages, page_size=_PAGE_SIZE)
    return CapturedRunner(
        model,
        pages=pages,
        page_size=_PAGE_SIZE,
        max_context=max_context,
        max_rows=max_rows,
        capture=captures()[way],
    )


def step_cases(device: torch.device, watch: Stopwatch, *, small: bool) -> Iterator[Case]:
    """A decode step by batch, nodes per slot and context, eagerly and as graphs."""
    steps: _Steps | None = None

    def run(batch: int, nodes: int, context: int, way: str) -> Result:
        nonlocal steps
        if steps is None:
            steps = _Steps(device, watch, small)
        return steps.time(batch, nodes, context, way)

    for batch, nodes, context in _SMALL_STEPS if small else _STEPS:
        for way in captures():
            yield f"step {batch}x{nodes} nodes, {context} keys, {way}", partial(run, batch, nodes, context, way)


class _Steps:
    """The model, and a runner for each way over one cache."""

    def __init__(self, device: torch.device, watch: Stopwatch, small: bool) -> None:
        config, dtype = (TINY, torch.float32) if small else (LLAMA_8B, torch.bfloat16)
        self.model = Llama.random(config, device=device, dtype=dtype)
        sizes = _SMALL_STEPS if small else _STEPS
        rows = max(batch * nodes for batch, nodes, _ in sizes)
        context = max(context + nodes for _, nodes, context in sizes)
        self._pages = max(batch * _pages(context, nodes) for batch, nodes, context in sizes)
        if device.type == "cuda":
            torch.cuda.synchronize()
            page_bytes = kv_bytes_per_position(config, dtype) * _PAGE_SIZE
            # beside the cache: two copies of the logits of the largest step, and activations
            free = torch.cuda.mem_get_info(device)[0] - rows * config.vocab_size * 12 - (8 << 30)
            self._pages = min(self._pages, max(free // page_bytes, 1))
        self._runners: dict[str, ModelRunner] = {}
        kv = None
        for way in reversed(captures()):  # the captured one first: its cache has the page for padding
            count = self._pages if kv is None else 1
            runner = _runner(self.model, way=way, pages=count, max_context=context, max_rows=rows)
            if kv is None:
                kv = runner.kv
                kv.k.normal_(), kv.v.normal_()
            runner.kv = kv
            self._runners[way] = runner
        self._noise = Noise(self.model.vocab_size, device)
        self._device, self._watch = device, watch
        linears = [linear for layer in self.model.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        self._weight_bytes = sum(linear.weight.nbytes for linear in linears) + self.model.head.weight.nbytes

    def time(self, batch: int, nodes: int, context: int, way: str) -> Result:
        """Check the logits against the eager ones, then time whole steps as the engine runs them."""
        each = _pages(context, nodes)
        if batch * each > self._pages:
            return {"ok": None, "note": f"skipped: its KV needs {batch * each} pages, {self._pages} fit"}
        tree = binary_tree(nodes, self.model.vocab_size)
        places = [(pages, context) for pages in spread_pages(batch, each)]
        trees = [tree] * batch
        spans = [Span.tree(tree, pages, cached) for pages, cached in places]
        requests = [
            Request(id=str(i), prompt=(0,), params=SamplingParams(temperature=0.0), decoder=None, limit=1 << 20)
            for i in range(batch)
        ]
        rows = [(request, context + 1 + depth) for request in requests for depth in tree.depth]
        runner = self._runners[way]
        drift = 0.0
        if way != "eager":
            want = self._runners["eager"].forward(spans)
            drift = _drift(runner.forward(spans), want) / _DRIFT
        times: list[tuple[float, float, float]] = []

        def step() -> None:
            clock = _Clock(self._watch)
            logits = runner.forward(spans)
            samples = kernels.sample(logits, SamplingBatch.build(rows, self._device), self._noise)
            clock.launched()
            settle(runner.kv, samples, trees, places)
            times.append(clock.stop())

        deadline = time.perf_counter() + 1.5
        for _ in range(3):
            step()
        times.clear()
        while len(times) < 20 and (len(times) < 3 or time.perf_counter() < deadline):
            step()
        wall, host, busy = (statistics.median(column) for column in zip(*times, strict=True))
        moved = self._weight_bytes + batch * (context + nodes) * kv_bytes_per_position(
            self.model.config, self.model.dtype
        )
        return {
            "ok": drift <= 1,
            "error": drift,
            "ms": busy,
            "step_ms": wall,
            "host_ms": host,
            "bytes": moved,
            "weight_bytes": self._weight_bytes,
        } | _failures(runner)


class _Clock:
    """Milliseconds of one step: wall, host until everything is launched, device until the samples are there."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        watch.synchronize()
        if watch.cuda:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._begin = self._launched = time.perf_counter()

    def launched(self) -> None:
        self._launched = time.perf_counter()
        if self._watch.cuda:
            self._events[1].record()

    def stop(self) -> tuple[float, float, float]:
        wall, host = ((at - self._begin) * 1e3 for at in (time.perf_counter(), self._launched))
        if not self._watch.cuda:
            return wall, host, host
        self._events[1].synchronize()
        return wall, host, self._events[0].elapsed_time(self._events[1])


def _pages(context: int, nodes: int) -> int:
    return -(-(context + nodes) // _PAGE_SIZE)


def _drift(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference, relative to that of ``want``; row by row, as logits take much memory."""
    difference = sum(float((a - b).square().mean()) for a, b in zip(got, want, strict=True))
    size = sum(float(row.square().mean()) for row in want)
    return float((difference / size) ** 0.5) if size else float("inf")

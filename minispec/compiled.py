"""The compiled step behind the runners: built in the background, checked and timed, and only then used.

Eager from the first request on. Where the library is in the cache already, the switch is made while loading; else a
compiler runs at low priority meanwhile, a thread of low priority lays the weights out anew, layer by layer, and
the runners switch between two steps. Eager and compiled forwards read the same weights: there is one copy.

What is used must agree with eager torch on this very model and must be faster than it; otherwise all goes back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minispec import hub
from minispec.batch import Span, StepBatch
from minispec.errors import ConfigError
from minispec.kv_cache import KVCache
from minispec.memory import give_back_memory
from minispec.model.linear import Head
from minispec.model.llama import Llama
from minispec.native import build
from minispec.native.library import Library, Team
from minispec.native.model import (
    Arena,
    CompiledForward,
    PackedHead,
    PackedLinear,
    packed_layer,
    plain_layer,
    unsupported,
)
from minispec.runner import CompileState, ModelRunner, Phase, resolve_dtype

log = logging.getLogger(__name__)

TOLERANCES = {16: (0.1, 0.3), 8: (0.2, 0.5)}
"""Bits of a weight to the deviation of a row's logits from eager torch's that is allowed, as a share of their spread
(both root mean squares): median and largest over the rows of the check. Eager bfloat16 itself deviates from float32 by
0.05 and 0.2 on its random text (smollm2-135m); rounding activations to 8 bits makes steps of small differences: 0.11
and 0.26 between eager and compiled. A wrong mask, position or weight makes more than 0.5."""


class Compilation:
    """Brings the compiled step to runners that share an engine: a target and its draft models.

    Attributes:
        state: progress.

    Args:
        runners: whose models; the first one decides whether it pays.
        threads: of the step; None is what torch uses.
        cached: the library; None is this machine's.
    """

    def __init__(
        self, runners: Sequence[ModelRunner], *, threads: int | None = None, cached: Path | None = None
    ) -> None:
        self.state = runners[0].compile_state
        self._runners = runners
        self._threads = threads or torch.get_num_threads()
        self._path = cached

    def start(self, *, wait: bool = False) -> CompileState:
        """Switch at once if the library is cached; else begin in the background and return, or ``wait`` for it."""
        obstacle = build.obstacle() or unsupported(self._runners[0].model)
        if obstacle:
            self._end(Phase.UNSUPPORTED, obstacle, "INFO")
            return self.state
        path = self._path or build.library_path()
        if path.exists():
            self._finish(path, time.monotonic(), background=False)
        elif build.compiler() is None:
            self._end(Phase.UNSUPPORTED, "there is no C++ compiler; install g++ to make steps faster", "WARNING")
        elif wait:
            self.state.phase = Phase.BUILDING
            log.info("the compiled step is being built, once on this machine")
            self._build(path, background=False)
        else:
            self.state.phase = Phase.BUILDING
            log.info("the compiled step is being built in the background; steps run eagerly until it is ready")
            threading.Thread(target=self._background, args=(path,), name="minispec-compile", daemon=True).start()
        return self.state

    def _background(self, path: Path) -> None:
        with contextlib.suppress(OSError, AttributeError):  # threads of Linux have a priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), build.NICENESS)
        threads = torch.get_num_threads()  # a thread takes up its number when it first asks
        torch.set_num_threads(1)  # of this thread: what it computes must not take the engine's turns
        # and of threads that begin later, the engine's perhaps, until another thread says otherwise
        other = threading.Thread(target=torch.set_num_threads, args=(threads,))
        other.start()
        other.join()
        self._build(path, background=True)

    def _build(self, path: Path, *, background: bool) -> None:
        started = time.monotonic()
        try:
            build.build(path)
        except build.BuildError as error:
            self._end(Phase.FAILED, str(error), "WARNING")
            return
        self._finish(path, started, background=background)

    def _finish(self, path: Path, started: float, *, background: bool) -> None:
        self.state.phase = Phase.CHECKING
        try:
            library = Library(path)
            team = Team(library, self._threads)
            # a team serves one caller at a time: in the background the engine may call its own meanwhile
            packer = Team(library, 1) if background else team
            for runner in self._runners:
                if unsupported(runner.model) is None:
                    self._adopt(runner, team, packer)
        except Exception as error:  # whatever it is, the eager step goes on
            path.unlink(missing_ok=True)  # built anew next time
            log.debug("compiled step", exc_info=True)
            self._end(Phase.FAILED, f"{type(error).__name__}: {error}", "WARNING")
            return
        give_back_memory()  # the weights as they were
        self.state.seconds = time.monotonic() - started
        if self.state.phase is Phase.CHECKING:
            self.state.phase = Phase.READY
            log.info(
                "the compiled step is in use after %.1f s: %s",
                self.state.seconds,
                ", ".join(
                    f"{rows} rows {self.state.compiled_ms[rows]:.1f} ms (eager {eager:.1f})"
                    for rows, eager in (self.state.eager_ms or {}).items()
                    if self.state.compiled_ms
                ),
            )

    def _adopt(self, runner: ModelRunner, team: Team, packer: Team) -> None:
        """Lay a runner's weights out, check, and switch; undone if the check fails or nothing is gained."""
        model = runner.model
        probe = Probe(model)
        expected, eager = probe.logits(model.forward), probe.seconds(model.forward)
        before, arena = model.head, Arena(model, packer)
        try:
            for i, layer in enumerate(model.layers):
                model.layers[i] = packed_layer(team, packer, layer, arena)
            model.head = PackedHead(team, packer, model.head, arena)
            got = probe.logits(CompiledForward(packer, model))
            timed = probe.seconds(CompiledForward(packer, model))
            deviation = _deviation(torch.cat(got), torch.cat(expected))
            median, worst = deviation.median().item(), deviation.max().item()
            tolerance, limit = TOLERANCES[model.head.struct.bits]
            if not (median <= tolerance and worst <= limit):  # NaN is no agreement either
                raise ArithmeticError(
                    f"its logits deviate from the eager step's by {median:.3f} (median of the rows) and {worst:.3f} "
                    f"(worst), at most {tolerance} and {limit} are allowed"
                )
        except Exception:
            self._undo(model, before, packer)
            raise
        milliseconds = [{n: s * 1e3 for n, s in times.items()} for times in (eager, timed)]
        if runner is self._runners[0]:
            self.state.eager_ms, self.state.compiled_ms = milliseconds
            if any(timed[n] > eager[n] for n in timed):
                self._undo(model, before, packer)
                self._end(Phase.SLOWER, f"eager {milliseconds[0]} ms, compiled {milliseconds[1]} ms", "INFO")
                return
        runner.use(CompiledForward(team, model))

    @staticmethod
    def _undo(model: Llama, head: Head, packer: Team) -> None:
        for i, layer in enumerate(model.layers):
            if isinstance(layer.qkv, PackedLinear):
                model.layers[i] = plain_layer(layer, packer)
        model.head = head

    def _end(self, phase: Phase, reason: str, level: str) -> None:
        self.state.phase, self.state.reason = phase, reason
        log.log(getattr(logging, level), "steps run eagerly: %s", reason)


class Probe:
    """Steps that go through everything a forward does, on a small cache of their own."""

    _PAGE = 16
    _SIZES = (1, 16)

    def __init__(self, model: Llama) -> None:
        config = model.config
        self._vocab = min(model.vocab_size, config.vocab_size)
        self._window = config.sliding_window
        self._kv = KVCache(
            layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim, pages=32,
            page_size=self._PAGE, dtype=model.dtype, device=model.device,
        )  # fmt: skip
        self._pages = [*range(5, 24), *range(5), *range(24, 32)]  # not in order

    def logits(self, forward: Callable[[StepBatch, KVCache], Tensor]) -> list[Tensor]:
        """Logits of two chunks of text, and of a tree and a single token behind them."""
        first, second = self._pages[:20], self._pages[20:]
        batches = [
            [
                Span([self._token(i) for i in range(280)], first, 0, range(280), None, (0, 100, 279)),
                Span([self._token(i + 7) for i in range(21)], second, 0, range(21), None, (3, 20)),
            ],
            [self._tree(13, first, 280), Span.chunk([self._token(3)], second, 21, sample_last=True)],
        ]
        return [self._run(forward, spans) for spans in batches]

    def seconds(self, forward: Callable[[StepBatch, KVCache], Tensor], rounds: int = 3) -> dict[int, float]:
        """Rows to the fastest of a few steps behind 280 tokens; ``logits`` comes first."""
        best = dict.fromkeys(self._SIZES, float("inf"))
        for _ in range(rounds):
            for rows in self._SIZES:
                begin = time.perf_counter()
                self._run(forward, [self._tree(rows, self._pages[:20], 280)])
                best[rows] = min(best[rows], time.perf_counter() - begin)
        return best

    def _run(self, forward: Callable[[StepBatch, KVCache], Tensor], spans: Sequence[Span]) -> Tensor:
        with torch.inference_mode():
            return forward(StepBatch.build(spans, self._PAGE, "cpu", self._window), self._kv)

    def _token(self, i: int) -> int:
        return (i * 7919 + 11) % self._vocab

    def _tree(self, nodes: int, pages: Sequence[int], cached: int) -> Span:
        """A binary tree."""
        ancestors, depths = [1], [0]
        for i in range(1, nodes):
            parent = (i - 1) // 2
            ancestors.append(ancestors[parent] | 1 << i)
            depths.append(depths[parent] + 1)
        return Span([self._token(i) for i in range(nodes)], pages, cached, depths, ancestors, range(nodes))


def _deviation(got: Tensor, expected: Tensor) -> Tensor:
    """[rows]: root mean square of the difference, over the spread of the row's logits."""
    spread = (expected - expected.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    return (got - expected).square().mean(-1).sqrt() / spread


def compile_ahead(target: str | None) -> dict[str, Any]:
    """``minispec compile``: build the library unless it is cached; with a target, check and time it.

    Returns:
        What there is to report: library, seconds, and with a target phase, eager_ms and compiled_ms.

    Raises:
        ConfigError: this machine or this model cannot have it, or the check failed.
        ModelError: the target cannot be used.
    """
    if obstacle := build.obstacle():
        raise ConfigError(f"steps cannot be compiled here: {obstacle}. They run eagerly")
    started = time.monotonic()
    path = build.library_path()
    if not path.exists():
        try:
            build.build(path)
        except build.BuildError as error:
            raise ConfigError(f"the step could not be compiled: {error}") from error
    report: dict[str, Any] = {"library": str(path), "seconds": round(time.monotonic() - started, 1)}
    if target is None:
        return report
    device = torch.device("cpu")
    model = Llama.load(hub.resolve(target), device=device, dtype=resolve_dtype("auto", device))
    runner = ModelRunner(model, pages=1, page_size=1)
    state = Compilation([runner]).start()
    if state.phase not in (Phase.READY, Phase.SLOWER):
        raise ConfigError(f"the compiled step cannot be used for {target}: {state.reason}")
    report["phase"] = state.phase.value
    for name in ("eager_ms", "compiled_ms"):
        report[name] = {rows: round(ms, 2) for rows, ms in (getattr(state, name) or {}).items()}
    return report

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minispec import hub
from minispec.compiled_probe import Candidate, candidate_for
from minispec.drafters.eagle_runner import HeadRunner
from minispec.errors import ConfigError
from minispec.memory import give_back_memory
from minispec.model.llama import Llama
from minispec.native import build
from minispec.native.library import Library, Team
from minispec.native.sampling import NativeSampling
from minispec.runner import CompileState, ModelRunner, Phase, resolve_dtype
from minispec.sampling import Noise

log = logging.getLogger(__name__)

TOLERANCES = {16: (0.1, 0.3), 8: (0.2, 0.5)}
"""Bits of a weight to the deviation of a row's logits from eager torch's that is allowed, as a share of their spread
(both root mean squares): median and largest over the rows of the check. Eager bfloat16 itself deviates from float32 by
0.05 and 0.2 on its random text (smollm2-135m); rounding activations to 8 bits makes steps of small differences: 0.11
and 0.26 between eager and compiled. A wrong mask, position or weight makes more than 0.5."""


class SlowerError(Exception):
    """The compiled step is no faster than the eager one; the message has both times."""

    def __init__(self, milliseconds: dict[str, dict[int, float]]) -> None:
        super().__init__(f"eager {milliseconds['eager']} ms, compiled {milliseconds['compiled']} ms")


class Compilation:
    """Brings the compiled step to runners that share an engine: a target, its draft models and heads, and its noise.

    Attributes:
        state: progress.

    Args:
        runners: the target's, which decides whether it is used at all; behind it drafts', each for itself.
        threads: of the step; None is what torch uses.
        cached: the library; None is this machine's.
        noise: what the target's tokens are drawn with; with the target's step it, too, is computed by the library.
    """

    def __init__(
        self,
        runners: Sequence[ModelRunner | HeadRunner],
        *,
        threads: int | None = None,
        cached: Path | None = None,
        noise: Noise | None = None,
    ) -> None:
        target, *self._drafts = runners
        assert isinstance(target, ModelRunner)
        self._target = target
        self.state = target.compile_state
        self._threads = threads or torch.get_num_threads()
        self._path = cached
        self._noise = noise

    def start(self, *, wait: bool = False) -> CompileState:
        """Switch at once if the library is cached; else begin in the background and return, or ``wait`` for it."""
        obstacle = build.obstacle() or candidate_for(self._target).obstacle
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
            milliseconds = self._adopt(candidate_for(self._target), team, packer)
        except SlowerError as slower:
            self._end(Phase.SLOWER, str(slower), "INFO")
            return
        except Exception as error:  # whatever it is, the eager step goes on
            path.unlink(missing_ok=True)  # built anew next time
            log.debug("compiled step", exc_info=True)
            self._end(Phase.FAILED, f"{type(error).__name__}: {error}", "WARNING")
            return
        self.state.eager_ms, self.state.compiled_ms = milliseconds["eager"], milliseconds["compiled"]
        if self._noise is not None:
            self._noise.native = NativeSampling(team)
        for runner in (self._target, *self._drafts):
            runner.kv.native = library
        for draft in self._drafts:
            self._adopt_draft(candidate_for(draft), team, packer)
        give_back_memory()  # the weights as they were
        self.state.seconds = time.monotonic() - started
        self.state.phase = Phase.READY
        log.info("the compiled step is in use after %.1f s: %s", self.state.seconds, _compared(milliseconds))

    def _adopt_draft(self, candidate: Candidate, team: Team, packer: Team) -> None:
        """What is no target stays eager where it cannot run compiled, and nothing else comes of it."""
        if (obstacle := candidate.obstacle) is not None:
            log.info("drafts run eagerly: %s", obstacle)
            return
        try:
            log.info("drafts run compiled: %s", _compared(self._adopt(candidate, team, packer)))
        except SlowerError as slower:
            log.info("drafts run eagerly: %s", slower)
        except Exception as error:
            log.debug("compiled drafts", exc_info=True)
            log.warning("drafts run eagerly: %s: %s", type(error).__name__, error)

    def _adopt(self, candidate: Candidate, team: Team, packer: Team) -> dict[str, dict[int, float]]:
        """Lay its weights out, check, and switch; undone if the check fails or nothing is gained.

        Returns:
            Milliseconds by rows, ``eager`` and ``compiled``.

        Raises:
            SlowerError: nothing is gained.
            Exception: whatever went wrong.
        """
        probe = candidate.probe()
        expected, eager = probe.logits(candidate.eager), probe.seconds(candidate.eager)
        try:
            candidate.pack(team, packer)
            got = probe.logits(candidate.compiled(packer))
            timed = probe.seconds(candidate.compiled(packer))
            deviation = _deviation(torch.cat(got), torch.cat(expected))
            median, worst = deviation.median().item(), deviation.max().item()
            tolerance, limit = TOLERANCES[candidate.bits]
            if not (median <= tolerance and worst <= limit):  # NaN is no agreement either
                raise ArithmeticError(
                    f"its logits deviate from the eager step's by {median:.3f} (median of the rows) and {worst:.3f} "
                    f"(worst), at most {tolerance} and {limit} are allowed"
                )
            milliseconds = {
                way: {n: s * 1e3 for n, s in times.items()} for way, times in (("eager", eager), ("compiled", timed))
            }
            if any(timed[n] > eager[n] for n in timed):
                raise SlowerError(milliseconds)
        except Exception:
            candidate.undo(packer)
            raise
        candidate.use(candidate.compiled(team))
        return milliseconds

    def _end(self, phase: Phase, reason: str, level: str) -> None:
        self.state.phase, self.state.reason = phase, reason
        log.log(getattr(logging, level), "steps run eagerly: %s", reason)


def _compared(milliseconds: dict[str, dict[int, float]]) -> str:
    eager, compiled = milliseconds["eager"], milliseconds["compiled"]
    return ", ".join(f"{rows} rows {compiled[rows]:.1f} ms (eager {eager[rows]:.1f})" for rows in eager)


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

"""Where each millisecond of a step goes, measured from outside: the engine itself carries no clocks for it.

While a ``Profile`` is active the collaborators of one engine are wrapped: drafter, StepBatch, runner, sampler,
verification, commit, text. A part's time is its own, without the parts that run inside it; what no part accounts for is
``rest``. Wrapping costs about a microsecond a call.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from unittest import mock

from minispec import batch, settle
from minispec import engine as engine_module
from minispec.engine import Engine
from minispec.request import Request

PARTS = ("draft", "draft forward", "prepare", "forward", "sample", "verify", "commit", "detokenise", "rest")
"""In the order of a step. ``prepare`` lays the batch out as tensors; ``forward`` is the target's, head included; on a
GPU, where calls return before they are done, the wait for them is part of ``verify``."""

_FORWARDS = ("draft forward", "forward")


class Profile:
    """Times the parts of an engine's steps while it is entered.

    Attributes:
        steps: steps timed.
        seconds: part → seconds in all.
    """

    def __init__(self, engine: Engine) -> None:
        self.steps = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self._engine = engine
        self._inside: list[float] = []  # per open part, the seconds that parts inside it took
        self._opaque = False  # in a draft model's forward, whose inner parts are not the step's
        self._patches = ExitStack()

    def __enter__(self) -> Profile:
        engine = self._engine
        wrap = self._wrap
        wrap(engine, "step", "rest")
        for name in ("propose", "accept", "observe", "sources", "begin"):
            wrap(engine.drafter, name, "draft")
        for member in engine.drafter.members:
            for name in ("_read", "_run"):  # what runs a model, in drafters that grow trees
                if hasattr(member, name):
                    wrap(member, name, "draft forward")
        wrap(batch.StepBatch, "build", "prepare", static=True)
        wrap(engine.runner, "forward", "forward")
        wrap(engine, "_sample", "sample")
        for name in ("score_prompts", "logprobs"):
            wrap(engine._sampler, name, "sample")
        wrap(engine_module, "settle", "verify")
        wrap(settle, "verify", "verify")
        wrap(engine.runner.kv, "commit", "commit")
        wrap(Request, "append", "detokenise")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patches.close()

    def report(self) -> dict[str, Any]:
        """Milliseconds per step and share of each part, and of what is neither the target's nor a draft's forward."""
        steps = max(self.steps, 1)
        total = sum(self.seconds.values())
        host = sum(seconds for part, seconds in self.seconds.items() if part not in _FORWARDS)
        return {
            "steps": self.steps,
            "step_ms": round(1e3 * total / steps, 3),
            "parts_ms": {part: round(1e3 * self.seconds[part] / steps, 3) for part in PARTS},
            "shares": {part: round(self.seconds[part] / (total or 1), 4) for part in PARTS},
            "host_share": round(host / (total or 1), 4),
        }

    def _wrap(self, owner: Any, name: str, part: str, *, static: bool = False) -> None:
        timed = self._timed(getattr(owner, name), part)
        self._patches.enter_context(mock.patch.object(owner, name, staticmethod(timed) if static else timed))

    def _timed(self, inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(inner, updated=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._opaque:
                return inner(*args, **kwargs)
            self._opaque = part == "draft forward"
            self._inside.append(0.0)
            begin = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - begin
                self._opaque = False
                self.seconds[part] += elapsed - self._inside.pop()
                if self._inside:
                    self._inside[-1] += elapsed
                else:
                    self.steps += 1

        return timed

"""Faults on purpose, for tests: ``engine.on_stage = Faults()`` and a plan of what goes wrong where, and for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minispec.containment import STAGES
from minispec.request import Request


@dataclass
class _Planned:
    stage: str
    action: Callable[[], None]
    request: Request | None
    after: int
    times: float


class Faults:
    """Acts when an engine reaches a stage (``Engine.on_stage``).

    Attributes:
        log: the stages reached, in order.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._planned: list[_Planned] = []

    def __call__(self, stage: str, requests: Sequence[Request]) -> None:
        self.log.append(stage)
        for planned in self._planned:
            if planned.stage != stage or (planned.request is not None and planned.request not in requests):
                continue
            if planned.after > 0:
                planned.after -= 1
            elif planned.times > 0:
                planned.times -= 1
                planned.action()

    def plan(
        self,
        stage: str,
        action: Callable[[], None] | Exception,
        request: Request | None = None,
        *,
        after: int = 0,
        times: float = float("inf"),
    ) -> None:
        """Do something whenever the engine reaches ``stage``.

        Args:
            action: an error to raise, or what to call: to block, to abort a request.
            request: only where the stage is about this request; None is always.
            after: let so many occasions pass first.
            times: most often.

        Raises:
            ValueError: there is no such stage.
        """
        if stage not in (*STAGES, "schedule"):
            raise ValueError(f"there is no stage {stage!r}; stages: {', '.join((*STAGES, 'schedule'))}")
        if isinstance(action, Exception):
            error = action

            def action() -> None:
                raise error

        self._planned.append(_Planned(stage, action, request, after, times))

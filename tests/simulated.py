"""Engines whose time is a sum: forwards and drafts advance a clock by what they are said to cost."""

from __future__ import annotations

from collections.abc import Sequence

from minispec.costs import StepCost
from minispec.engine import Engine
from scripted import Prefix, ScriptedDrafter, scripted_engine, table

VOCAB = 64


class Clock:
    """Seconds since start."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedDrafter(ScriptedDrafter):
    """Takes ``seconds`` per layer, heeds the depth limit, and notes for how many slots it was asked."""

    def __init__(self, script, clock: Clock, seconds: float = 0.0, name: str = "scripted") -> None:
        super().__init__(script)
        self.name = name
        self.calls: list[int] = []
        self._clock = clock
        self._seconds = seconds

    def propose(self, slots, max_nodes):
        trees = [tree.best(len(tree), max_depth=self.depth_limit) for tree in super().propose(slots, max_nodes)]
        self.calls.append(len(slots))
        self._clock.now += self._seconds * max(max(tree.depth) for tree in trees)
        return trees


def counting(prefix: Prefix) -> int:
    """The target's text: 3 4 5 …, round at 50."""
    return (prefix[-1] + 1) % 50


def simulated_engine(drafter, clock: Clock, cost: StepCost, *, auto: bool = True, **settings) -> Engine:
    """An engine that counts; its forwards cost ``cost``."""
    engine = scripted_engine(
        table(counting, VOCAB),
        VOCAB,
        drafter,
        step_cost=cost if auto else None,
        clock=clock,
        pages=4000,
        max_context=4000,
        **settings,
    )
    forward = engine.runner.forward

    def timed(spans: Sequence, *, taps=None):
        clock.now += cost(sum(len(span.tokens) for span in spans))
        return forward(spans)

    engine.runner.forward = timed
    return engine

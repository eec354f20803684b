"""How a step and a prompt grow: decode steps by context length, and time to the first token by prompt length.

Both run on the engine without speculation. Prompts are random tokens, so that no text is favoured and no prefix is
known already; rounds go through all lengths in turn, so that a busy moment of the machine hits all of them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from minispec.drafters.base import NoDrafter
from minispec.engine import Engine
from minispec.request import SamplingParams

CONTEXTS = (128, 512, 2048, 4096, 8192)
PROMPTS = (32, 128, 512, 2048)
_STEPS = 16
_ROUNDS = 3


def context_sweep(engine: Engine, contexts: Sequence[int] = CONTEXTS, rounds: int = _ROUNDS) -> dict[str, Any]:
    """Milliseconds of a decode step of one stream behind contexts of different lengths.

    Args:
        engine: idle.
        contexts: tokens in the KV cache when the steps begin; the first one beyond the engine's room is cut to it, the
            others are left out.

    Returns:
        ``step_ms`` by context (medians), and ``growth``: the last to the first.
    """
    most = max(engine.room - _STEPS - 1, 1)
    lengths = list(dict.fromkeys(min(n, most) for n in contexts))
    times: dict[int, list[float]] = {n: [] for n in lengths}
    for seed in range(rounds):
        for n in lengths:
            times[n] += _steps(engine, _random_prompt(engine, n, seed), _STEPS)[1]
    medians = {n: statistics.median(own) for n, own in times.items()}
    return {
        "step_ms": {str(n): round(1e3 * seconds, 2) for n, seconds in medians.items()},
        "growth": round(medians[lengths[-1]] / medians[lengths[0]], 3),
    }


def prefill_sweep(engine: Engine, lengths: Sequence[int] = PROMPTS, rounds: int = _ROUNDS) -> dict[str, Any]:
    """Time to the first token by prompt length, on an idle engine.

    Returns:
        ``ttft_ms`` and ``tokens_per_s`` by prompt length (medians), and ``skipped``: lengths without room.
    """
    fitting = [n for n in lengths if n + 1 < engine.room]
    times: dict[int, list[float]] = {n: [] for n in fitting}
    for seed in range(rounds):
        for n in fitting:
            # seeds of their own: what the context sweep has run may still be cached
            times[n].append(_steps(engine, _random_prompt(engine, n, 1000 + seed), 1)[0])
    medians = {n: statistics.median(own) for n, own in times.items()}
    return {
        "ttft_ms": {str(n): round(1e3 * seconds, 2) for n, seconds in medians.items()},
        "tokens_per_s": {str(n): round(n / seconds, 1) for n, seconds in medians.items()},
        "skipped": [n for n in lengths if n not in fitting],
    }


def _steps(engine: Engine, prompt: Sequence[int], tokens: int) -> tuple[float, list[float]]:
    """Seconds to the first token, and of every step after it, until ``tokens`` tokens have come."""
    assert not engine.has_work
    drafter, engine.drafter = engine.drafter, NoDrafter()
    try:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = engine.make_request(prompt, params)
        engine.add(request)
        begin = time.perf_counter()
        while not request.num_output:
            engine.step()
        first = time.perf_counter()
        times = []
        while not request.finished:
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
    finally:
        engine.drafter = drafter
    return first - begin, times


def _random_prompt(engine: Engine, length: int, seed: int) -> list[int]:
    draw = random.Random(f"{seed}/{length}")
    return [draw.randrange(engine.runner.vocab_size) for _ in range(length)]

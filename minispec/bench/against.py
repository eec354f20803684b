"""minispec over HTTP against itself offline, and against another server: the same prompts in turn, in one run.

Everybody is asked by the same client process (``minispec.bench.client``), one prompt or group of prompts after the
other, in alternating order. A ratio compares tokens per second of the whole request, prefill included, for the same
prompts; the figure is the median of these paired ratios.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from minispec.bench.client import Answer, Client, Endpoint
from minispec.engine import Engine
from minispec.server.app import Api, ServerOptions
from minispec.server.bind import url_of
from minispec.server.run import make_uvicorn
from minispec.worker import EngineWorker, WorkerState

Measure = Callable[[Sequence[int]], tuple[int, float]]
"""Runs the prompts with these indices at once; returns their tokens in sum and the seconds until the last was done."""


@contextmanager
def served(engine: Engine, name: str) -> Iterator[str]:
    """Serve an idle engine on a free port of this machine; yields the URL. Nobody else may step it meanwhile."""
    worker = EngineWorker(lambda: engine)
    worker.start()
    while worker.state is WorkerState.LOADING:
        time.sleep(0.001)
    sock = socket.create_server(("127.0.0.1", 0))
    uvicorn = make_uvicorn(Api(worker, ServerOptions(model_name=name)))
    thread = threading.Thread(target=lambda: asyncio.run(uvicorn.serve([sock])), daemon=True)
    thread.start()
    try:
        yield url_of(sock)
    finally:
        uvicorn.should_exit = True
        thread.join()
        worker.stop()
        sock.close()


def asking(client: Client, texts: Sequence[str], max_tokens: int, temperature: float, answers: list[Answer]) -> Measure:
    """Measures by asking a server; what it answers is appended to ``answers``."""

    def measure(group: Sequence[int]) -> tuple[int, float]:
        begin = time.perf_counter()
        some = client.run([texts[i] for i in group], max_tokens, temperature, list(group))
        seconds = time.perf_counter() - begin
        answers.extend(some)
        return sum(answer.tokens for answer in some), seconds

    return measure


def duel(ours: Measure, theirs: Measure, prompts: int, concurrency: int, console: Console) -> dict[str, Any]:
    """Both measure the same groups of ``concurrency`` prompts, in alternating order.

    Returns:
        Median and quartiles of ours to theirs in tokens per second, and both sums.
    """
    ratios = []
    sums = [[0, 0.0], [0, 0.0]]
    for number, begin in enumerate(range(0, prompts, concurrency)):
        group = range(begin, min(begin + concurrency, prompts))
        speed = [0.0, 0.0]
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            tokens, seconds = (ours, theirs)[side](group)
            sums[side][0] += tokens
            sums[side][1] += seconds
            speed[side] = tokens / seconds
        if min(speed) > 0:  # an answer without a token has no speed
            ratios.append(speed[0] / speed[1])
            console.print(f"{number + 1:3}  {speed[0]:7.1f} tok/s, {speed[1]:7.1f} theirs: {ratios[-1]:.2f} x")
    return {
        "tokens_per_s": round(sums[0][0] / sums[0][1], 2),
        "their_tokens_per_s": round(sums[1][0] / sums[1][1], 2),
        **spread("ratio", ratios),
    }


def spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Median and quartiles, named ``name``, ``name_q1`` and ``name_q3``."""
    if not values:
        return dict.fromkeys((name, f"{name}_q1", f"{name}_q3"))
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {name: round(middle, 4), f"{name}_q1": round(low, 4), f"{name}_q3": round(high, 4)}


def run_against(
    engine: Engine,
    texts: Sequence[str],
    offline: Measure,
    *,
    others: Sequence[Endpoint],
    max_tokens: int,
    temperature: float,
    concurrency: int,
    console: Console,
) -> dict[str, Any]:
    """What our HTTP server costs over the offline API, and how it does against ``others``.

    Args:
        engine: idle; it is served over HTTP for the duration.
        texts: the prompts.
        offline: measures the same prompts on the engine without HTTP.

    Returns:
        ``http_over_offline`` (a duel of HTTP against offline) and ``compare`` (one duel per other server).

    Raises:
        ConfigError: a server does not answer.
    """
    result: dict[str, Any] = {}
    with served(engine, engine.name) as url, Client(Endpoint(url)) as us:
        our_answers: list[Answer] = []
        ours = asking(us, texts, max_tokens, temperature, our_answers)
        ours(range(1))  # once unmeasured
        console.print("over HTTP against offline")
        result["http_over_offline"] = duel(ours, offline, len(texts), concurrency, console)
        compared = []
        for endpoint in others:
            with Client(endpoint) as them:
                answers: list[Answer] = []
                theirs = asking(them, texts, max_tokens, temperature, answers)
                theirs(range(1))
                our_answers.clear()
                answers.clear()
                console.print(f"against {endpoint.url} ({them.model})")
                figures = duel(ours, theirs, len(texts), concurrency, console)
                compared.append(
                    {
                        "url": endpoint.url,
                        "model": them.model,
                        **figures,
                        "ttft_ms": _ttft(our_answers),
                        "their_ttft_ms": _ttft(answers),
                        "their_tokens_counted": all(answer.counted for answer in answers),
                    }
                )
        if compared:
            result["compare"] = compared
    return result


def _ttft(answers: Sequence[Answer]) -> float:
    return round(1e3 * statistics.median(answer.ttft for answer in answers), 1)

"""``minispec bench``: speed with the drafter and with none, prompt by prompt, in one process.

Each prompt (or group of ``concurrency`` prompts) runs both ways, one directly after the other and in alternating order,
so that a busy moment of the machine hits both; the speed-up is the median of these paired ratios. Time runs from the
request to its last token, prefill included. The last line printed is one JSON object.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from minispec.config import EngineConfig
from minispec.drafters.base import Drafter, NoDrafter
from minispec.engine import Engine
from minispec.errors import ConfigError
from minispec.load import load_engine
from minispec.request import Request, SamplingParams


@dataclass(frozen=True)
class Prompt:
    """One line of a prompts file: ``{"prompt": …}``, with a ``"category"`` if figures per kind are wanted."""

    text: str
    category: str


@dataclass(frozen=True)
class Run:
    """One group of requests, run together to the end.

    Attributes:
        requests: finished, in order.
        seconds: from the first request to the last token.
        ttft: seconds to the first token, per request.
    """

    requests: list[Request]
    seconds: float
    ttft: list[float]

    @property
    def tokens(self) -> int:
        return sum(request.num_output for request in self.requests)

    @property
    def speed(self) -> float:
        """Tokens per second of the whole group."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Pair:
    """The same prompts with the drafter and with none."""

    prompts: list[Prompt]
    drafted: Run
    plain: Run

    @property
    def speedup(self) -> float:
        return self.drafted.speed / self.plain.speed


def read_prompts(path: Path | None) -> list[Prompt]:
    """Prompts of a JSON-lines file, or the ones that come with minispec.

    Raises:
        ConfigError: a line is not an object with a string ``prompt``.
    """
    text = path.read_text() if path else resources.files("minispec.bench").joinpath("prompts.jsonl").read_text()
    prompts = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            prompts.append(Prompt(item["prompt"] + "", item.get("category", "all")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'{path}, line {number}: a line must be an object like {{"prompt": "…", "category": "…"}}'
            ) from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts


def run_bench(
    config: EngineConfig,
    *,
    prompts: Path | None,
    max_tokens: int,
    temperature: float,
    concurrency: Sequence[int],
    as_json: bool,
) -> int:
    """Measure and print; the exit status is 0.

    Args:
        concurrency: requests run together; several numbers make a sweep, whose report has one entry for each.
    """
    texts = read_prompts(prompts)
    engine = load_engine(replace(config, max_slots=max(config.max_slots, *concurrency)))
    params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i) for i in range(len(texts))]
    console = Console(stderr=True, quiet=as_json)
    # Once unmeasured, so that no first-time cost falls on either side; with a text of its own, as some drafters learn.
    drafter = engine.drafter
    measure(engine, drafter, [Prompt("Count from one to ten.", "")], [SamplingParams(max_tokens=16)])
    head = {
        "target": engine.name,
        "draft": drafter.name,
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    sweep = [compare(engine, drafter, texts, params, number, console) for number in concurrency]
    reports = [{**head, **figures, "machine": machine(engine)} for figures in sweep]
    if not as_json:
        for report in reports:
            Console().print(table(report))
    print(json.dumps(reports[0] if len(sweep) == 1 else {**head, "sweep": sweep, "machine": machine(engine)}))
    return 0


def compare(
    engine: Engine,
    drafter: Drafter,
    texts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    concurrency: int,
    console: Console,
) -> dict[str, Any]:
    """Run all prompts, ``concurrency`` at a time, with the drafter and with none."""
    before = drafter_counts(engine)
    groups = [range(i, min(i + concurrency, len(texts))) for i in range(0, len(texts), concurrency)]
    pairs = []
    for number, group in enumerate(groups):
        some, their = [texts[i] for i in group], [params[i] for i in group]
        drafters: list[Drafter] = [drafter, NoDrafter()]
        if number % 2:
            drafters.reverse()
        runs = [measure(engine, one, some, their) for one in drafters]
        if number % 2:
            runs.reverse()
        pairs.append(Pair(some, *runs))
        console.print(
            f"{number + 1:3}/{len(groups)}  {some[0].category:12} {pairs[-1].drafted.speed:7.1f} tok/s with "
            f"{drafter.name}, {pairs[-1].plain.speed:7.1f} without: {pairs[-1].speedup:.2f} x"
        )
    engine.drafter = drafter
    return {
        "concurrency": concurrency,
        "prompts": len(texts),
        **summary(pairs),
        "drafters": {
            name: {key: count - before.get(name, {}).get(key, 0) for key, count in counts.items()}
            for name, counts in drafter_counts(engine).items()
        },
        "categories": {
            category: summary([pair for pair in pairs if pair.prompts[0].category == category])
            for category in dict.fromkeys(pair.prompts[0].category for pair in pairs)
        },
    }


def drafter_counts(engine: Engine) -> dict[str, dict[str, int]]:
    """Steps, drafted and accepted tokens by drafter, since the engine's start."""
    return {
        name: {"steps": c.steps, "drafted": sum(c.drafted.values()), "accepted": sum(c.accepted.values())}
        for name, c in engine.stats.drafters.items()
    }


def measure(engine: Engine, drafter: Drafter, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Run:
    """Run prompts together with one drafter. The engine must be idle."""
    assert not engine.has_work
    engine.drafter = drafter
    requests = [
        engine.make_request(
            engine.tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}]),
            one,
        )
        for prompt, one in zip(prompts, params, strict=True)
    ]
    begin = time.monotonic()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    seconds = time.monotonic() - begin
    return Run(requests, seconds, [(request.first_token or begin) - begin for request in requests])


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The figures of a set of pairs."""
    stats = [request.speculation for pair in pairs for request in pair.drafted.requests]
    steps = sum(s.steps for s in stats)
    ratios = [pair.speedup for pair in pairs]
    same = [
        a.output == b.output for pair in pairs for a, b in zip(pair.drafted.requests, pair.plain.requests, strict=True)
    ]
    return {
        "tokens_per_s": round(sum(p.drafted.tokens for p in pairs) / sum(p.drafted.seconds for p in pairs), 2),
        "baseline_tokens_per_s": round(sum(p.plain.tokens for p in pairs) / sum(p.plain.seconds for p in pairs), 2),
        "speedup": round(statistics.median(ratios), 4),
        "speedup_min": round(min(ratios), 4),
        "speedup_max": round(max(ratios), 4),
        "acceptance_length": round(sum(s.emitted for s in stats) / steps, 4) if steps else None,
        "drafted_per_step": round(sum(s.drafted for s in stats) / steps, 2) if steps else None,
        "ttft_ms": round(1000 * statistics.median(t for pair in pairs for t in pair.drafted.ttft), 1),
        "identical": round(sum(same) / len(same), 4),
    }


def machine(engine: Engine) -> dict[str, Any]:
    """What the figures were measured on."""
    device = engine.description.get("device", "cpu")
    name = platform.processor() or platform.machine()
    if device == "cuda":
        name = torch.cuda.get_device_name()
    elif (cpuinfo := Path("/proc/cpuinfo")).exists():
        lines = (line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        name = next((value.strip() for key, value in lines if key.strip() == "model name"), name)
    return {
        "name": name,
        "device": device,
        "threads": torch.get_num_threads(),
        "amx_bf16": bool(torch.cpu.get_capabilities().get("amx_bf16")),
        "dtype": engine.description.get("dtype"),
        "torch": torch.__version__,
    }


def table(report: dict[str, Any]) -> Table:
    """The report for people: one row per category."""
    columns = ["tokens_per_s", "baseline_tokens_per_s", "speedup", "acceptance_length", "ttft_ms", "identical"]
    result = Table(title=f"{report['target']} with {report['draft']}, concurrency {report['concurrency']}")
    for heading in ["", *columns]:
        result.add_column(heading.replace("_", " "), justify="right")
    for name, figures in [*report["categories"].items(), ("all", report)]:
        result.add_row(name, *("-" if figures[c] is None else f"{figures[c]:g}" for c in columns))
    return result

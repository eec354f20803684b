"""``minispec bench``: speed with the drafter and with none, prompt by prompt, in one process; and more on demand.

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
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from minispec.bench.against import run_against, spread
from minispec.bench.client import Client, Endpoint
from minispec.bench.plot import check_plot, draw
from minispec.bench.profile import Profile
from minispec.bench.startup import startup
from minispec.bench.sweep import context_sweep, prefill_sweep
from minispec.config import EngineConfig
from minispec.drafters.base import Drafter, NoDrafter
from minispec.engine import Engine
from minispec.errors import ConfigError
from minispec.load import load_engine, preflight
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
            prompts.append(Prompt(item["prompt"] + "", item.get("category", "all") + ""))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'{path}, line {number}: a line must be an object like {{"prompt": "…", "category": "…"}}'
            ) from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured besides speed with and without speculation.

    Attributes:
        prompts: file of prompts; None is the set that comes with minispec.
        max_tokens, temperature: of every request.
        concurrency: requests run together; several numbers make a sweep, whose report has one entry for each.
        profile: where each millisecond of a step goes.
        context_sweep: a decode step by context length.
        prefill: time to the first token by prompt length.
        startup: time to ready and memory of a server process.
        http: what our HTTP server costs over the offline API.
        others: servers to run the same prompts against.
        plot: file for a picture of the report.
        as_json: print one JSON line only.
    """

    prompts: Path | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    concurrency: Sequence[int] = (1,)
    profile: bool = False
    context_sweep: bool = False
    prefill: bool = False
    startup: bool = False
    http: bool = False
    others: Sequence[Endpoint] = ()
    plot: Path | None = None
    as_json: bool = False


def run_bench(config: EngineConfig, options: BenchOptions) -> int:
    """Measure and print; the exit status is 0.

    Raises:
        ConfigError: something asked for cannot be done; nothing has been measured then, but for servers that fail.
    """
    texts = read_prompts(options.prompts)
    if options.plot:
        check_plot(options.plot)
    SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature)
    for endpoint in options.others:
        with Client(endpoint):  # a server that does not answer is known before minutes of measuring
            pass
    report: dict[str, Any] = {}
    console = Console(stderr=True, quiet=options.as_json)
    if options.startup:
        preflight(config)
        report["startup"] = startup(config, serve_arguments(config))
    # Every prompt runs several times: the later runs must not find it read already.
    config = replace(config, max_slots=max(config.max_slots, *options.concurrency), prefix_cache=False)
    engine = load_engine(config)
    drafter = engine.drafter
    params = [
        SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=i)
        for i in range(len(texts))
    ]
    # Once unmeasured, so that no first-time cost falls on either side; with a text of its own, as some drafters learn.
    measure(engine, drafter, [Prompt("Count from one to ten.", "")], [SamplingParams(max_tokens=16)])
    levels = [compare(engine, drafter, texts, params, number, console) for number in options.concurrency]
    if options.profile:
        report["profile"] = profile(engine, texts, params, options.concurrency[0])
    if options.context_sweep:
        report["context_sweep"] = context_sweep(engine)
    if options.prefill:
        report["prefill"] = prefill_sweep(engine)
    if options.http or options.others:
        report |= run_against(
            engine,
            [text.text for text in texts],
            lambda group: _offline(engine, [texts[i] for i in group], [params[i] for i in group]),
            others=options.others,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            concurrency=options.concurrency[0],
            console=console,
        )
    head = {
        "target": engine.name,
        "draft": drafter.name,
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
    }
    figures = levels[0] if len(levels) == 1 else {"sweep": levels}
    report = {**head, **figures, **report, "machine": machine(engine)}
    if options.plot:
        draw(report, options.plot)
    if not options.as_json:
        show(report, levels)
    print(json.dumps(report))
    return 0


def profile(
    engine: Engine, texts: Sequence[Prompt], params: Sequence[SamplingParams], concurrency: int
) -> dict[str, Any]:
    """Run all prompts once more, ``concurrency`` at a time, and take the steps apart."""
    with Profile(engine) as timed:
        for begin in range(0, len(texts), concurrency):
            some = slice(begin, begin + concurrency)
            measure(engine, engine.drafter, texts[some], params[some])
    return timed.report()


def serve_arguments(config: EngineConfig) -> list[str]:
    """The options of ``minispec serve`` that give this configuration."""
    arguments = []
    for field in fields(config):
        value = getattr(config, field.name)
        if value != field.default and value is not None:
            name = f"--{field.name.replace('_', '-')}"
            arguments += [name] if value is True else [name, str(value)]
    return arguments


def _offline(engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> tuple[int, float]:
    run = measure(engine, engine.drafter, prompts, params)
    return run.tokens, run.seconds


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
        **spread("speedup", ratios),
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


def show(report: dict[str, Any], levels: Sequence[dict[str, Any]]) -> None:
    """The report for people."""
    console = Console()
    for level in levels:
        console.print(table(f"{report['target']} with {report['draft']}, concurrency {level['concurrency']}", level))
    if "profile" in report:
        parts = Table(title=f"a step of {report['profile']['step_ms']:g} ms")
        for heading in ("part", "ms", "share"):
            parts.add_column(heading, justify="right")
        for part, ms in report["profile"]["parts_ms"].items():
            parts.add_row(part, f"{ms:g}", f"{100 * report['profile']['shares'][part]:.1f} %")
        console.print(parts)
    for section in ("startup", "context_sweep", "prefill", "http_over_offline", "compare"):
        if section in report:
            console.print(f"[bold]{section.replace('_', ' ')}[/bold]", report[section])


def table(title: str, level: dict[str, Any]) -> Table:
    """One row per category."""
    columns = ["tokens_per_s", "baseline_tokens_per_s", "speedup", "acceptance_length", "ttft_ms", "identical"]
    result = Table(title=title)
    for heading in ["", *columns]:
        result.add_column(heading.replace("_", " "), justify="right")
    for name, figures in [*level["categories"].items(), ("all", level)]:
        result.add_row(name, *("-" if figures[c] is None else f"{figures[c]:g}" for c in columns))
    return result

"""What a forward costs on a CPU, by rows and context, beside the time it takes to read the weights once.

    python -m minispec.bench.step_cost --target smollm2-135m --json

Eager and compiled forwards are checked against each other first and timed in turn within one run. A step is a forward
from the built batch to float32 logits of every row.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from minispec import hub
from minispec.batch import Span, StepBatch
from minispec.compiled import Compilation
from minispec.config import COMPILE, QUANTIZE
from minispec.errors import ConfigError
from minispec.model.llama import Llama
from minispec.native import build
from minispec.runner import ModelRunner, Phase, resolve_dtype

PAGE = 32
SHAPES = (
    *((1, rows, 300) for rows in (1, 8, 16, 32, 64)),
    (8, 1, 300),
    (8, 8, 300),
    (1, 1, 128),
    (1, 1, 2000),
    (1, 16, 2000),
    (1, 1, 8192),
)
"""(slots, nodes of each, context of each)."""


@click.command()
@click.option("--target", required=True, metavar="MODEL")
@click.option("--compile", "mode", type=click.Choice(COMPILE), default="auto", help="off times eager steps alone.")
@click.option(
    "--quantize",
    type=click.Choice(QUANTIZE),
    default="none",
    help="int8 times compiled steps with such weights as well.",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.  [default: physical cores]")
@click.option("--rounds", type=click.IntRange(min=3), default=9, metavar="N", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line only.")
def main(target: str, mode: str, quantize: str, threads: int | None, rounds: int, as_json: bool) -> None:
    """Print the figures."""
    torch.set_num_threads(threads or torch.get_num_threads())
    report = measure(hub.resolve(target), compiled=mode == "auto", int8=quantize == "int8", rounds=rounds)
    report = {"target": target, "processor": build.processor()[0], "threads": torch.get_num_threads(), **report}
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        if not isinstance(value, dict):
            print(f"{name:24} {value}")
    for kind in ("eager", "compiled", "int8"):
        if kind in report:
            print(f"\n{kind}: slots x nodes @ context   ms   (times the read of the weights)")
            for shape, ms in report[kind].items():
                print(f"  {shape:16} {ms:8.2f}  {ms / report['read_ms']:6.2f}")
            print("  ratios:", ", ".join(f"{name} {value}" for name, value in report[f"{kind}_ratios"].items()))


def measure(folder: Path, *, compiled: bool, int8: bool, rounds: int) -> dict[str, Any]:
    """Figures of a model's folder, in milliseconds.

    Raises:
        ConfigError: a compiled step is wanted and cannot be had, or disagrees with the eager one.
    """
    dtype = resolve_dtype("auto", torch.device("cpu"))
    longest = max(slots * -(-(context + nodes) // PAGE) for slots, nodes, context in SHAPES)

    def load(quantize: str = "none") -> ModelRunner:
        model = Llama.load(folder, device="cpu", dtype=dtype, quantize=quantize)
        runner = ModelRunner(model, pages=longest, page_size=PAGE)
        (
            runner.kv.k.zero_(),
            runner.kv.v.zero_(),
        )  # contexts of zeros: their pages must be there, not on their first read
        return runner

    runners = {"eager": load()}
    wanted = {"compiled": "none"} if compiled else {}
    for kind, quantize in (wanted | ({"int8": "int8"} if int8 else {})).items():
        runners[kind] = runner = load(quantize)
        path = build.library_path()
        if build.obstacle() is None and not path.exists():
            build.build(path)
        state = Compilation([runner], cached=path).start()  # which checks it
        if state.phase is not Phase.READY:
            raise ConfigError(f"the compiled step is not used: {state.phase}: {state.reason}")
    model = runners["eager"].model
    weights = torch.empty(weight_bytes(model) // 8, dtype=torch.float64).fill_(1.0)
    cases: dict[tuple[str, str], Callable[[], object]] = {("read", ""): weights.sum}
    for shape in SHAPES:
        batch = StepBatch.build(spans(*shape, model.vocab_size), PAGE, "cpu", model.config.sliding_window)
        for kind, runner in runners.items():
            cases[kind, name_of(*shape)] = lambda runner=runner, batch=batch: runner._forward(batch, runner.kv)  # type: ignore[misc]
    chunk = StepBatch.build([Span.chunk([5] * 256, range(longest), 0, sample_last=True)], PAGE)
    for kind, runner in runners.items():
        cases[kind, "prefill 256"] = lambda runner=runner: runner._forward(chunk, runner.kv)  # type: ignore[misc]
    times = in_turn(cases, rounds)
    report: dict[str, Any] = {"weight_mb": round(weights.nbytes / 1e6), "read_ms": times["read", ""]}
    report["read_gb_per_s"] = round(weights.nbytes / report["read_ms"] / 1e6, 1)
    for kind in runners:
        report[kind] = {name: ms for (of, name), ms in times.items() if of == kind}
        report[f"{kind}_ratios"] = ratios(report[kind], report["read_ms"])
    return report


def in_turn(cases: dict[tuple[str, str], Callable[[], object]], rounds: int) -> dict[tuple[str, str], float]:
    """Medians in milliseconds, each round going through all cases."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in cases}
    with torch.inference_mode():
        for done in range(rounds + 1):
            for key, case in cases.items():
                begin = time.perf_counter()
                case()
                if done:  # the first round warms up
                    times[key].append((time.perf_counter() - begin) * 1e3)
    return {key: round(statistics.median(values), 2) for key, values in times.items()}


def ratios(ms: dict[str, float], read_ms: float) -> dict[str, float]:
    """The comparisons that say how well rows share one read of the weights, and what a long context costs."""
    one = ms["1x1@300"]
    pairs = {
        "step/read": one / read_ms,
        "16 nodes/1": ms["1x16@300"] / one,
        "32 nodes/1": ms["1x32@300"] / one,
        "8 slots x 8/1": ms["8x8@300"] / one,
        "8192/128": ms["1x1@8192"] / ms["1x1@128"],
    }
    return {name: round(value, 2) for name, value in pairs.items()}


def name_of(slots: int, nodes: int, context: int) -> str:
    """As in the report."""
    return f"{slots}x{nodes}@{context}"


def spans(slots: int, nodes: int, context: int, vocab: int) -> list[Span]:
    """A binary tree per slot, behind a context of its own on consecutive pages."""
    ancestors, depths = [1], [0]
    for i in range(1, nodes):
        ancestors.append(ancestors[(i - 1) // 2] | 1 << i)
        depths.append(depths[(i - 1) // 2] + 1)
    pages = -(-(context + nodes) // PAGE)
    tokens = [(i * 7919 + 11) % vocab for i in range(nodes)]
    return [
        Span(tokens, range(slot * pages, (slot + 1) * pages), context, depths, ancestors, range(nodes))
        for slot in range(slots)
    ]


def weight_bytes(model: Llama) -> int:
    """What a step has to read: every layer and the head once; of the embedding, a few rows."""
    outputs = sum(
        linear.out_features * linear.in_features
        for layer in model.layers
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
    )
    return (outputs + model.head.weight.numel()) * model.dtype.itemsize


if __name__ == "__main__":
    main()

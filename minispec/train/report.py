"""What a trained head is worth: it drafts for held-out conversations through the engine; figures, table, picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from minispec.drafters.base import Drafter
from minispec.drafters.fixed_tree import TreeShape
from minispec.drafters.heads import load_head
from minispec.drafters.ngram import NgramDrafter
from minispec.drafters.union import UnionDrafter
from minispec.engine import Engine
from minispec.kv_cache import PagePool
from minispec.request import SamplingParams, SpeculationParams
from minispec.sampling import Noise
from minispec.train.target import Target
from minispec.train.trainer import DEPTH, Quality

TREES = (16, 32, 48)
"""Nodes, roots included, of the trees measured."""
_PAGE = 16
_SLOTS = 8
_TOKENS = 48


def measure(
    folder: Path, target: Target, prompts: Sequence[Sequence[int]], eos_ids: frozenset[int]
) -> dict[str, float]:
    """Tokens per verification at temperature 0, bonus included, on the continuations of ``prompts``.

    Returns:
        ``chain`` of ``DEPTH`` nodes behind the root; ``tree N`` of N nodes; ``tree 32 + ngram``; ``ngram`` alone.
    """
    chain = TreeShape(frozenset((0,) * depth for depth in range(1, DEPTH + 1)))
    found = {}
    for name, nodes, head, ngram in [
        ("chain", DEPTH + 1, True, False),
        *((f"tree {nodes}", nodes, True, False) for nodes in TREES),
        ("tree 32 + ngram", 32, True, True),
        ("ngram", 32, False, True),
    ]:
        longest = max(map(len, prompts)) + _TOKENS + nodes
        pages = _SLOTS * -(-longest // _PAGE)
        runner = target.runner(pages=pages, page_size=_PAGE, max_context=longest)
        noise = Noise(runner.vocab_size, runner.device)
        members: list[Drafter] = []
        if head:
            drafter = load_head("head", folder, target.model, noise, pages=pages, page_size=_PAGE, prefix_cache=False)
            assert drafter is not None
            if name == "chain":
                drafter.follow(chain)
            members.append(drafter)
        if ngram:
            members.append(NgramDrafter())
        whole = members[0] if len(members) == 1 else UnionDrafter(members)
        engine = Engine(
            runner,
            PagePool(pages),
            whole,
            noise,
            max_slots=_SLOTS,
            max_context=longest,
            max_step_tokens=_SLOTS * nodes + 256,
            tree_budget=_SLOTS * nodes,
            eos_ids=eos_ids,
        )
        params = SamplingParams(
            temperature=0.0, max_tokens=_TOKENS, seed=0, speculation=SpeculationParams(max_nodes=nodes)
        )
        requests = [engine.make_request(prompt, params) for prompt in prompts]
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
        steps = sum(request.speculation.steps for request in requests)
        found[name] = round(sum(request.speculation.emitted for request in requests) / max(steps, 1), 3)
    return found


def table(report: dict[str, Any]) -> Table:
    """The report for people."""
    result = Table(title=f"Held-out text: {report['heldout']['conversations']} conversations, temperature 0")
    for heading in ("", *(f"depth {depth}" for depth in range(1, DEPTH + 1))):
        result.add_column(heading, justify="right")
    result.add_row("accepted there", *(f"{share:.2f}" for share in report["quality"]["accuracy"]))
    result.caption = "tokens per verification: " + ", ".join(
        f"{name} {length:.2f}" for name, length in report["acceptance_length"].items()
    )
    return result


def draw(path: Path, curve: Sequence[tuple[int, float, float]], checks: Sequence[tuple[int, Quality]]) -> None:
    """A picture of the training curves.

    Args:
        curve: (step, loss, share of tokens named) per step.
        checks: (step, quality on held-out text).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    width = max(len(curve) // 50, 1)
    for axes, column, label in ((left, 1, "loss of step 1"), (middle, 2, "tokens named in step 1")):
        values = [row[column] for row in curve]
        smooth = [sum(part := values[max(i - width, 0) : i + 1]) / len(part) for i in range(len(values))]
        axes.plot([row[0] for row in curve], values, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot([row[0] for row in curve], smooth, color="tab:blue", label="training")
        axes.set(xlabel="step", ylabel=label)
    steps = [step for step, _ in checks]
    left.plot(steps, [quality.loss for _, quality in checks], "o-", color="tab:orange", label="held out")
    middle.plot(steps, [quality.accuracy[0] for _, quality in checks], "o-", color="tab:orange", label="held out")
    for depth in range(DEPTH):
        right.plot(steps, [quality.accuracy[depth] for _, quality in checks], "o-", label=f"depth {depth + 1}")
    right.set(xlabel="step", ylabel="accepted there, held out", ylim=(0, 1))
    for axes in (left, middle, right):
        axes.legend()
    figure.savefig(path, dpi=110)

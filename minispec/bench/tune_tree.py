"""``minispec tune-tree``: the fixed tree that gives the most tokens per second with one draft on this machine.

How often the target's token is the draft's best, second best, … at each depth is measured on prompts; the best tree of
every size then follows by dynamic programming (Sequoia: Chen et al. 2024, arXiv 2402.12374, section 4.1; the rates here
depend on the depth too), and the best size from the measured costs of a step and of drafting.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from minispec.bench.run import read_prompts
from minispec.budget import FixedBudget
from minispec.config import EngineConfig
from minispec.costs import DraftCost, StepCost
from minispec.drafters import build
from minispec.drafters.base import Drafter
from minispec.errors import ConfigError
from minispec.load import load_engine, measure_step_cost
from minispec.request import Request, SamplingParams, SpeculationParams, TraceStep
from minispec.tree import MAX_NODES

Rates = Sequence[Sequence[float]]
"""[depth][rank]: how often the target takes the child of that rank, given that its walk has come to the parent."""


class BestTrees:
    """The best trees of up to ``most`` nodes, root included.

    V_d(n), the expected tokens of n nodes below and with a node of depth d that was reached, is one (its own token, be
    it a draft or the bonus) and the best division of n - 1 nodes among its children:

        V_d(n) = 1 + max over sum s_k <= n - 1 of sum_k rates[d][k] V_{d+1}(s_k)
    """

    def __init__(self, rates: Rates, most: int) -> None:
        self._most = most
        below = [0.0] + [1.0] * most  # V of the layer that has no children any more
        self._choices: list[list[list[int]]] = []
        for layer in reversed(rates):
            gains = [0.0] * most  # of the ranks from k on, by nodes left for them
            choices: list[list[int]] = []
            for rate in reversed(layer):
                best = [
                    max(range(left + 1), key=lambda s, left=left: (rate * below[s] + gains[left - s], -s))  # type: ignore[misc]
                    for left in range(most)
                ]
                gains = [rate * below[best[left]] + gains[left - best[left]] for left in range(most)]
                choices.append(best)
            self._choices.append(choices[::-1])
            below = [0.0] + [1.0 + gain for gain in gains]
        self._choices.reverse()
        self._tokens = below

    def tokens(self, nodes: int) -> float:
        """Expected tokens per step with at most ``nodes`` nodes."""
        return self._tokens[nodes]

    def shape(self, nodes: int) -> list[list[int]]:
        """The best tree of at most ``nodes`` nodes, as paths of child ranks."""
        paths: list[list[int]] = []

        def grow(path: list[int], left: int) -> None:
            if len(path) == len(self._choices):
                return
            for rank, best in enumerate(self._choices[len(path)]):
                if taken := best[left]:
                    paths.append([*path, rank])
                    grow(paths[-1], taken - 1)
                    left -= taken

        grow([], nodes - 1)
        return sorted(paths, key=lambda path: (len(path), path))


@dataclass(frozen=True)
class Size:
    """The best tree of one size: at most ``nodes`` nodes and ``depth`` layers."""

    nodes: int
    depth: int
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def best_sizes(rates: Rates, most: int, cost: StepCost, layer: float) -> tuple[list[Size], list[list[int]]]:
    """For every number of nodes the depth with the most tokens per second; and the shape of the best of all.

    Args:
        rates: measured acceptance.
        most: largest tree, root included.
        cost: of a forward by its rows.
        layer: seconds of drafting per layer.
    """
    sizes = [Size(1, 0, 1.0, cost(1))]
    trees = {depth: BestTrees(rates[:depth], most) for depth in range(1, len(rates) + 1)}
    for nodes in range(2, most + 1):
        options = [
            Size(nodes, depth, tree.tokens(nodes), cost(nodes) + layer * depth)
            for depth, tree in trees.items()
            if depth < nodes
        ]
        sizes.append(max(options, key=lambda size: size.speed))
    best = max(sizes, key=lambda size: size.speed)
    return sizes, trees[best.depth].shape(best.nodes) if best.depth else []


def comb(depth: int, children: int) -> list[list[int]]:
    """The tree to measure with: at each depth of the likeliest branch all children, in ranks."""
    return [[*[0] * d, rank] for d in range(depth) for rank in range(children)]


def acceptance(steps: Sequence[TraceStep], depth: int, children: int, prior: float = 10.0) -> list[list[float]]:
    """Rates from verifications of combs.

    Few walks come deep: a rate starts from that of the layer above, worth ``prior`` observations.
    """
    hits = [[0] * children for _ in range(depth)]
    visits = [0] * depth
    for step in steps:
        after = [step.tokens[node] for node in step.accepted[1:]] + [step.bonus]
        for d, (node, token) in enumerate(zip(step.accepted, after, strict=True)):
            # siblings stand in the order of their ranks
            ranked = [step.tokens[i] for i in range(1, len(step.tokens)) if step.parents[i] == node]
            if not ranked or token is None:
                break
            visits[d] += 1
            if token in ranked:
                hits[d][ranked.index(token)] += 1
    rates: list[list[float]] = []
    for d in range(depth):
        above = rates[-1] if rates else [0.0] * children
        weight = prior if rates else 0.0
        rates.append([(h + weight * a) / max(visits[d] + weight, 1) for h, a in zip(hits[d], above, strict=True)])
    return rates


class _Meter(FixedBudget):
    """Times the drafting."""

    def __init__(self) -> None:
        self.cost = DraftCost()

    def drafted(self, drafter: Drafter, slots: int, depth: int, seconds: float) -> None:
        if depth:
            self.cost.observe(slots, depth, seconds)


def run_tune_tree(
    config: EngineConfig,
    *,
    prompts: Path | None,
    out: Path | None,
    max_tokens: int,
    temperature: float,
    depth: int,
    children: int,
    nodes: int,
    as_json: bool,
) -> int:
    """Measure, print the table, write the tree; the exit status is 0."""
    if depth * children >= MAX_NODES:
        raise ConfigError(
            f"--depth {depth} times --children {children} needs a tree of {depth * children + 1} nodes to measure "
            f"with; at most {MAX_NODES} are possible"
        )
    if len(names := build.parse(config.draft)) != 1 or names[0] in build.BUILT_IN:
        raise ConfigError(
            f"tune-tree shapes the trees of one draft that runs a model, which --draft {config.draft} is not; give "
            "--draft layers:N, a model or a head"
        )
    texts = read_prompts(prompts)
    with tempfile.TemporaryDirectory() as folder:
        measuring = Path(folder) / "comb.json"
        measuring.write_text(json.dumps(comb(depth, children)))
        engine = load_engine(replace(config, tree=str(measuring), tree_budget=depth * children + 1))
    engine.budget = meter = _Meter()
    console = Console(stderr=True, quiet=as_json)
    steps: list[TraceStep] = []
    for number, prompt in enumerate(texts):
        request = engine.make_request(
            engine.tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}]),
            SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                seed=number,
                speculation=SpeculationParams(trace=True),
            ),
        )
        _run(engine, request)
        steps += request.trace
        console.print(f"{number + 1:3}/{len(texts)}  {len(request.trace)} steps, {request.num_output} tokens")
    rates = acceptance(steps, depth, children)
    cost = measure_step_cost(engine.runner)  # type: ignore[arg-type]
    if cost is None:
        raise ConfigError("the KV cache is too small to measure a step in; raise --kv-memory or --max-context")
    sizes, shape = best_sizes(rates, nodes, cost, meter.cost(1))
    best = max(sizes, key=lambda size: size.speed)
    if out is not None and shape:
        out.write_text(json.dumps(shape) + "\n")
    if not as_json:
        Console().print(*_tables(rates, sizes, best))
        if not shape:
            console.print("This draft does not pay here: plain decoding is fastest. No tree is written.")
    report = {
        "target": engine.name,
        "draft": engine.drafter.name,
        "steps": len(steps),
        "rates": [[round(rate, 4) for rate in layer] for layer in rates],
        "step_ms": {rows: round(cost(rows) * 1e3, 4) for rows in (1, 2, 4, 8, 16, 32)},
        "draft_ms_per_layer": round(meter.cost(1) * 1e3, 4),
        "nodes": best.nodes,
        "depth": best.depth,
        "tokens_per_step": round(best.tokens, 4),
        "speedup": round(best.speed / sizes[0].speed, 4),
        "tree": shape,
    }
    print(json.dumps(report))
    return 0


def _run(engine: Any, request: Request) -> None:
    engine.add(request)
    while engine.has_work:
        engine.step()


def _tables(rates: Rates, sizes: Sequence[Size], best: Size) -> tuple[Table, Table]:
    acceptances = Table(title="the target's token is the draft's choice of rank …")
    acceptances.add_column("depth", justify="right")
    for rank in range(len(rates[0])):
        acceptances.add_column(str(rank), justify="right")
    for d, layer in enumerate(rates, 1):
        acceptances.add_row(str(d), *(f"{rate:.3f}" for rate in layer))
    table = Table(title="the best tree of each size")
    for heading in ("nodes", "depth", "tokens per step", "ms per step", "tokens/s", "speed-up"):
        table.add_column(heading, justify="right")
    # every size up to 16, then fewer; the best one in any case
    for size in sizes:
        if size.nodes <= 16 or size.nodes % 8 == 0 or size is best:
            cells = (
                str(size.nodes),
                str(size.depth),
                f"{size.tokens:.2f}",
                f"{size.seconds * 1e3:.1f}",
                f"{size.speed:.1f}",
                f"{size.speed / sizes[0].speed:.2f}",
            )
            table.add_row(*cells, style="bold" if size is best else None)
    return acceptances, table

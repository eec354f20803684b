"""What shared noise is worth: acceptance length when the drafter ranks by ``log q + g``, and by ``log q`` alone.

Same drafter, same tree size, same prompts and seeds. The text is the same too: a drafter's noise changes no output.

    python -m minispec.bench.coupling --target smollm2-135m --draft layers:25 --temperature 0.8
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from torch import Tensor

from minispec.bench.run import Run, machine, measure, read_prompts
from minispec.config import EngineConfig
from minispec.drafters.grow import RankingDrafter
from minispec.load import load_engine
from minispec.request import SamplingParams
from minispec.sampling import Noise


class Silence(Noise):
    """Noise that is zero everywhere: a drafter that has it ranks by its own probabilities."""

    def rows(self, keys: Sequence[tuple[int, int]]) -> Tensor:
        return torch.zeros(len(keys), self.vocab_size, device=self.device)


@click.command()
@click.option("--target", required=True)
@click.option("--draft", required=True, help="A drafter that runs a model: layers:N, or a model.")
@click.option("--prompts", type=click.Path(exists=True, path_type=Path))
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--temperature", default=0.8, show_default=True)
@click.option("--tree-budget", default=16, show_default=True, help="Nodes per step, root included.")
def main(target: str, draft: str, prompts: Path | None, max_tokens: int, temperature: float, tree_budget: int) -> None:
    """Print one JSON object with both acceptance lengths."""
    engine = load_engine(EngineConfig(target=target, draft=draft, tree_budget=tree_budget, max_slots=1))
    drafter = engine.drafter
    if not isinstance(drafter, RankingDrafter):
        raise click.UsageError(f"--draft {draft} draws no ranks from a model; give layers:N or a model")
    texts = read_prompts(prompts)
    sources = {"shared": drafter.noise, "without": Silence(drafter.noise.vocab_size, drafter.noise.device)}
    runs: dict[str, list[Run]] = {name: [] for name in sources}
    for seed, prompt in enumerate(texts):
        params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)]
        for name, noise in sources.items():
            drafter.noise = noise
            runs[name].append(measure(engine, drafter, [prompt], params))
    report = {
        "target": engine.name,
        "draft": draft,
        "temperature": temperature,
        "tree_budget": tree_budget,
        "acceptance_length": {name: acceptance(own) for name, own in runs.items()},
        "categories": {
            category: {
                name: acceptance([run for run, prompt in zip(own, texts, strict=True) if prompt.category == category])
                for name, own in runs.items()
            }
            for category in dict.fromkeys(prompt.category for prompt in texts)
        },
        "machine": machine(engine),
    }
    print(json.dumps(report))


def acceptance(runs: Sequence[Run]) -> float:
    """Tokens per verification over all runs."""
    stats = [request.speculation for run in runs for request in run.requests]
    return round(sum(s.emitted for s in stats) / sum(s.steps for s in stats), 4)


if __name__ == "__main__":
    main()

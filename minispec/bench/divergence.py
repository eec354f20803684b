"""Where greedy text with speculation leaves the text without, and how near a tie the target was there.

Speculation changes the shape of the batch, and with it the rounding of low-precision arithmetic; where two tokens are
nearly level, that can decide. For each first divergence this reads the common text again and takes the gap between the
two best logits, in units in the last place (ulps) of a bfloat16 number as large as the best.

    python -m minispec.bench.divergence --target smollm2-135m --draft ngram --prompts FILE --max-tokens 96
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import click

from minispec.batch import Span
from minispec.bench.run import machine, measure, read_prompts
from minispec.config import EngineConfig
from minispec.drafters.base import NoDrafter
from minispec.engine import Engine
from minispec.load import load_engine
from minispec.request import SamplingParams


@click.command()
@click.option("--target", required=True)
@click.option("--draft", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--deterministic", is_flag=True)
@click.option("--compile", "compiled", default="auto", show_default=True)
@click.option("--quantize", default="none", show_default=True)
@click.option("--prompts", type=click.Path(exists=True, path_type=Path))
@click.option("--max-tokens", default=96, show_default=True)
def main(
    target: str,
    draft: str,
    dtype: str,
    deterministic: bool,
    compiled: str,
    quantize: str,
    prompts: Path | None,
    max_tokens: int,
) -> None:
    """Print one JSON object: the share of identical texts, and the gaps where they part."""
    engine = load_engine(
        EngineConfig(
            target=target,
            draft=draft,
            dtype=dtype,
            deterministic=deterministic,
            compile=compiled,
            quantize=quantize,
            prefix_cache=False,  # the second reading of a prompt is to be a reading
            max_slots=8,
        )
    )
    drafter, texts = engine.drafter, read_prompts(prompts)
    gaps = []
    for prompt in texts:
        params = [SamplingParams(max_tokens=max_tokens, temperature=0.0)]
        [a] = measure(engine, drafter, [prompt], params).requests
        [b] = measure(engine, NoDrafter(), [prompt], params).requests
        if a.tokens != b.tokens:
            common = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)
            gaps.append(gap_in_ulps(engine, a.tokens[:common]))
    print(
        json.dumps(
            {
                "target": engine.name,
                "draft": drafter.name,
                "prompts": len(texts),
                "max_tokens": max_tokens,
                "identical": round(1 - len(gaps) / len(texts), 4),
                "divergences": len(gaps),
                "within_4_ulps": sum(gap <= 4 for gap in gaps),
                "largest_gap_ulps": round(max(gaps, default=0.0), 3),
                "machine": machine(engine),
            }
        )
    )


def gap_in_ulps(engine: Engine, tokens: Sequence[int]) -> float:
    """Between the target's two best logits after ``tokens``, in bfloat16 ulps of the best. The engine must be idle."""
    pages = range(engine.runner.kv.pages_for(len(tokens)))
    logits = engine.runner.forward([Span.chunk(tokens, pages, 0, sample_last=True)])
    first, second = logits[0].topk(2).values.tolist()
    ulp = 2.0 ** (math.floor(math.log2(abs(first))) - 7)  # 8 significant bits
    return (first - second) / ulp


if __name__ == "__main__":
    main()

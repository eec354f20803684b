"""Structured output: does every answer parse and validate, and what do grammars and speculation give together?

A hundred prompts, twenty for each of five schemas (nested objects, enumerations, arrays with bounds, string patterns,
number ranges), each answered with speculation and, for comparison, without. Needs ``pip install jsonschema``.

    python -m minispec.bench.structured --target smollm2-135m --draft ngram
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from typing import Any

import click
import jsonschema

from minispec.bench.run import Prompt, Run, drafter_counts, machine, measure
from minispec.config import EngineConfig
from minispec.constraint import OutputFormat
from minispec.drafters.base import NoDrafter
from minispec.load import load_engine
from minispec.request import FinishReason, Request, SamplingParams, SpeculationParams


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_NAME = {"type": "string", "minLength": 1, "maxLength": 30}

SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "nested": (
        "a customer record, with an address and an employer",
        _object(
            name=_NAME,
            address=_object(street=_NAME, city=_NAME, location=_object(country=_NAME, capital=_NAME)),
            employer=_object(company=_NAME, role=_NAME),
        ),
    ),
    "enum": (
        "a support ticket: its mood, its urgency, its language and whether it is open",
        _object(
            mood={"enum": ["happy", "neutral", "annoyed", "angry"]},
            urgency={"enum": ["low", "medium", "high", None]},
            language={"type": "string", "enum": ["English", "French", "Spanish", "German"]},
            open={"type": "boolean"},
            level={"enum": [1, 2, 3]},
        ),
    ),
    "array": (
        "a shopping list of two to five items, with tags and a grid of numbers",
        _object(
            items={
                "type": "array",
                "items": _object(item=_NAME, count={"type": "integer", "minimum": 1, "maximum": 50}),
                "minItems": 2,
                "maxItems": 4,
            },
            tags={"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
            pair={
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 9},
                "minItems": 2,
                "maxItems": 2,
            },
        ),
    ),
    "pattern": (
        "a parcel: tracking code, date of dispatch, phone number and e-mail address",
        _object(
            code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
            date={"type": "string", "format": "date"},
            phone={"type": "string", "pattern": r"^\+[0-9]{1,3} [0-9]{6,9}$"},
            email={"type": "string", "pattern": r"^[a-z]{2,10}(\.[a-z]{2,10})?@[a-z]{2,10}\.(com|org)$"},
        ),
    ),
    "range": (
        "a weather report: temperature, humidity, wind and a rating",
        _object(
            temperature={"type": "number", "minimum": -40, "maximum": 55},
            humidity={"type": "integer", "minimum": 0, "maximum": 100},
            wind={"type": "number", "exclusiveMinimum": 0, "maximum": 99.5, "multipleOf": 0.25},
            rating={"type": "integer", "minimum": 1, "exclusiveMaximum": 6},
        ),
    ),
}
"""By what they are about: what to ask for, and the schema of the answer."""

PLACES = (
    "Paris", "Lagos", "Lima", "Oslo", "Kyoto", "Cairo", "Boston", "Mumbai", "Sydney", "Toronto",
    "Berlin", "Nairobi", "Quito", "Hanoi", "Athens", "Dublin", "Seoul", "Tunis", "Riga", "Havana",
)  # fmt: skip


@click.command()
@click.option("--target", required=True)
@click.option("--draft", default="auto", show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--max-tokens", default=400, show_default=True, help="Numbers without bounds may take long.")
@click.option("--places", type=click.IntRange(1, len(PLACES)), default=len(PLACES), help="Prompts per schema.")
@click.option("--concurrency", default=1, show_default=True)
@click.option("--compile", "compile_", default="auto", show_default=True)
@click.option("--compare/--no-compare", default=True, show_default=True, help="Answer each prompt plainly, too.")
def main(
    target: str,
    draft: str,
    temperature: float,
    max_tokens: int,
    places: int,
    concurrency: int,
    compile_: str,
    compare: bool,
) -> None:
    """Print one JSON object."""
    engine = load_engine(EngineConfig(target=target, draft=draft, max_slots=concurrency, compile=compile_))
    drafter = engine.drafter
    runs: dict[str, list[tuple[Run, Run | None]]] = {kind: [] for kind in SCHEMAS}
    invalid: list[dict[str, Any]] = []
    for kind, (topic, schema) in SCHEMAS.items():
        for first in range(0, places, concurrency):
            names = PLACES[first : min(first + concurrency, places)]
            prompts = [Prompt(f"Write {topic}, as JSON. It is about {place}.", kind) for place in names]
            wanted = OutputFormat("json_schema", schema)
            params = [
                SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i, output_format=wanted)
                for i in range(first, first + len(names))
            ]
            drafted, plain = measure(engine, drafter, prompts, params), None
            if compare:
                off = SpeculationParams(enabled=False)
                plain = measure(engine, NoDrafter(), prompts, [replace(one, speculation=off) for one in params])
            runs[kind].append((drafted, plain))
            for run in (drafted, plain):
                for place, request in zip(names, run.requests if run else [], strict=False):
                    if (fault := defect(request, schema)) is not None:
                        invalid.append({"kind": kind, "place": place, "text": request.text, "fault": fault})
    pairs = [pair for own in runs.values() for pair in own]
    total = places * len(SCHEMAS)
    print(
        json.dumps(
            {
                "target": engine.name,
                "draft": drafter.name,
                "temperature": temperature,
                "concurrency": concurrency,
                "valid": total - len({(fault["kind"], fault["place"]) for fault in invalid}),
                "of": total,
                **figures(pairs),
                "schemas": {kind: figures(own) for kind, own in runs.items()},
                "drafters": drafter_counts(engine),
                "invalid": invalid,
                "machine": machine(engine),
            }
        )
    )


def defect(request: Request, schema: dict[str, Any]) -> str | None:
    """What is wrong with an answer; None if it is whole, parses and validates."""
    if request.finish_reason is not FinishReason.STOP:
        return f"finish reason {request.finish_reason}, {request.error}"
    try:
        jsonschema.validate(json.loads(request.text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def figures(pairs: list[tuple[Run, Run | None]]) -> dict[str, Any]:
    """Of runs with speculation, each with its run without, if that was made."""
    stats = [request.speculation for run, _ in pairs for request in run.requests]
    steps = sum(own.steps for own in stats)
    compared = [(run, plain) for run, plain in pairs if plain is not None]
    same = [a.output == b.output for run, plain in compared for a, b in zip(run.requests, plain.requests, strict=True)]
    return {
        "tokens": sum(run.tokens for run, _ in pairs),
        "acceptance_length": round(sum(own.emitted for own in stats) / steps, 3) if steps else None,
        "speedup": round(statistics.median(plain.seconds / run.seconds for run, plain in compared), 3)
        if compared
        else None,
        "identical": round(sum(same) / len(same), 4) if same else None,
    }


if __name__ == "__main__":
    main()

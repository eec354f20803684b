"""The schemas of bench.structured: whatever their masks allow validates, and faults are seen."""

from __future__ import annotations

import random

import pytest

from minispec.bench.structured import SCHEMAS, defect
from minispec.constraint import OutputFormat
from minispec.request import FinishReason, Request, SamplingParams
from test_constraint import grammars, tokenizer, walk


def finished(text: str, reason: FinishReason = FinishReason.STOP) -> Request:
    request = Request("r", (0,), SamplingParams())
    request.text, request.finish_reason = text, reason
    return request


@pytest.mark.parametrize("kind", SCHEMAS)
def test_answers_validate(kind: str) -> None:
    _, schema = SCHEMAS[kind]
    rng, own = random.Random(3), tokenizer("bytes")
    for _ in range(3):
        tokens, end = walk(grammars("bytes").constraint(OutputFormat("json_schema", schema)), own, rng, most=2000)
        assert end and defect(finished(bytes(tokens).decode()), schema) is None


def test_faults_are_named() -> None:
    _, schema = SCHEMAS["range"]
    assert "finish reason length" in str(defect(finished('{"', FinishReason.LENGTH), schema))
    assert "Expecting" in str(defect(finished("{"), schema))
    cold = '{"temperature": -41, "humidity": 3, "wind": 0.25, "rating": 1}'
    assert "-41 is less than the minimum" in str(defect(finished(cold), schema))

"""Demands on the form of an answer: ``response_format`` as in OpenAI's API, ``structured_outputs`` as in vLLM's."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from minispec.constraint import OutputFormat, lark_string
from minispec.errors import RequestError

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as models were trained to write it and as `OutputFormat` lays it out."""


class JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True, serialize_by_alias=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema.")
    strict: bool | None = Field(default=None, description="Makes no difference: the schema always holds.")


class ResponseFormat(BaseModel):
    """OpenAI's way to ask for JSON."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(default=None, description="With type json_schema, and only then.")

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema is given exactly with "type": "json_schema"')
        return self

    def output_format(self) -> OutputFormat | None:
        if self.json_schema is not None:
            return OutputFormat("json_schema", self.json_schema.schema_)
        return OutputFormat("json_object") if self.type == "json_object" else None


class StructuredOutputs(BaseModel):
    """vLLM's way to ask for a form; exactly one of the keys. An unknown key in it is a mistake."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: dict[str, Any] | None = Field(default=None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(default=None, description="true: any JSON object.")
    regex: str | None = Field(default=None, description="Rust's syntax, without look-around and back references.")
    choice: list[str] | None = Field(default=None, description="One of these texts.")
    grammar: str | None = Field(default=None, description="llguidance's variant of Lark.")

    @model_validator(mode="after")
    def _check(self) -> StructuredOutputs:
        if len(self._given()) != 1:
            raise ValueError("give exactly one of json, json_object (true), regex, choice and grammar")
        return self

    def output_format(self) -> OutputFormat:
        [(kind, value)] = self._given().items()
        return OutputFormat(kind, value)

    def _given(self) -> dict[str, Any]:
        values = {"json_schema": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given = {kind: value for kind, value in values.items() if value is not None}
        return {**given, "json_object": ""} if self.json_object else given


def chosen_format(response: ResponseFormat | None, structured: StructuredOutputs | None) -> OutputFormat | None:
    """The one form that a request asks for, None for free text.

    Raises:
        RequestError: both fields ask for one, or what they ask for is impossible.
    """
    first = response.output_format() if response is not None else None
    if structured is None:
        return first
    if first is not None:
        raise RequestError(
            "response_format and structured_outputs both ask for a form; leave one out.", param="structured_outputs"
        )
    try:
        return structured.output_format()
    except RequestError as error:
        raise RequestError(str(error), param="structured_outputs") from None


def lark_rule(wanted: OutputFormat) -> str:
    """The form as a Lark rule, to stand in a grammar with other rules.

    Raises:
        RequestError: it is a grammar already.
    """
    match wanted.kind:
        case "json_object":
            return f"%json {json.dumps({'type': 'object', 'x-guidance': LAYOUT})}"
        case "json_schema":
            return f"%json {json.dumps({**json.loads(wanted.value), 'x-guidance': LAYOUT})}"
        case "regex":
            return f"/{_escape_slashes(wanted.value)}/"
        case "choice":
            return " | ".join(map(lark_string, wanted.value))
    raise RequestError(
        "A grammar describes the whole answer, so it goes neither with tools nor with a model that reasons first; use "
        "regex, choice or json.",
        param="structured_outputs",
    )


def _escape_slashes(regex: str) -> str:
    """The expression with every bare slash escaped: they delimit it in Lark."""
    escaped, is_escape = "", False
    for character in regex:
        escaped += "\\/" if character == "/" and not is_escape else character
        is_escape = character == "\\" and not is_escape
    return escaped

"""The messages of a chat request, as they come and as chat templates want them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from minispec.errors import RequestError
from minispec.server.json_body import short

_CONTENT_SCHEMA = {
    "description": "A text, or text parts, which are joined. Only assistant messages may have none.",
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
        {"type": "null"},
    ],
}

_WHO_MAY_BE_SILENT: Any = {
    "anyOf": [
        {"properties": {"role": {"const": "assistant"}}},
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
    ]
}


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(BaseModel):
    """A call that the model made in an earlier answer."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One message. Further keys are handed to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra=_WHO_MAY_BE_SILENT)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # checked with the chat template's own words for it, which name the part
    content: Annotated[Any, WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, description="Of an assistant message.")
    tool_call_id: str | None = Field(default=None, description="Of a tool message: the call that it answers.")
    reasoning_content: str | None = Field(default=None, description="Of an assistant message.")


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages for the chat template.

    ``developer`` is the newer name of ``system``, which templates know; and templates want the arguments of calls as
    objects.

    Raises:
        RequestError: no messages, or arguments that are no JSON object.
    """
    if not messages:
        raise RequestError("messages is empty; give at least one message.", param="messages")
    given = [message.model_dump(exclude_unset=True) for message in messages]
    for index, message in enumerate(given):
        if message["role"] == "developer":
            message["role"] = "system"
        for number, call in enumerate(message.get("tool_calls") or ()):
            where = f"messages[{index}].tool_calls[{number}].function.arguments"
            call["type"] = "function"
            call["function"]["arguments"] = _object(call["function"]["arguments"], where)
    return given


def _object(text: str, param: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be a JSON object written as a string, not {short(text)}.", param=param)
    return value

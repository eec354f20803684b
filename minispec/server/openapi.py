"""The OpenAPI document, made of the same models that requests are checked with."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import minispec
from minispec.server.response_schema import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    DetokenizeAnswer,
    ErrorBody,
    HealthBody,
    ModelCard,
    ModelList,
    OpenApiDocument,
    TokenizeAnswer,
    UnhealthyBody,
)
from minispec.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_MODELS: tuple[type[BaseModel], ...] = (
    *(ChatBody, CompletionBody, TokenizeBody, DetokenizeBody),
    *(ChatCompletion, ChatChunk, Completion, CompletionChunk, TokenizeAnswer, DetokenizeAnswer),
    *(ModelList, ModelCard, HealthBody, UnhealthyBody, ErrorBody, OpenApiDocument),
)
_REF = "#/components/schemas/{model}"


@cache
def openapi_document() -> dict[str, Any]:
    """The document, version 3.1."""
    _, schemas = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "minispec",
            "version": minispec.__version__,
            "description": "An OpenAI-compatible API; docs/api.md has the policies and the limits.",
        },
        "paths": {
            "/v1/chat/completions": {"post": _post("Answer a conversation", ChatBody, ChatCompletion, ChatChunk)},
            "/v1/completions": {"post": _post("Continue a text", CompletionBody, Completion, CompletionChunk)},
            "/tokenize": {"post": _post("Token ids of a text or of a conversation", TokenizeBody, TokenizeAnswer)},
            "/detokenize": {"post": _post("The text of token ids", DetokenizeBody, DetokenizeAnswer)},
            "/v1/models": {"get": _get("The served model", ModelList)},
            "/v1/models/{model}": {
                "get": _get("The served model", ModelCard),
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
            },
            "/health": {"get": _get("Whether requests are served", HealthBody, {"503": _json(UnhealthyBody)})},
            "/metrics": {"get": _operation("Metrics for Prometheus", _content("text/plain", {"type": "string"}))},
            "/openapi.json": {"get": _get("This document", OpenApiDocument)},
        },
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # needed only where the server was started with --api-key
        "security": [{}, {"key": []}],
    }


def _post(summary: str, body: type[BaseModel], answer: type[BaseModel], chunk: type[BaseModel] | None = None) -> Any:
    success = _json(answer)
    if chunk is not None:
        told = f"With stream: server-sent events, each with a {chunk.__name__} as JSON, the last one `[DONE]`."
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "description": told}
        success["content"] |= _content("text/event-stream", event)["content"]
    return {**_operation(summary, success), "requestBody": {"required": True, "content": _json(body)["content"]}}


def _get(summary: str, answer: type[BaseModel], others: dict[str, Any] | None = None) -> Any:
    operation = _operation(summary, _json(answer))
    operation["responses"] |= others or {}
    return operation


def _operation(summary: str, success: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": success, "default": _json(ErrorBody)}}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return _content("application/json", {"$ref": _REF.format(model=model.__name__)}, model.__doc__ or model.__name__)


def _content(kind: str, schema: dict[str, Any], description: str = "") -> dict[str, Any]:
    return {"description": description or kind, "content": {kind: {"schema": schema}}}

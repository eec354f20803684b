"""What the API answers with, as models: for the OpenAPI document, and for tests that hold real answers to it.

A field with a default is there in some answers only.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base of all models here: no field may be missing from the document."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answer):
    """Every answer from 400 up."""

    error: ErrorDetail


class UnhealthyBody(ErrorBody):
    status: str


class HealthBody(Answer):
    status: Literal["ok"]


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class SpeculationUsage(Answer):
    steps: int
    drafted: int
    accepted: int
    acceptance_length: float | None


class PromptDetails(Answer):
    cached_tokens: int


class CompletionDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None
    speculation: SpeculationUsage


class TraceStepBody(Answer):
    tokens: list[int]
    parents: list[int]
    accepted: list[int]
    bonus: int | None


class PromptToken(Answer):
    logprob: float
    decoded_token: str


class Choice(Answer):
    """What every choice has."""

    index: int
    speculation_trace: list[TraceStepBody] | None = None


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class FunctionBody(Answer):
    name: str
    arguments: str


class ToolCallBody(Answer):
    id: str
    type: Literal["function"]
    function: FunctionBody


class AnswerMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallBody] | None = None


class ChatChoice(Choice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Answer):
    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Choice):
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(Answer):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobsBody(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Choice):
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(Answer):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(Answer):
    prompt: str


class OpenApiDocument(BaseModel):
    """This document."""

    model_config = ConfigDict(extra="allow")

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]

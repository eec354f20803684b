"""How the two generating endpoints word their answers, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from minispec.request import FinishReason, Request, TokenEvent, TokenLogprobs
from minispec.server import stream
from minispec.server.answer import Answers, message_of
from minispec.server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from minispec.server.schema import ChatBody, CompletionBody, GenerationBody
from minispec.tokenizer import Tokenizer


class Reply:
    """What both endpoints share.

    Args:
        reply_id: id of the whole reply, also of each of its chunks.
        model: name of the served model.
        body: the request that is answered.
        tokenizer: of the model.
    """

    whole_object = ""
    chunk_object = ""

    def __init__(self, reply_id: str, model: str, body: GenerationBody, tokenizer: Tokenizer) -> None:
        self._head = {"id": reply_id, "created": int(time.time()), "model": model}
        self._include_usage = body.include_usage
        self._choices = body.choices
        self._tokenizer = tokenizer
        self._alternatives = body.wanted_logprobs
        self._with_prompt_logprobs = body.prompt_logprobs is not None

    def whole(self, requests: Sequence[Request]) -> dict[str, Any]:
        """The answer without streaming, once the requests have ended."""
        choices = [
            {"index": index, **self._content(index, request), **self._prompt_logprobs(request), **_trace(request)}
            for index, request in enumerate(requests)
        ]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self.usage(requests)}

    def of(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """The chunks' choices for one event: none while the text is held back."""
        raise NotImplementedError

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The chunk around ``choices``. Where usage was asked for, all chunks but the last carry a null."""
        extra = {"usage": usage} if self._include_usage else {}
        return {**self._head, "object": self.chunk_object, "choices": choices, **extra}

    def usage(self, requests: Sequence[Request]) -> dict[str, Any]:
        """The ``usage`` object of the whole reply."""
        return stream.usage(requests, self._choices)

    def _content(self, index: int, request: Request) -> dict[str, Any]:
        raise NotImplementedError

    def _prompt_logprobs(self, request: Request) -> dict[str, Any]:
        if not self._with_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._tokenizer, request.prompt_logprobs)}


class ChatReply(Reply):
    """POST /v1/chat/completions. The role comes with the first delta; the finish reason in a chunk of its own.

    Args:
        answers: how the answers are read.
    """

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, reply_id: str, model: str, body: ChatBody, tokenizer: Tokenizer, answers: Answers) -> None:
        super().__init__(reply_id, model, body, tokenizer)
        self._answers = answers
        self._parsers = [answers.parser() for _ in range(self._choices)]
        self._begun: set[int] = set()
        # Tokens whose text is held back: they go with the next chunk, as none may be empty.
        self._pending: list[list[TokenLogprobs]] = [[] for _ in range(self._choices)]

    def of(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        parser, pending = self._parsers[index], self._pending[index]
        pending += event.logprobs
        deltas = parser.feed(event.text) if event.text else []
        reason = event.finish_reason
        if reason is not None:
            deltas = [*_merged([*deltas, *parser.finish()]), {}]
        if not deltas:
            return []
        if index not in self._begun:
            self._begun.add(index)
            deltas[0] = {"role": "assistant", **deltas[0]}
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        choices[0]["logprobs"] = self._logprobs(pending)
        pending.clear()
        if reason is not None:
            choices[-1] |= {"finish_reason": self._reason(reason, parser.num_calls), **_trace(event.request)}
        return choices

    def usage(self, requests: Sequence[Request]) -> dict[str, Any]:
        usage = super().usage(requests)
        if self._parsers[0].reasons:
            reasoning = sum(map(self._answers.reasoning_tokens, requests))
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def _content(self, index: int, request: Request) -> dict[str, Any]:
        parser = self._answers.parser()
        message = message_of(request.text, parser)
        assert request.finish_reason is not None
        return {
            "message": message,
            "logprobs": self._logprobs(request.logprobs),
            "finish_reason": self._reason(request.finish_reason, parser.num_calls),
        }

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._alternatives is None or not tokens:
            return None
        return chat_logprobs(self._tokenizer, tokens, self._alternatives)

    @staticmethod
    def _reason(reason: FinishReason, num_calls: int) -> str:
        return "tool_calls" if num_calls and reason is FinishReason.STOP else reason.value


class CompletionReply(Reply):
    """POST /v1/completions.

    Args:
        echoes: for each prompt the text that its choices begin with.
    """

    whole_object = chunk_object = "text_completion"

    def __init__(
        self, reply_id: str, model: str, body: CompletionBody, tokenizer: Tokenizer, echoes: Sequence[str]
    ) -> None:
        super().__init__(reply_id, model, body, tokenizer)
        self._echoes = echoes if body.echo else None
        self._begun: set[int] = set()
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._pending: dict[int, list[TokenLogprobs]] = {}

    def of(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        self._pending.setdefault(index, []).extend(event.logprobs)
        text, reason = event.text, event.finish_reason
        is_first = index not in self._begun
        if is_first:
            text = self._echo(index) + text
        if not text and reason is None:
            return []
        self._begun.add(index)
        logprobs = self._piece(index, event.request, self._pending.pop(index), with_prompt=is_first)
        trace = _trace(event.request) if reason else {}
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, **trace}]

    def _content(self, index: int, request: Request) -> dict[str, Any]:
        return {
            "text": self._echo(index) + request.text,
            "logprobs": self._piece(index, request, request.logprobs, with_prompt=True),
            "finish_reason": request.finish_reason,
        }

    def _echo(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[index // self._choices]

    def _piece(
        self, index: int, request: Request, generated: Sequence[TokenLogprobs], *, with_prompt: bool
    ) -> dict[str, Any] | None:
        """The log-probabilities of the next piece of a choice, those of the prompt in front of the first if it is
        given back."""
        if self._alternatives is None:
            return None
        is_echoed = self._echoes is not None
        if index not in self._logprobs:
            decoder = self._tokenizer.decoder(() if is_echoed else request.prompt)
            self._logprobs[index] = CompletionLogprobs(self._tokenizer, decoder)
        tokens: list[TokenLogprobs | None] = [*generated]
        ids = [token.token for token in generated]
        if with_prompt and is_echoed:
            tokens, ids = [*request.prompt_logprobs, *tokens], [*request.prompt, *ids]
        if not ids:
            return None
        return self._logprobs[index].piece(ids, tokens)


def _merged(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of content joined to one, so that a text comes in one chunk even at its end."""
    merged: list[dict[str, Any]] = []
    for delta in deltas:
        if merged and "content" in delta and "content" in merged[-1]:
            merged[-1] = {"content": merged[-1]["content"] + delta["content"]}
        else:
            merged.append(delta)
    return merged


def _trace(request: Request) -> dict[str, Any]:
    """The field with the request's verifications, where they were asked for."""
    if not request.params.speculation.trace:
        return {}
    return {"speculation_trace": [asdict(step) for step in request.trace]}

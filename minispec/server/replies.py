"""How the two generating endpoints word their answers, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from minispec.request import Request, TokenEvent
from minispec.server.schema import ChatBody, CompletionBody, GenerationBody
from minispec.server.stream import usage


class Reply:
    """What both endpoints share.

    Args:
        reply_id: id of the whole reply, also of each of its chunks.
        model: name of the served model.
        body: the request that is answered.
    """

    whole_object = ""
    chunk_object = ""

    def __init__(self, reply_id: str, model: str, body: GenerationBody) -> None:
        self._head = {"id": reply_id, "created": int(time.time()), "model": model}
        self._include_usage = body.include_usage

    def whole(self, requests: Sequence[Request]) -> dict[str, Any]:
        """The answer without streaming, once the requests have ended."""
        choices = [
            {
                "index": index,
                **self._content(request),
                "logprobs": None,
                "finish_reason": request.finish_reason,
                **_trace(request),
            }
            for index, request in enumerate(requests)
        ]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage(requests)}

    def of(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """The chunks' choices for one event: none while the text is held back."""
        raise NotImplementedError

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The chunk around ``choices``. Where usage was asked for, all chunks but the last carry a null."""
        extra = {"usage": usage} if self._include_usage else {}
        return {**self._head, "object": self.chunk_object, "choices": choices, **extra}

    def _content(self, request: Request) -> dict[str, Any]:
        raise NotImplementedError


class ChatReply(Reply):
    """POST /v1/chat/completions. The role comes with the first delta; the finish reason in a chunk of its own."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, reply_id: str, model: str, body: ChatBody) -> None:
        super().__init__(reply_id, model, body)
        self._begun: set[int] = set()

    def of(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        deltas: list[tuple[dict[str, Any], str | None]] = []
        if event.text:
            deltas.append(({"content": event.text}, None))
        if event.finish_reason is not None:
            deltas.append(({}, event.finish_reason))
        if deltas and index not in self._begun:
            self._begun.add(index)
            deltas[0] = ({"role": "assistant", **deltas[0][0]}, deltas[0][1])
        return [
            {
                "index": index,
                "delta": delta,
                "logprobs": None,
                "finish_reason": reason,
                **(_trace(event.request) if reason else {}),
            }
            for delta, reason in deltas
        ]

    def _content(self, request: Request) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": request.text, "refusal": None}}


class CompletionReply(Reply):
    """POST /v1/completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, reply_id: str, model: str, body: CompletionBody) -> None:
        super().__init__(reply_id, model, body)

    def of(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        if not event.text and event.finish_reason is None:
            return []
        reason = event.finish_reason
        trace = _trace(event.request) if reason else {}
        return [{"index": index, "text": event.text, "logprobs": None, "finish_reason": reason, **trace}]

    def _content(self, request: Request) -> dict[str, Any]:
        return {"text": request.text}


def _trace(request: Request) -> dict[str, Any]:
    """The field with the request's verifications, where they were asked for."""
    if not request.params.speculation.trace:
        return {}
    return {"speculation_trace": [asdict(step) for step in request.trace]}

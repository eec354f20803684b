"""LLM: the offline Python API.

Example::

    from minispec import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    [output] = llm.chat([{"role": "user", "content": "Name three rivers."}], SamplingParams(temperature=0))
    print(output.text)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minispec.config import EngineConfig
from minispec.engine import Engine
from minispec.errors import RequestError
from minispec.load import load_engine
from minispec.request import Request, SamplingParams, TokenEvent, TokenLogprobs

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    Attributes:
        text: generated text, without the stop string.
        token_ids: generated ids, with the token that ended the request.
        finish_reason: ``stop``, ``length``, or ``error`` where the request could not be gone on with.
        usage: prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details {cached_tokens} and speculation
            {steps, drafted, accepted, acceptance_length}.
        error: what went wrong, for ``error``.
        logprobs: with ``SamplingParams.logprobs``, one entry per token of ``token_ids``.
        prompt_logprobs: with ``SamplingParams.prompt_logprobs``, one entry per token of the prompt, the first None.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    usage: dict[str, Any]
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @staticmethod
    def of(request: Request) -> RequestOutput:
        assert request.finish_reason is not None
        params = request.params
        return RequestOutput(
            text=request.text,
            token_ids=request.output,
            finish_reason=request.finish_reason.value,
            usage=usage(request),
            error=request.error,
            logprobs=None if params.logprobs is None else request.logprobs,
            prompt_logprobs=None if params.prompt_logprobs is None else request.prompt_logprobs,
        )


def usage(request: Request) -> dict[str, Any]:
    """Token counts of a request, as in API responses."""
    return {
        "prompt_tokens": len(request.prompt),
        "completion_tokens": request.num_output,
        "total_tokens": len(request.tokens),
        "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
        "speculation": request.speculation.as_dict(),
    }


class LLM:
    """One model, ready to generate. Not thread-safe.

    Args:
        target: the model: a pulled name, a folder, a Hugging Face id in the local cache.
        draft: ``auto``, ``none``, ``ngram``, or a draft model.
        device: ``auto``, ``cuda`` or ``cpu``.
        dtype: ``auto``, ``bfloat16``, ``float16`` or ``float32``.
        settings: any other field of EngineConfig, such as ``max_slots`` or ``max_context``.

    Raises:
        ConfigError, ModelError: the settings or the model cannot be used; the message has the remedy.
    """

    def __init__(
        self, target: str, draft: str = "auto", *, device: str = "auto", dtype: str = "auto", **settings: Any
    ) -> None:
        self.engine: Engine = load_engine(
            EngineConfig(target=target, draft=draft, device=device, dtype=dtype, **settings)
        )
        # a step serves all requests at once, so one stream's step may bring another's events
        self._inboxes: dict[Request, deque[TokenEvent]] = {}

    def default_params(self, **params: Any) -> SamplingParams:
        """Sampling parameters with the model's own defaults for what is not given."""
        return SamplingParams(**{**self.engine.default_params, **params})

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue prompts, as a batch.

        Args:
            prompts: strings or lists of token ids, or one of them.
            params: for all prompts, or one per prompt; None for the model's defaults.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or parameter is unusable; nothing has been generated then.
        """
        requests = self._requests([self._encode(prompt) for prompt in _prompts(prompts)], params)
        for _ in self._run(requests):
            pass
        return [RequestOutput.of(request) for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of ``{"role", "content"}``), or several; as ``generate`` otherwise."""
        requests = self._requests(self._render(messages), params)
        for _ in self._run(requests):
            pass
        return [RequestOutput.of(request) for request in requests]

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Continue one prompt, or answer one conversation, event by event; closing the iterator cancels it."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            [ids] = self._render(prompt)  # type: ignore[arg-type]
        else:
            ids = self._encode(prompt)  # type: ignore[arg-type]
        yield from self._run(self._requests([ids], params))

    def _render(self, messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[int]]:
        if not messages:
            raise RequestError("there are no messages to answer", param="messages")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        return [self.engine.tokenizer.apply_chat_template(list(conversation)) for conversation in conversations]

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt)
        try:
            return list(prompt)
        except TypeError:
            message = f"a prompt must be a string or a list of token ids, not {prompt!r}"
            raise RequestError(message, param="prompt") from None

    def _requests(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or self.default_params()] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts need as many SamplingParams, or one; {len(each)} given")
        return [self.engine.make_request(ids, one) for ids, one in zip(prompts, each, strict=True)]

    def _run(self, requests: Sequence[Request]) -> Iterator[TokenEvent]:
        inbox: deque[TokenEvent] = deque()
        for request in requests:
            self._inboxes[request] = inbox
            self.engine.add(request)
        try:
            while inbox or not all(request.finished for request in requests):
                if inbox:
                    yield inbox.popleft()
                else:
                    for event in self.engine.step():
                        self._inboxes[event.request].append(event)
        finally:
            # left early, by an exception or a closed iterator: nothing of it stays behind
            for request in requests:
                self.engine.abort(request)
                del self._inboxes[request]


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]

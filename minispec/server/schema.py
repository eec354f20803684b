"""Request bodies: strict JSON, strict types, and what each field becomes.

Policies (docs/api.md has the whole list): null means absent; a known field that is not supported is refused unless its
value changes nothing; a field nobody knows is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from minispec.chat_template import check_text
from minispec.errors import RequestError
from minispec.request import MAX_STOPS, SamplingParams, SpeculationParams

MAX_PROMPTS = 32
"""Prompts in one /v1/completions request."""

ROLES = ("system", "developer", "user", "assistant", "tool")

_TEMPLATE_ARGUMENTS = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")

# Known fields that are not supported, with the values that ask for nothing (null always does). An empty list or object
# asks for nothing either.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": (),
    "min_tokens": (0,),
    "stop_token_ids": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
}
_UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "echo": (False,),
}
# Here ``logprobs`` is a number, and 0 asks for the chosen token's.
_UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "logprobs": (),
    "echo": (False,),
    "suffix": ("",),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class Speculation(BaseModel):
    """How much is drafted for the request. Only minispec knows this object, so an unknown key in it is a mistake."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool | None = None
    max_nodes: int | None = None
    drafters: list[str] | None = None


class GenerationBody(BaseModel):
    """Fields that /v1/chat/completions and /v1/completions share."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop: Any = None
    speculation: Speculation | None = None
    trace: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Parameters of the request: what it gives, then the model's ``defaults``, then those of SamplingParams."""
        values = {name: value for name, value in defaults.items() if name in _SAMPLING and value is not None}
        given = {name: getattr(self, name) for name in _SAMPLING}
        values |= {name: value for name, value in given.items() if value is not None}
        limit_name, limit = self._limit()
        try:
            return SamplingParams(max_tokens=limit, stop=_stops(self.stop), speculation=self._speculation(), **values)
        except RequestError as error:
            if error.param == "max_tokens" and limit_name != "max_tokens":
                message = str(error).replace("max_tokens", limit_name)
                raise RequestError(message, param=limit_name, code=error.code) from None
            raise

    def _limit(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    def _speculation(self) -> SpeculationParams:
        given = self.speculation.model_dump(exclude_none=True) if self.speculation else {}
        return SpeculationParams(**given, trace=bool(self.trace))


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def _limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super()._limit()

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages for the chat template; ``developer`` is the newer name of ``system``, which templates know."""
        if not self.messages:
            raise RequestError("messages is empty; give at least one message.", param="messages")
        messages = []
        for index, message in enumerate(self.messages):
            role = message.get("role")
            if role not in ROLES:
                raise RequestError(
                    f"messages[{index}].role must be one of {', '.join(ROLES)}, not {_short(role)}.",
                    param=f"messages[{index}].role",
                )
            messages.append({**message, "role": "system" if role == "developer" else role})
        return messages

    def template_variables(self) -> dict[str, Any]:
        """What the request adds to the template's variables."""
        variables = self.chat_template_kwargs or {}
        if clash := sorted(_TEMPLATE_ARGUMENTS & variables.keys()):
            raise RequestError(
                f"chat_template_kwargs cannot set {clash[0]!r}; use the request field of that name.",
                param="chat_template_kwargs",
            )
        return variables


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    prompt: Any = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, at least one, each a text or a list of token ids.

        Raises:
            RequestError: empty, too many, or neither texts nor ids.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            prompts: list[Any] = [prompt]
        elif isinstance(prompt, list) and prompt:
            prompts = [prompt] if type(prompt[0]) is int else prompt
        else:
            raise RequestError(
                "prompt is missing or empty; give a string, a list of token ids, or a list of those.", param="prompt"
            )
        if len(prompts) > MAX_PROMPTS:
            raise RequestError(f"at most {MAX_PROMPTS} prompts are allowed, {len(prompts)} given", param="prompt")
        first = type(prompts[0])
        for one in prompts:
            is_ids = isinstance(one, list) and all(type(token) is int for token in one)
            if type(one) is not first or not (isinstance(one, str) or is_ids):
                raise RequestError(
                    "prompt must be a string, a list of token ids, or a list of strings or of lists of token ids; "
                    "texts and ids cannot be mixed.",
                    param="prompt",
                )
            if not one:
                raise RequestError("an empty prompt has nothing to continue; give at least one token.", param="prompt")
        return prompts


Body = TypeVar("Body", bound=GenerationBody)


def parse_chat(body: bytes) -> ChatBody:
    """Raises RequestError for whatever is wrong with the body; so does `parse_completion`."""
    return _parse(body, ChatBody, _UNSUPPORTED_CHAT)


def parse_completion(body: bytes) -> CompletionBody:
    return _parse(body, CompletionBody, _UNSUPPORTED_COMPLETION)


def _parse(body: bytes, kind: type[Body], unsupported: Mapping[str, tuple[Any, ...]]) -> Body:
    data, is_strict = _load_json(body)
    try:
        parsed = kind.model_validate(data)
    except ValidationError as error:
        raise _type_error(error) from None
    if not is_strict:  # in a field without a type of its own; those with one have been named above
        raise RequestError("The body holds NaN or an infinite number, which JSON does not have.", code="invalid_json")
    for name in unsupported.keys() & data.keys():
        value = data[name]
        if value is not None and value not in ([], {}) and not any(_same(value, no) for no in unsupported[name]):
            raise RequestError(
                f"{name} is not supported yet; leave it out ({_short(value)} given).",
                param=name,
                code="unsupported_parameter",
            )
    if parsed.stream_options is not None and not parsed.stream:
        raise RequestError("stream_options is only allowed with stream=true; leave it out.", param="stream_options")
    return parsed


def _load_json(body: bytes) -> tuple[dict[str, Any], bool]:
    """The object in ``body``, and whether all its numbers are finite.

    Non-finite ones are let through here so that the field that holds one can be named.
    """
    non_finite: list[str] = []

    def number(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):
            non_finite.append(literal)
        return value

    try:
        data = json.loads(body.decode("utf-8"), parse_float=number, parse_constant=number)
    except UnicodeDecodeError as error:
        raise RequestError(f"The body is not UTF-8: byte {error.start} is invalid.", code="invalid_json") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply; flatten it.", code="invalid_json") from None
    except ValueError as error:  # also an integer of thousands of digits
        raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError(f"The body must be a JSON object, not {_short(data)}.", code="invalid_json")
    if b"\\u" in body:  # only an escape can hide half a character in UTF-8
        for name, value in data.items():
            check_text(name)
            _check_texts(value, name)
    return data, not non_finite


def _check_texts(value: Any, param: str) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            check_text(item, param)
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, dict):
            stack += item
            stack += item.values()


def _type_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    if first["type"] == "missing":
        return RequestError(f"{param} is missing; it is required.", param=param)
    if first["type"] == "extra_forbidden":
        known = ", ".join(Speculation.model_fields)
        return RequestError(f"{param} is unknown; {first['loc'][0]} may have {known}.", param=param)
    complaint = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] in ("model_type", "dict_type"):
        complaint = "input should be an object"
    return RequestError(f"{param}: {complaint}, {_short(first['input'])} given", param=param)


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops[: MAX_STOPS + 1]):
        raise RequestError(f"stop must be a string or a list of strings, {_short(value)} given", param="stop")
    return tuple(stops)


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)  # True == 1 in Python, not in JSON


def _short(value: Any) -> str:
    """A value as it stands in JSON, cut to fit an error message."""
    if isinstance(value, list | dict) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:80] + "…"

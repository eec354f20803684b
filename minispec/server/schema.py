"""Fields of the generating requests: their types, and what each becomes.

Policies (docs/api.md has the whole list): null means absent; a known field that is not supported is refused unless its
value changes nothing; a field nobody knows is ignored. Ranges stand here for the OpenAPI document; `SamplingParams`
checks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from minispec.constraint import OutputFormat
from minispec.errors import RequestError
from minispec.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOPS, SamplingParams, SpeculationParams
from minispec.server.formats import ResponseFormat, StructuredOutputs, chosen_format
from minispec.server.json_body import Unsupported, parse_body, short
from minispec.server.messages import Message, template_messages
from minispec.server.tools import CHOICE_SCHEMA, MAX_TOOLS, Tool, ToolUse
from minispec.tokenizer import Tokenizer
from minispec.tree import MAX_NODES

MAX_CHOICES = 128
"""Answers to one request: ``n`` times the number of prompts."""

_TEMPLATE_ARGUMENTS = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})

# Fields that SamplingParams has under the same name, as far as generation_config.json may set them, and the others.
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SAMPLING = (*_DEFAULTED, "seed", "ignore_eos", "min_tokens", "stop_token_ids", "frequency_penalty", "presence_penalty")

_STRUCTURED = Unsupported(remedy="use structured_outputs")
_TOOLS = Unsupported("none", "auto", remedy="use tools and tool_choice")
UNSUPPORTED: dict[str, Unsupported] = {
    "length_penalty": Unsupported(1),
    "bad_words": Unsupported(),
    "allowed_token_ids": Unsupported(),
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "use_beam_search": Unsupported(False),
    "skip_special_tokens": Unsupported(True),
    "include_stop_str_in_output": Unsupported(False),
    "truncate_prompt_tokens": Unsupported(),
}
UNSUPPORTED_CHAT: dict[str, Unsupported] = {
    **UNSUPPORTED,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "modalities": Unsupported(["text"]),
    "audio": Unsupported(),
    "prediction": Unsupported(),
    "reasoning_effort": Unsupported("none"),
    "verbosity": Unsupported("medium"),
    "web_search_options": Unsupported(),
    "echo": Unsupported(False, remedy="use /v1/completions"),
}
UNSUPPORTED_COMPLETION: dict[str, Unsupported] = {
    **UNSUPPORTED,
    "suffix": Unsupported(""),
    "tools": Unsupported(remedy="use /v1/chat/completions"),
}


def _range(description: str, low: float | None = None, high: float | None = None) -> Any:
    """A field whose range the OpenAPI document tells."""
    limits: dict[str, Any] = {name: v for name, v in (("minimum", low), ("maximum", high)) if v is not None}
    return Field(default=None, description=description, json_schema_extra=limits)


_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOPS},
        {"type": "null"},
    ]
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = Field(default=None, description="One more chunk, with the usage, before the end.")
    continuous_usage_stats: bool | None = Field(default=None, description="Not supported: false or absent.")
    include_obfuscation: bool | None = Field(default=None, description="Not supported: false or absent.")


class Speculation(BaseModel):
    """How much is drafted for the request. Only minispec knows this object, so an unknown key in it is a mistake."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool | None = None
    max_nodes: int | None = _range("Most tree nodes that a step verifies for it; 1 drafts nothing.", 1, MAX_NODES)
    drafters: list[str] | None = Field(default=None, description="Names of loaded drafters; others are left out.")


class GenerationBody(BaseModel):
    """Fields that /v1/chat/completions and /v1/completions share."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str | None = Field(default=None, description="The served model, also if absent.")
    stream: bool | None = Field(default=None, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with stream.")
    n: int | None = _range("Answers to each prompt; seeds are counted up from the given one.", 1, MAX_CHOICES)
    best_of: int | None = Field(default=None, description="Only the same as n.")
    max_tokens: int | None = _range("Most tokens to generate. Default: what the context has room for.", 1)
    min_tokens: int | None = _range("Nothing but the limit ends the answer before.", 0)
    temperature: float | None = _range("0 is greedy.", 0, 2)
    top_p: float | None = _range("Keep the likeliest tokens up to this mass; 0 keeps the best.", 0, 1)
    top_k: int | None = _range("Keep this many tokens; 0 and -1 are off.", -1)
    min_p: float | None = _range("Drop tokens less likely than this share of the best.", 0, 1)
    seed: int | None = _range("The same seed gives the same text.", -(2**63), 2**63 - 1)
    frequency_penalty: float | None = _range("Taken for each time that the output has the token.", -2, 2)
    presence_penalty: float | None = _range("Taken if the output has the token.", -2, 2)
    repetition_penalty: float | None = _range("For tokens of prompt and output; 1 is off.", 0.01, 10)
    logit_bias: dict[str, float] | None = Field(
        default=None,
        description="Token id → number from -100 to 100.",
        json_schema_extra={
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "propertyNames": {"pattern": "^[0-9]+$"},
            "maxProperties": MAX_LOGIT_BIAS,
        },
    )
    ignore_eos: bool | None = Field(default=None, description="Go on past end-of-sequence tokens.")
    stop: Annotated[Any, WithJsonSchema(_STOP_SCHEMA)] = Field(default=None, description="End the text; no part of it.")
    stop_token_ids: list[int] | None = Field(
        default=None,
        description="End the text; their own text is not shown.",
        json_schema_extra={"maxItems": MAX_STOPS, "items": {"type": "integer", "minimum": 0}},
    )
    prompt_logprobs: int | None = _range("Alternatives to show at each prompt token. Not with stream.", 0, MAX_LOGPROBS)
    response_format: ResponseFormat | None = Field(default=None, description="JSON, or JSON by a schema.")
    structured_outputs: StructuredOutputs | None = Field(default=None, description="JSON, regex, choice or grammar.")
    speculation: Speculation | None = None
    trace: bool | None = Field(default=None, description="Return the draft trees.")
    user: str | None = Field(default=None, description="A label, ignored.")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    def check(self) -> None:
        """Raises RequestError for fields that do not go together, or a number of choices out of range."""
        if not 1 <= self.choices <= MAX_CHOICES:
            raise RequestError(f"n must be from 1 to {MAX_CHOICES}, {short(self.n)} given", param="n")
        if self.best_of is not None and self.best_of != self.choices:
            raise RequestError(
                f"best_of is only supported with the value of n, which is {self.choices}; leave it out.",
                param="best_of",
                code="unsupported_parameter",
            )
        options = self.stream_options
        if options is None:
            pass
        elif not self.stream:
            raise RequestError("stream_options is only allowed with stream=true; leave it out.", param="stream_options")
        else:
            for name in ("continuous_usage_stats", "include_obfuscation"):
                Unsupported(False).check(f"stream_options.{name}", getattr(options, name))
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs does not go with stream=true; set one of them to null.", param="prompt_logprobs"
            )

    def output_format(self) -> OutputFormat | None:
        """The form that the answer must have, None for free text."""
        return chosen_format(self.response_format, self.structured_outputs)

    @property
    def format_field(self) -> str:
        """The field that asks for the form."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def sampling_params(self, defaults: Mapping[str, Any], output_format: OutputFormat | None) -> SamplingParams:
        """Parameters of the request: what it gives, then the model's ``defaults``, then those of SamplingParams."""
        values = {name: value for name, value in defaults.items() if name in _DEFAULTED and value is not None}
        given = {name: getattr(self, name) for name in _SAMPLING}
        values |= {name: value for name, value in given.items() if value is not None}
        limit_name, limit = self._limit()
        try:
            return SamplingParams(
                max_tokens=limit,
                stop=_stops(self.stop),
                logit_bias=_bias(self.logit_bias),
                logprobs=self.wanted_logprobs,
                prompt_logprobs=self._prompt_logprobs(),
                output_format=output_format,
                speculation=self._speculation(),
                **values,
            )
        except RequestError as error:
            if error.param == "max_tokens" and limit_name != "max_tokens":
                message = str(error).replace("max_tokens", limit_name)
                raise RequestError(message, param=limit_name, code=error.code) from None
            raise

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives to show with each generated token, None for no log-probabilities."""
        raise NotImplementedError

    def _prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def _limit(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    def _speculation(self) -> SpeculationParams:
        given = self.speculation.model_dump(exclude_none=True) if self.speculation else {}
        return SpeculationParams(**given, trace=bool(self.trace))


class PromptFields(BaseModel):
    """Fields that have a say in what a conversation becomes as a prompt."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    tools: list[Tool] | None = Field(
        default=None, description="Functions that the model may call.", json_schema_extra={"maxItems": MAX_TOOLS}
    )
    add_generation_prompt: bool | None = Field(default=None, description="End with the header of an assistant turn.")
    continue_final_message: bool | None = Field(default=None, description="Go on with the last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables for the template.")

    def chat_prompt(self, tokenizer: Tokenizer, messages: Sequence[Message], use: ToolUse) -> list[int]:
        """Token ids of a conversation."""
        variables = self.chat_template_kwargs or {}
        if clash := sorted(_TEMPLATE_ARGUMENTS & variables.keys()):
            raise RequestError(
                f"chat_template_kwargs cannot set {clash[0]!r}; use the request field of that name.",
                param="chat_template_kwargs",
            )
        return tokenizer.apply_chat_template(
            template_messages(messages),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            tools=use.tools or None,
            **variables,
        )


class ChatBody(GenerationBody, PromptFields):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(json_schema_extra={"minItems": 1})
    max_completion_tokens: int | None = _range("The newer name of max_tokens; wins over it.", 1)
    logprobs: bool | None = Field(default=None, description="Return log-probabilities of the tokens.")
    top_logprobs: int | None = _range("Alternatives to show with each; only with logprobs.", 0, MAX_LOGPROBS)
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE_SCHEMA)] = Field(
        default=None, description="Who decides whether one is called."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="false: one call at most.")

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs and self.top_logprobs != 0:
            raise RequestError("top_logprobs needs logprobs=true; set it or leave both out.", param="top_logprobs")

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling_params(self, defaults: Mapping[str, Any], output_format: OutputFormat | None) -> SamplingParams:
        try:
            return super().sampling_params(defaults, output_format)
        except RequestError as error:
            if error.param == "logprobs":  # a number only to the engine
                message = str(error).replace("logprobs", "top_logprobs")
                raise RequestError(message, param="top_logprobs", code=error.code) from None
            raise

    def _limit(self) -> tuple[str, int | None]:
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        limit = getattr(self, name)
        if limit == 0:
            raise RequestError(f"{name} must be at least 1, 0 given", param=name)
        return name, limit

    def tool_use(self) -> ToolUse:
        return ToolUse(self.tools, self.tool_choice, self.parallel_tool_calls)


_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        _TOKENS,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
        {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MAX_CHOICES},
    ]
}


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = Field(description="Text or token ids, one or several.")
    logprobs: int | None = _range("Alternatives to show with each token.", 0, MAX_LOGPROBS)
    echo: bool | None = Field(default=None, description="Give the prompt back in front of the text.")

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def _prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is not None or not self.echo:
            return self.prompt_logprobs
        # A request for no tokens is one to score the prompt, to the engine.
        return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs

    def _limit(self) -> tuple[str, int | None]:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens must be at least 1 (0 only with echo), 0 given", param="max_tokens")
        return super()._limit()

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
        if len(prompts) * self.choices > MAX_CHOICES:
            raise RequestError(
                f"at most {MAX_CHOICES} choices are allowed (prompts times n), {len(prompts) * self.choices} asked for",
                param="prompt" if self.choices == 1 else "n",
            )
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


class TokenizeBody(PromptFields):
    """Body of POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = Field(default=None, description="A raw text.")
    add_special_tokens: bool | None = Field(default=None, description="Put around the text what the model wants; true.")
    messages: list[Message] | None = Field(default=None, description="A conversation, instead.")

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        own = ["add_special_tokens"] if self.prompt is None else list(PromptFields.model_fields)
        for name in own:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} does not go with {'messages' if self.prompt is None else 'prompt'}")
        return self

    def tool_use(self) -> ToolUse:
        return ToolUse(self.tools, None, None)


class DetokenizeBody(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: list[int] = Field(json_schema_extra={"items": {"type": "integer", "minimum": 0}})


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError if an id is none of the tokenizer's."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(f"token ids go from 0 to {vocab_size - 1}, not {short(token)}", param="tokens")


Generating = TypeVar("Generating", ChatBody, CompletionBody)


def parse_chat(body: bytes) -> ChatBody:
    """Raises RequestError for whatever is wrong with the body; so does `parse_completion`."""
    return _checked(parse_body(body, ChatBody, UNSUPPORTED_CHAT))


def parse_completion(body: bytes) -> CompletionBody:
    return _checked(parse_body(body, CompletionBody, UNSUPPORTED_COMPLETION))


def _checked(body: Generating) -> Generating:
    body.check()
    return body


def _bias(given: Mapping[str, float] | None) -> dict[int, float]:
    for token in given or {}:
        if not (token.isascii() and token.isdecimal() and len(token) < 20):
            raise RequestError(
                f'logit_bias has the key {short(token)}; keys are token ids, such as "50256"', param="logit_bias"
            )
    return {int(token): value for token, value in (given or {}).items()}


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops[: MAX_STOPS + 1]):
        raise RequestError(f"stop must be a string or a list of strings, {short(value)} given", param="stop")
    return tuple(stops)

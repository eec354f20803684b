"""The routes, as an ASGI application around an EngineWorker."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from minispec.constraint import PARAM as FORMAT_PARAM
from minispec.errors import RequestError
from minispec.memory import give_back_memory
from minispec.request import Request, SamplingParams, TokenEvent
from minispec.server import metrics
from minispec.server.access_log import AccessLog
from minispec.server.answer import Answers, ChatStyle
from minispec.server.errors import (
    error_response,
    json_response,
    on_client_gone,
    on_exception,
    on_http_error,
    on_request_error,
)
from minispec.server.json_body import parse_body
from minispec.server.middleware import ApiKeys, Cors, RequestIds
from minispec.server.openapi import openapi_document
from minispec.server.replies import ChatReply, CompletionReply, Reply
from minispec.server.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    check_tokens,
    parse_chat,
    parse_completion,
)
from minispec.server.stream import ClientGone, EventStream, Generation, collect
from minispec.tokenizer import Tokenizer
from minispec.worker import EngineWorker, WorkerState

if TYPE_CHECKING:
    from minispec.engine import Engine

# A body of this many bytes takes longer to parse and tokenize than to hand to another thread and back.
_LONG_BODY = 8192
# Names of fields that may ask for a grammar, which takes milliseconds to compile and may take far more.
_GRAMMAR_FIELDS = (b"response_format", b"structured_outputs", b"tools")
# One that takes so much memory meanwhile that what is free again should not stay with the process.
_HUGE_BODY = 1 << 18

BODY_TIMEOUT = 60.0  # seconds for a whole body
# How much of a too large body is read and dropped, so that the client gets to read the answer: a connection that is
# closed with data unread is reset.
_DRAIN_BYTES = 64 << 20

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of the HTTP side.

    Attributes:
        model_name: what clients call the model.
        api_keys: accepted keys; none leaves the server open.
        open_metrics: /metrics needs no key.
        cors_origins: origins browsers may call from; ``*`` is any.
        max_body: largest request body in bytes.
        tool_parser: how tool calls are found in the text: ``auto`` (by the chat template), ``none``, or a format.
        reasoning_parser: how reasoning is: ``auto``, ``none`` or ``think``.
        keep_alive: seconds without a token after which a stream gets a comment.
        write_timeout: seconds a client may leave a full socket unread.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    open_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    max_body: int = 8 << 20
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    keep_alive: float = 10.0
    write_timeout: float = 60.0


class Api:
    """Handlers of all routes.

    Attributes:
        active: generations whose clients still wait; what draining waits for.
        draining: no new requests are taken.
    """

    def __init__(self, worker: EngineWorker, options: ServerOptions) -> None:
        self.active: set[Generation] = set()
        self.draining = False
        self._worker = worker
        self._options = options
        self._latencies = metrics.Latencies()
        self._long_bodies = anyio.CapacityLimiter(1)
        self._statuses: dict[int, int] = {}
        self._created = int(time.time())
        self._style: ChatStyle | None = None

    def routes(self) -> list[Route]:
        """Everything that exists; openapi.py describes it."""
        return [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completion, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/openapi.json", self.openapi),
        ]

    def app(self) -> ASGIApp:
        """The application with everything around it."""
        inner = Starlette(
            routes=self.routes(),
            exception_handlers={
                RequestError: on_request_error,
                HTTPException: on_http_error,
                ClientDisconnect: on_client_gone,
                Exception: on_exception,
            },
        )
        inner.router.redirect_slashes = False  # a redirect would answer before the keys do
        options = self._options
        open_paths = ["/health", *(["/metrics"] if options.open_metrics else [])]
        app: ASGIApp = ApiKeys(inner, options.api_keys, open_paths)
        if options.cors_origins:
            app = Cors(app, options.cors_origins)
        return AccessLog(RequestIds(app), self._statuses)

    def fail_active(self, error: RequestError) -> None:
        """End everything that still runs, with ``error`` as the answer."""
        for generation in list(self.active):
            generation.fail(error)

    # ------------------------------------------------------------------------------------------------------- reading

    async def health(self, http: HttpRequest) -> Response:
        error = self._unready()
        if error is None and self._worker.watchdog.stalled:
            error = RequestError("The engine is in a step that does not return.", code="stalled", status=503)
        if error is None:
            return json_response({"status": "ok"})
        return error_response(error, status=error.code)

    async def metrics(self, http: HttpRequest) -> Response:
        text = metrics.render(self._worker, self._latencies, self._statuses)
        return Response(text, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def models(self, http: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [self._model_card(self._ready_engine())]})

    async def model(self, http: HttpRequest) -> Response:
        engine = self._ready_engine()
        self._check_model(http.path_params["model"])
        return json_response(self._model_card(engine))

    def _model_card(self, engine: Engine) -> dict[str, Any]:
        return {
            "id": self._options.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "minispec",
            "max_model_len": engine.max_context,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._options.model_name:
            shown = name if len(name) <= 100 else name[:100] + "…"
            raise RequestError(
                f"There is no model {shown!r} here; this server serves {self._options.model_name!r}.",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _unready(self) -> RequestError | None:
        """Why no request can be served now, None if one can."""
        state = self._worker.state
        if state is WorkerState.READY and not self.draining:
            return None
        if state is WorkerState.LOADING and not self.draining:
            return RequestError("The model is being loaded; try again in a few seconds.", code="loading", status=503)
        if state is WorkerState.FAILED:
            return RequestError("The engine has failed; restart the server.", code="failed", status=503)
        return RequestError("The server is shutting down; use another one.", code="draining", status=503)

    def _ready_engine(self) -> Engine:
        if (error := self._unready()) is not None:
            raise error
        assert self._worker.engine is not None
        return self._worker.engine

    # ---------------------------------------------------------------------------------------------------- generating

    async def chat(self, http: HttpRequest) -> Response:
        engine = self._ready_engine()
        tokenizer = engine.tokenizer
        style = self._chat_style(tokenizer)

        def prepare(raw: bytes) -> tuple[ChatBody, list[Request], Reply]:
            body = parse_chat(raw)
            self._check_model(body.model)
            use = body.tool_use()
            style.check(use)
            prompt = body.chat_prompt(tokenizer, body.messages, use)
            answers = Answers(style, use, tokenizer, prompt)
            wanted = body.output_format()
            params = body.sampling_params(engine.default_params, answers.output_format(wanted))
            reply_id = f"chatcmpl-{uuid.uuid4().hex}"
            source = "tools" if use and wanted is None else body.format_field
            requests = self._requests(engine, body, [prompt], params, reply_id, http.scope["owner"], source)
            for request in requests:
                answers.prepare(request)
            return body, requests, ChatReply(reply_id, self._options.model_name, body, tokenizer, answers)

        return await self._answer(http, *await self._prepare(http, prepare))

    async def completion(self, http: HttpRequest) -> Response:
        engine = self._ready_engine()
        tokenizer = engine.tokenizer

        def prepare(raw: bytes) -> tuple[CompletionBody, list[Request], Reply]:
            body = parse_completion(raw)
            self._check_model(body.model)
            params = body.sampling_params(engine.default_params, body.output_format())
            given = body.prompts()
            prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]
            reply_id = f"cmpl-{uuid.uuid4().hex}"
            owner = http.scope["owner"]
            requests = self._requests(engine, body, prompts, params, reply_id, owner, body.format_field)
            # the ids are known to be the model's only now
            echoes = [tokenizer.decode(prompt) for prompt in prompts] if body.echo else []
            return body, requests, CompletionReply(reply_id, self._options.model_name, body, tokenizer, echoes)

        return await self._answer(http, *await self._prepare(http, prepare))

    def _requests(
        self,
        engine: Engine,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        reply_id: str,
        owner: str,
        format_field: str,
    ) -> list[Request]:
        """All choices of all prompts, those of one prompt side by side."""
        numbered = [(prompt, params.choice(choice)) for prompt in prompts for choice in range(body.choices)]
        if len(numbered) > self._worker.capacity:  # waiting would not help
            raise RequestError(
                f"{len(numbered)} choices are asked for, and this server takes {self._worker.capacity} requests at a "
                "time; ask for fewer, or start it with a larger --max-waiting.",
                param="n" if body.choices > 1 else "prompt",
            )
        try:
            return [
                engine.make_request(prompt, own, request_id=f"{reply_id}-{index}", owner=owner)
                for index, (prompt, own) in enumerate(numbered)
            ]
        except RequestError as error:
            if error.param != FORMAT_PARAM:
                raise
            # the engine knows one name for what several fields ask for
            raise RequestError(str(error), param=format_field, code=error.code, status=error.status) from None

    def _chat_style(self, tokenizer: Tokenizer) -> ChatStyle:
        if self._style is None:
            options = self._options
            self._style = ChatStyle.of(
                tokenizer, tool_parser=options.tool_parser, reasoning_parser=options.reasoning_parser
            )
        return self._style

    async def tokenize(self, http: HttpRequest) -> Response:
        engine = self._ready_engine()
        tokenizer = engine.tokenizer

        def prepare(raw: bytes) -> list[int]:
            body = parse_body(raw, TokenizeBody)
            self._check_model(body.model)
            if body.prompt is not None:
                return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
            use = body.tool_use()
            self._chat_style(tokenizer).check(use)
            return body.chat_prompt(tokenizer, body.messages or [], use)

        tokens = await self._prepare(http, prepare)
        return json_response({"count": len(tokens), "max_model_len": engine.max_context, "tokens": tokens})

    async def detokenize(self, http: HttpRequest) -> Response:
        tokenizer = self._ready_engine().tokenizer

        def prepare(raw: bytes) -> str:
            body = parse_body(raw, DetokenizeBody)
            self._check_model(body.model)
            check_tokens(body.tokens, tokenizer.vocab_size)
            return tokenizer.spell(body.tokens)

        return json_response({"prompt": await self._prepare(http, prepare)})

    async def openapi(self, http: HttpRequest) -> Response:
        return json_response(openapi_document())

    async def _prepare(self, http: HttpRequest, prepare: Callable[[bytes], T]) -> T:
        """Read the body and make requests of it, in another thread if that takes long enough to hold up the streams.

        One long body after the other: tokens of a megabyte take a hundred, and cores that the engine wants.
        """
        raw = await read_json_body(http, self._options.max_body)
        hides = b"\\u" in raw  # an escape may hide the name of a field
        if len(raw) <= _LONG_BODY and not hides and not any(field in raw for field in _GRAMMAR_FIELDS):
            return prepare(raw)

        def prepare_and_tidy() -> T:
            try:
                return prepare(raw)
            finally:
                if len(raw) > _HUGE_BODY:
                    give_back_memory()

        return await anyio.to_thread.run_sync(prepare_and_tidy, limiter=self._long_bodies)

    async def _answer(self, http: HttpRequest, body: GenerationBody, requests: list[Request], reply: Reply) -> Response:
        generation = Generation(self._worker, requests, self._on_event)
        generation.start()
        self.active.add(generation)
        if body.stream:
            # Everything that can be wrong with the request has been found by now: the status line may say 200.
            stream = EventStream(
                generation,
                reply,
                include_usage=body.include_usage,
                keep_alive=self._options.keep_alive,
                write_timeout=self._options.write_timeout,
                on_close=lambda: self.active.discard(generation),
            )
            return cast(Response, stream)  # an ASGI application, which is all that is asked of a Response
        try:
            done = await collect(generation, http.receive)
        except ClientGone:
            return Response(status_code=499)  # nobody reads it; nginx's code for the log
        finally:
            self.active.discard(generation)
        return json_response(reply.whole(done))

    def _on_event(self, event: TokenEvent) -> None:
        self._latencies.on_event(event, time.monotonic())


async def read_json_body(http: HttpRequest, limit: int) -> bytes:
    """The body of a request that says it is JSON, or says nothing.

    Raises:
        RequestError: another Content-Type (415), or more than ``limit`` bytes (413), before they are all in memory.
    """
    kind = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestError(
            f"The body must be JSON, not {kind[:100]!r}: send the header `Content-Type: application/json`.",
            code="unsupported_media_type",
            status=415,
        )
    too_large = RequestError(f"The body is larger than {limit} bytes.", code="body_too_large", status=413)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            if int(http.headers.get("content-length", 0)) > limit and "expect" in http.headers:
                raise too_large  # the client waits for leave to send, and needs not send anything
            total = 0
            async for chunk in http.stream():
                total += len(chunk)
                if total <= limit:
                    body += chunk
                else:
                    body.clear()
                    if total > limit + _DRAIN_BYTES:
                        break
    except TimeoutError:
        raise RequestError(
            f"The body did not arrive within {BODY_TIMEOUT:g} seconds.", code="timeout", status=408
        ) from None
    if total > limit:
        raise too_large
    return bytes(body)

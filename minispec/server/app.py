"""The routes, as an ASGI application around an EngineWorker."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from minispec.errors import RequestError
from minispec.request import Request, SamplingParams, TokenEvent
from minispec.server import metrics
from minispec.server.errors import (
    error_response,
    json_response,
    on_client_gone,
    on_exception,
    on_http_error,
    on_request_error,
)
from minispec.server.middleware import ApiKeys, Cors, RequestIds
from minispec.server.replies import ChatReply, CompletionReply, Reply
from minispec.server.schema import ChatBody, CompletionBody, GenerationBody, parse_chat, parse_completion
from minispec.server.stream import ClientGone, EventStream, Generation, collect
from minispec.worker import EngineWorker, WorkerState

if TYPE_CHECKING:
    from minispec.engine import Engine

# A body of this many bytes takes longer to parse and tokenize than to hand to another thread and back.
_LONG_BODY = 8192

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
        keep_alive: seconds without a token after which a stream gets a comment.
        write_timeout: seconds a client may leave a full socket unread.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    open_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    max_body: int = 8 << 20
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
        self._created = int(time.time())

    def app(self) -> ASGIApp:
        """The application with everything around it."""
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completion, methods=["POST"]),
        ]
        inner = Starlette(
            routes=routes,
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
        return RequestIds(app)

    def fail_active(self, error: RequestError) -> None:
        """End everything that still runs, with ``error`` as the answer."""
        for generation in list(self.active):
            generation.fail(error)

    # ------------------------------------------------------------------------------------------------------- reading

    async def health(self, http: HttpRequest) -> Response:
        error = self._unready()
        if error is None:
            return json_response({"status": "ok"})
        return error_response(error, status=error.code)

    async def metrics(self, http: HttpRequest) -> Response:
        return Response(metrics.render(self._worker, self._latencies), headers={"Content-Type": metrics.CONTENT_TYPE})

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

    def _check_model(self, name: str) -> None:
        if name != self._options.model_name:
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

        def prepare(raw: bytes) -> tuple[ChatBody, list[Request]]:
            body = parse_chat(raw)
            params = self._check_common(engine, body)
            prompt = engine.tokenizer.apply_chat_template(
                body.template_messages(),
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
                **body.template_variables(),
            )
            request_id = f"chatcmpl-{uuid.uuid4().hex}"
            return body, [engine.make_request(prompt, params, request_id=request_id, owner=http.scope["owner"])]

        body, requests = await self._prepare(http, prepare)
        return await self._answer(http, body, requests, ChatReply(requests[0].id, self._options.model_name, body))

    async def completion(self, http: HttpRequest) -> Response:
        engine = self._ready_engine()

        def prepare(raw: bytes) -> tuple[CompletionBody, list[Request]]:
            body = parse_completion(raw)
            params = self._check_common(engine, body)
            requests = []
            for prompt in body.prompts():
                ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                request_id = f"cmpl-{uuid.uuid4().hex}"
                requests.append(engine.make_request(ids, params, request_id=request_id, owner=http.scope["owner"]))
            return body, requests

        body, requests = await self._prepare(http, prepare)
        return await self._answer(http, body, requests, CompletionReply(requests[0].id, self._options.model_name, body))

    def _check_common(self, engine: Engine, body: GenerationBody) -> SamplingParams:
        if body.model is not None:
            self._check_model(body.model)
        return body.sampling_params(engine.default_params)

    async def _prepare(self, http: HttpRequest, prepare: Callable[[bytes], T]) -> T:
        """Read the body and make requests of it, in another thread if that takes long enough to hold up the streams."""
        raw = await read_json_body(http, self._options.max_body)
        return await anyio.to_thread.run_sync(prepare, raw) if len(raw) > _LONG_BODY else prepare(raw)

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

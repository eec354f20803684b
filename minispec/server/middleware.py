"""What wraps every route: request ids, CORS, API keys.

Outermost first. CORS stands outside the keys, because a browser sends preflights without one and hides answers that
lack the CORS headers; keys stand outside the router, so that a route is guarded before anybody remembers to guard it.
"""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minispec.errors import RequestError
from minispec.logs import http_request_id
from minispec.server.errors import error_response

MAX_REQUEST_ID = 128  # characters


class RequestIds:
    """Gives every response an ``X-Request-Id``: the client's if it is sane, else a fresh one.

    It is an echo and nothing else. Two live requests may carry the same one, so it never becomes a key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        is_sane = 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable()
        request_id = given if is_sane else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        http_request_id.set(request_id)  # for the log; every request is handled in a task of its own
        await self._app(scope, receive, send_with_id)


class Cors(CORSMiddleware):
    """Starlette's CORS, whose refusals have the shape of all other errors."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        message = bytes(response.body).decode() + "; `--cors-origin` names the origins that are let in."
        keep = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return error_response(RequestError(message, code="cors_refused"), keep)


class ApiKeys:
    """Lets through what carries one of the keys; everything else gets a 401, whether there is such a route or not.

    Handlers find in ``scope["owner"]`` whose request it is: a hash of its key, or "" on an open path or server.

    Args:
        keys: no keys, no guard.
        open_paths: paths that can be read (GET, HEAD) without a key, compared exactly.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self._owner(scope) if scope["type"] == "http" and self._digests else ""
        if owner is None and not self._is_open(scope):
            error = RequestError(
                "A valid API key is needed: send the header `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                status=401,
            )
            await error_response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app({**scope, "owner": owner or ""}, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["path"] in self._open_paths and scope["method"] in ("GET", "HEAD")

    def _owner(self, scope: Scope) -> str | None:
        """Whose key the request carries; None if it carries none of them."""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.strip().partition(b" ")
        given = _digest(key.strip())
        # All keys are always compared, each in constant time: time tells neither which one nor how much of it fits.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given.hex() if scheme.lower() == b"bearer" and any(matches) else None


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that comparing tells nothing about the length either."""
    return hashlib.sha256(key).digest()

"""One shape for every failure the API answers with.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

Handlers raise `RequestError`; everything else becomes a 500 whose body says nothing about the inside.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minispec.errors import RequestError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed"}
_RETRY_AFTER = {429: "1", 503: "5"}  # seconds: a queue moves on in about one, loading takes longer


def dump_json(content: Any) -> bytes:
    """Strict JSON in UTF-8. A lone surrogate, which only an echoed input could hold, becomes "?"."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump_json(content), status, headers, media_type="application/json")


def error_body(error: RequestError) -> dict[str, Any]:
    """The body for ``error``, as an object ready for JSON."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError, headers: Mapping[str, str] | None = None, **fields: Any) -> Response:
    """The answer for ``error``; ``fields`` stand beside the ``error`` object."""
    retry = {"Retry-After": _RETRY_AFTER[error.status]} if error.status in _RETRY_AFTER else {}
    return json_response({**fields, **error_body(error)}, error.status, {**retry, **(headers or {})})


def internal_error() -> RequestError:
    return RequestError("The server failed on this request; its log says why.", code="internal_error", status=500)


async def on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """What the router raises: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        paths = [route.path for route in request.app.routes if isinstance(route, Route)]
        close = difflib.get_close_matches(request.url.path[:200], paths, n=1, cutoff=0.85)
        hint = f"did you mean {close[0]}?" if close else "docs/api.md lists what there is."
        message = f"There is no {request.method} {request.url.path[:200]} here; {hint}"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.method} is not allowed on {request.url.path[:200]}; use {allowed}."
    code = _CODES.get(error.status_code)
    return error_response(RequestError(message, code=code, status=error.status_code), error.headers)


async def on_client_gone(request: Request, error: Exception) -> Response:
    """The client left in the middle of its body. Nobody reads this; 499 is nginx's code for it."""
    return Response(status_code=499)


async def on_exception(request: Request, error: Exception) -> Response:
    """A bug. Starlette raises it again after this answer, so that the traceback reaches the log and only the log."""
    return error_response(internal_error())

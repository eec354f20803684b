"""One log line per HTTP call, and a count of the answers by status."""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

_QUIET = frozenset({"/health", "/metrics"})  # asked every few seconds by machines
_MAX_PATH = 200  # characters


class AccessLog:
    """Outermost of the application. A stream is logged when it ends; status 499 is a client that left before an answer.

    Attributes:
        statuses: status → answers.
    """

    def __init__(self, app: ASGIApp, statuses: dict[int, int]) -> None:
        self._app = app
        self.statuses = statuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        status, request_id = 499, None

        async def note(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = Headers(raw=message["headers"]).get("x-request-id")
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            self.statuses[status] = self.statuses.get(status, 0) + 1
            logger.log(
                logging.DEBUG if scope["path"] in _QUIET else logging.INFO,
                "answered",
                extra={
                    "http_request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"][:_MAX_PATH],
                    "status": status,
                    "seconds": round(time.monotonic() - begin, 4),
                },
            )

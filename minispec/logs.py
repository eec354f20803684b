"""Log lines, as text for people or as JSON for machines.

Lines about a request carry its ids as fields: ``request_id`` is the one in its answer, ``http_request_id`` the
``X-Request-Id`` of the HTTP call.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

http_request_id: ContextVar[str | None] = ContextVar("http_request_id", default=None)
"""The HTTP call that this code runs for; log lines written meanwhile carry it."""

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a line carries besides its message: the ``extra`` of the call, and the HTTP call it was written in."""
    fields = {key: value for key, value in vars(record).items() if key not in _OWN and value is not None}
    if "http_request_id" not in fields and (current := http_request_id.get()) is not None:
        fields["http_request_id"] = current
    return fields


class TextFormatter(logging.Formatter):
    """``time LEVEL logger: message key=value …``"""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        line = " ".join([head, *(f"{key}={_shown(value)}" for key, value in fields_of(record).items())])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``logger``, ``message``, the fields, and ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to whatever standard error is at the moment of the line."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def configure(kind: str, level: str) -> None:
    """Send the log to standard error, instead of where it went: minispec's own lines from ``level`` on, others' from
    WARNING on.

    Args:
        kind: one of FORMATS.
        level: one of LEVELS.
    """
    handler, root = _StandardError(), logging.getLogger()
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    for earlier in [one for one in root.handlers if type(one) in (logging.StreamHandler, _StandardError)]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    logging.getLogger("minispec").setLevel(level.upper())


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shown(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not set(' "=') & set(text) else json.dumps(text)

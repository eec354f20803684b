"""Log lines for people and for machines."""

import json
import logging
import sys

import pytest

from minispec import logs


@pytest.fixture
def log(capsys):
    """Logs one line in a given form and returns what standard error got."""
    root, ours = logging.getLogger(), logging.getLogger("minispec")
    handlers, level = list(root.handlers), ours.level

    def log(kind, *args, level="info", **more):
        logs.configure(kind, level)
        logging.getLogger("minispec.test").info(*args, **more)
        return capsys.readouterr().err

    yield log
    root.handlers[:] = handlers
    ours.setLevel(level)


def test_json(log):
    try:
        raise ValueError("boom\nsecond line")
    except ValueError:
        line = log(
            "json", "request %s", "ended", exc_info=True, extra={"request_id": 'a"b', "seconds": 0.25, "no": None}
        )
    assert line.count("\n") == 1
    entry = json.loads(line)
    assert entry["exception"].endswith("ValueError: boom\nsecond line")
    entry = {key: entry[key] for key in entry.keys() - {"time", "exception"}}
    assert entry == {
        "level": "info",
        "logger": "minispec.test",
        "message": "request ended",
        "request_id": 'a"b',
        "seconds": 0.25,
    }


def test_text(log):
    fields = {"path": "/a b\n2026 forged", "empty": "", "plain": "x-1", "seconds": 1.23456}
    line = log("text", "answered", extra=fields)
    time, _, rest = line.partition(" ")
    assert time.endswith("Z") and len(time) == len("2026-01-01T00:00:00.000Z")
    assert rest == 'INFO minispec.test: answered path="/a b\\n2026 forged" empty="" plain=x-1 seconds=1.235\n'


def test_lines_carry_the_http_call_they_belong_to(log):
    token = logs.http_request_id.set("call-1")
    try:
        assert json.loads(log("json", "x"))["http_request_id"] == "call-1"
        assert json.loads(log("json", "x", extra={"http_request_id": "its own"}))["http_request_id"] == "its own"
    finally:
        logs.http_request_id.reset(token)
    assert "http_request_id" not in json.loads(log("json", "x"))


def test_level_and_repetition(log):
    assert log("text", "x", level="warning") == ""
    assert log("text", "x").count("\n") == 1  # configured twice, written once
    assert sys.stderr is not None

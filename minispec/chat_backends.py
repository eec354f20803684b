"""What `minispec chat` talks to: an engine in this process, or an OpenAI-compatible server.

Ctrl-C reaches a backend as a KeyboardInterrupt, or as the close of its generator; both cancel the request.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from urllib.parse import urlsplit

import httpx

from minispec.errors import ConfigError, MinispecError, RequestError
from minispec.request import FinishReason, SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from minispec.engine import Engine

CONTEXT_EXCEEDED = "context_length_exceeded"
"""Code of the RequestError for a conversation that has outgrown the context, whichever backend says so."""


class ChatError(MinispecError):
    """The backend failed: no server there, a refusal, a lost connection, an engine error."""


@dataclass(frozen=True)
class Usage:
    """Token counts of one answer; `speculation` is None where the server does not tell."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    speculation: SpeculationStats | None = None

    @classmethod
    def parse(cls, usage: dict[str, Any]) -> Usage:
        """From the `usage` object of the HTTP API; anything may be missing from a foreign server's."""
        stats = None
        if spec := usage.get("speculation"):
            steps, drafted, accepted = (int(spec.get(key) or 0) for key in ("steps", "drafted", "accepted"))
            emitted = round(steps * float(spec.get("acceptance_length") or 0))  # the API gives the mean only
            stats = SpeculationStats(steps, drafted, accepted, emitted)
        return cls(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0), stats)


@dataclass(frozen=True)
class ChatDelta:
    """A piece of an answer.

    Attributes:
        text: may be empty: a token can end in the middle of a character.
        tokens: how many tokens the piece stands for; 0 where the backend cannot tell.
        usage: counts of the answer so far; the last one holds.
        finish_reason: set at the end.
    """

    text: str = ""
    tokens: int = 0
    usage: Usage | None = None
    finish_reason: str | None = None


class ChatBackend(Protocol):
    """Whatever answers. Every failure meant for the user is a MinispecError."""

    @property
    def name(self) -> str:
        """What the conversation is with; fails where there is nothing to talk to."""

    def stream(self, messages: list[dict[str, str]], params: dict[str, Any]) -> Generator[ChatDelta, None, None]:
        """Answer `messages`. Closing the generator cancels the request.

        Args:
            params: fields of SamplingParams; those left out take the model's or server's default.
        """


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block: an engine stopped halfway through a step has lost its invariants."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is ever interrupted
        yield
        return
    pressed = False

    def note(signum: int, frame: object) -> None:
        nonlocal pressed
        pressed = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt


class LocalBackend:
    """Drives an engine in this thread. Nothing else may step it meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def name(self) -> str:
        return self._engine.name

    def stream(self, messages: list[dict[str, str]], params: dict[str, Any]) -> Generator[ChatDelta, None, None]:
        engine = self._engine
        prompt = engine.tokenizer.apply_chat_template(messages)
        request = engine.make_request(prompt, SamplingParams(**{**engine.default_params, **params}))
        try:
            with _interrupts_held():
                engine.add(request)
            while not request.finished:
                with _interrupts_held():
                    events = engine.step()
                for event in events:
                    if event.request is request:
                        usage = Usage(len(request.prompt), request.num_output, request.speculation)
                        yield ChatDelta(event.text, len(event.tokens), usage, event.finish_reason)
        finally:
            if not request.finished:
                with _interrupts_held():
                    engine.abort(request)
        if request.finish_reason is FinishReason.ERROR:
            raise ChatError(request.error or "the engine could not go on with this answer")


class HttpBackend:
    """Talks to an OpenAI-compatible server.

    Args:
        url: of the server, with or without `/v1`; `http://` may be left out.
        api_key: sent as a bearer token.
        model: its name at the server; None takes the first one listed there.
    """

    def __init__(self, url: str, api_key: str | None = None, *, model: str | None = None) -> None:
        url = url.strip() if "://" in url else f"http://{url.strip()}"
        self._base = re.sub(r"(/v1)?(/chat/completions)?/*$", "", url)
        try:
            parts = urlsplit(self._base)
            httpx.URL(self._base)
        except (ValueError, httpx.InvalidURL) as exc:
            raise ConfigError(f"--url {url!r} is not a URL: {exc}") from exc
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must look like http://localhost:8000, not {url!r}")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("--api-key must be plain ASCII; check what was pasted")
        self._model = model
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(10.0, read=None),  # the first token of a long prompt takes what it takes
            trust_env=parts.hostname not in ("localhost", "127.0.0.1", "::1"),  # a proxy is no way to this machine
        )

    def close(self) -> None:
        self._client.close()

    @property
    def name(self) -> str:
        return f"{self._model_name()} at {self._base}"

    def _model_name(self) -> str:
        if self._model is None:
            try:
                response = self._client.get(f"{self._base}/v1/models", timeout=10.0)
            except httpx.HTTPError as exc:
                self._fail(exc)
            if not response.is_success and response.status_code != 404:  # a wrong key, or a model still being loaded
                self._refuse(response.status_code, response.content)
            try:
                self._model = str(response.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                self._model = "default"  # a server that lists none takes any name
        return self._model

    def stream(self, messages: list[dict[str, str]], params: dict[str, Any]) -> Generator[ChatDelta, None, None]:
        body = {"model": self._model_name(), "messages": messages, **params}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        finished = False
        try:
            # Leaving the block, by whatever exception, closes the connection; the server takes that for a cancel.
            with self._client.stream("POST", f"{self._base}/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    self._refuse(response.status_code, response.read())
                for data in sse_data(response.iter_bytes()):
                    if data == "[DONE]":
                        return
                    delta = self._parse(data)
                    finished |= delta.finish_reason is not None
                    yield delta
        except httpx.HTTPError as exc:
            self._fail(exc)
        if not finished:
            raise ChatError(f"{self._base} ended the answer before it was finished")

    def _parse(self, data: str) -> ChatDelta:
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                self._refuse(500, data.encode(errors="replace"))
            usage = Usage.parse(chunk["usage"]) if chunk.get("usage") else None
            choice = (chunk.get("choices") or [{}])[0]
            text = (choice.get("delta") or {}).get("content") or ""
            return ChatDelta(text, usage=usage, finish_reason=choice.get("finish_reason"))
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise ChatError(f"{self._base} sent something that is no chat completion: {data[:200]}") from exc

    def _fail(self, exc: httpx.HTTPError) -> NoReturn:
        if isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout):
            remedy = "start one with `minispec serve --target …`, or check --url"
            reason = re.sub(r"^\[Errno -?\d+\] ", "", str(exc))
            raise ChatError(f"no server answers at {self._base} ({reason}); {remedy}") from exc
        raise ChatError(f"lost the connection to {self._base}: {exc or type(exc).__name__}") from exc

    def _refuse(self, status: int, body: bytes) -> NoReturn:
        """Raise what an error response says."""
        message, param, code = _error_body(body)
        said = f": {message}" if message else ""
        if status in (401, 403):
            raise ChatError(f"{self._base} refuses the API key or wants one (--api-key){said}")
        # Other servers than minispec's have this code in words only.
        if code == CONTEXT_EXCEEDED or re.search(r"context (length|size|window)", message):
            raise RequestError(message, param=param, code=CONTEXT_EXCEEDED, status=status)
        if status == 404 and not message:
            raise ChatError(f"{self._base}/v1/chat/completions does not exist; is --url an OpenAI-compatible server?")
        if 400 <= status < 500 and message:
            raise RequestError(message, param=param, code=code, status=status)
        raise ChatError(f"{self._base} failed (status {status}){said}")


def _error_body(body: bytes) -> tuple[str, str | None, str | None]:
    """(message, param, code) of an error body in any of the shapes servers use; the message is empty for a web page."""
    try:
        error = json.loads(body)
    except ValueError:
        return "", None, None
    if isinstance(error, dict):
        error = error.get("error") or error.get("detail") or error
    if not isinstance(error, dict):
        return str(error)[:1000], None, None
    code = error.get("code")
    return str(error.get("message") or error)[:1000], error.get("param"), code if isinstance(code, str) else None


def sse_data(chunks: Iterable[bytes]) -> Iterator[str]:
    r"""The data of each server-sent event. Lines end at \n or \r\n only: JSON may hold U+2028 and its like."""
    data: list[str] = []
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for raw in lines:
            line = raw.removesuffix(b"\r").decode(errors="replace")
            if not line and data:
                yield "\n".join(data)
                data.clear()
            elif line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))

"""A streaming client of any OpenAI-compatible server, in a process of its own.

The process that is measured must not also pay for the client: ``Client`` starts ``python -m minispec.bench.client``,
hands it jobs as JSON lines and gets answers as JSON lines. The same client asks every server, so that what it costs is
the same for all.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from minispec.errors import ConfigError

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(frozen=True)
class Endpoint:
    """A server to ask.

    Attributes:
        url: where its API begins, with or without ``/v1``.
        model: what it calls the model; None is the first it lists.
        api_key: None sends none.
        extra: fields added to every request.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    extra: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """What one streamed request brought.

    Attributes:
        tokens: completion tokens by the server's own count, or the pieces it sent where it gives none.
        counted: the count is the server's.
        seconds, ttft: from sending the request to its end, and to its first piece of text.
        text: the answer.
    """

    tokens: int
    counted: bool
    seconds: float
    ttft: float
    text: str


class Client:
    """The client process. Use it as a context manager.

    Args:
        endpoint: whom it asks.

    Raises:
        ConfigError: on entering, if the server does not answer or lists no model.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def __enter__(self) -> Client:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "minispec.bench.client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.model: str = self._ask(asdict(self._endpoint))
        except ConfigError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def run(self, prompts: Sequence[str], max_tokens: int, temperature: float, seeds: Sequence[int]) -> list[Answer]:
        """Ask for all ``prompts`` at once, each as a user's message; returns the answers in their order.

        Raises:
            ConfigError: the server refused one, or the connection broke.
        """
        bodies = [
            {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": seed,
            }
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return [Answer(**answer) for answer in self._ask(bodies)]

    def _ask(self, job: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError("the benchmark's client process died; see what it printed above")
        reply = json.loads(line)
        if "error" in reply:
            raise ConfigError(f"{self._endpoint.url}: {reply['error']}")
        return reply["done"]


def base_url(url: str) -> str:
    """``url`` up to and including ``/v1``."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


async def _serve() -> None:
    """Answer jobs from standard input until it ends: first an endpoint, then lists of request bodies."""
    endpoint = Endpoint(**json.loads(sys.stdin.readline()))
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=base_url(endpoint.url), headers=headers, timeout=_TIMEOUT, limits=limits, trust_env=False
    ) as http:
        model = endpoint.model
        try:
            if model is None:
                listed = await http.get("/models")
                listed.raise_for_status()
                model = listed.json()["data"][0]["id"]
            _reply({"done": model})
        except (httpx.HTTPError, LookupError, ValueError, TypeError) as error:
            _reply({"error": f"cannot list its models ({type(error).__name__}: {error}); is it running?"})
            return
        extra = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **(endpoint.extra or {})}
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                answers = await asyncio.gather(*(_stream(http, body | extra) for body in json.loads(line)))
                _reply({"done": [asdict(answer) for answer in answers]})
            except (httpx.HTTPError, LookupError, ValueError, TypeError) as error:
                _reply({"error": f"{type(error).__name__}: {error}"})


async def _stream(http: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    begin = time.perf_counter()
    first: float | None = None
    pieces: list[str] = []
    counted = None
    async with http.stream("POST", "/chat/completions", json=body) as response:
        if response.is_error:
            text = (await response.aread()).decode(errors="replace")
            raise ValueError(f"status {response.status_code}: {text[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(str(event["error"]))
            for choice in event["choices"]:
                if content := choice.get("delta", {}).get("content"):
                    first = first or time.perf_counter()
                    pieces.append(content)
            if event.get("usage"):
                counted = event["usage"]["completion_tokens"]
    end = time.perf_counter()
    return Answer(
        tokens=len(pieces) if counted is None else counted,
        counted=counted is not None,
        seconds=end - begin,
        ttft=(first or end) - begin,
        text="".join(pieces),
    )


def _reply(reply: dict[str, Any]) -> None:
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())

"""``python -m minispec.bench.soak``: many clients of every kind against a running server, to see that it stays right.

First each case of a catalogue is asked alone, without speculation: that is what it must always answer. Then clients ask
cases at random for some minutes, leave a fifth of them half way, and mix in requests that must be refused. At the end
the server has to be as empty as it was. The last line printed is one JSON object; the exit status is 0 if all held.

Texts can be compared exactly only where near-ties do not depend on the batch, so start the server in float32, with a
cache small enough that requests are preempted (docs/reliability.md has the command).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families

_TEXT = """
river stone lamp seven window garden paper cloud winter music bridge coffee number letter orange silver morning table
train market shadow forest engine bottle dragon pencil island copper honey thunder
"""
_WORDS = tuple(_TEXT.split())
_LEAVES = 0.2  # share of the requests that their client leaves
_BAD = 0.1  # share that must be refused
_MAX_GROWTH = 0.03  # of the resident memory, from the second third to the last
_SAMPLE_SECONDS = 1.0
_SHOWN = 5  # mismatches that are printed

BAD_REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "x", "temperature": -1}),
    ("/v1/completions", {"prompt": "x", "top_p": 1.5, "stream": True}),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    ("/v1/completions", {"prompt": "x", "max_tokens": "8"}),
    ("/v1/completions", {"prompt": "x", "stop": ""}),
    ("/v1/completions", {"prompt": "x", "seed": 1.5}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": [-1]}),
    ("/v1/completions", {"prompt": [2**40]}),
    ("/v1/completions", {"prompt": "x", "n": 10**6}),
    ("/v1/completions", {"prompt": "word " * 200_000}),
    ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "x", "speculation": {"max_nodes": 0}}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "no-such-model"}),
    ("/v1/nowhere", {}),
)


@dataclass(frozen=True)
class Case:
    """A request whose answer is determined: greedy, or sampled with a seed."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What a request brought. ``finish_reason`` and ``tokens`` are None where it was left before its end."""

    text: str
    finish_reason: str | None
    tokens: int | None


@dataclass
class Tally:
    """What happened.

    Attributes:
        counts: answered, left, refused (of bad requests), busy (429 where a place was wanted), wrong, unexpected_5xx,
            unexpected_4xx, accepted_bad, connection_errors.
        tokens: completion tokens of the answers that came whole.
        resident: (seconds since the start, bytes) of the server.
        messages: the first few things that went wrong.
    """

    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    resident: list[tuple[float, float]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def note(self, kind: str, message: str) -> None:
        self.counts[kind] += 1
        if len(self.messages) < _SHOWN:
            self.messages.append(f"{kind}: {message}")

    @property
    def growth(self) -> float:
        """Resident memory in the last third over that in the second, less one."""
        if len(self.resident) < 6:
            return 0.0
        end = self.resident[-1][0]
        second = [size for at, size in self.resident if end / 3 <= at < 2 * end / 3]
        last = [size for at, size in self.resident if at >= 2 * end / 3]
        return statistics.median(last) / statistics.median(second) - 1


def catalogue(count: int, seed: int) -> list[Case]:
    """Cases of mixed length: short and long prompts, some with a long beginning in common, chat and plain text."""
    rng = random.Random(seed)
    shared = " ".join(rng.choices(_WORDS, k=150))
    cases = []
    for i in range(count):
        words = " ".join(rng.choices(_WORDS, k=rng.choice([3, 10, 30, 120])))
        text = f"{shared}. {words}" if i % 3 == 0 else words
        body: dict[str, Any] = {"max_tokens": rng.choice([1, 8, 24, 48, 96])}
        if rng.random() < 0.5:
            body |= {"temperature": 0}
        else:
            body |= {"temperature": 0.8, "top_p": 0.95, "seed": i}
        if rng.random() < 0.25:
            body |= {"stop": [" the ", "\n\n"]}
        if rng.random() < 0.3:
            body |= {"ignore_eos": True}
        if i % 2:
            cases.append(Case("/v1/completions", {"prompt": text, **body}))
        else:
            cases.append(Case("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body}))
    return cases


class Soak:
    """One run against one server.

    Args:
        url: of the server, with or without ``/v1``.
        seed: of what is asked when.
        patience: seconds that the server gets to become idle at the end.
    """

    def __init__(
        self, url: str, cases: Sequence[Case], *, api_key: str | None = None, seed: int = 0, patience: float = 10.0
    ) -> None:
        self._cases = cases
        self._patience = patience
        self._expected: list[Answer] = []
        self._rng = random.Random(seed)
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(600.0, connect=30.0),
            # a connection each: a server may close an idle one at any moment, and that is no fault of its
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )
        self.tally = Tally()

    async def run(self, minutes: float, clients: int) -> dict[str, Any]:
        """Ask each case alone, soak, and look at what is left."""
        async with self._client:
            for case in self._cases:
                self._expected.append(await self._ask({**case.body, "speculation": {"enabled": False}}, case.path))
            before = await self._metrics()
            start = time.monotonic()
            end = start + 60 * minutes
            watcher = asyncio.create_task(self._watch(start))
            await asyncio.gather(*(self._visit(end) for _ in range(clients)))
            seconds = time.monotonic() - start
            watcher.cancel()
            left, after = await self._idle()
        counts = self.tally.counts
        return {
            "wrong": counts["wrong"],
            "leaked_pages": int(left),
            "unexpected_5xx": counts["unexpected_5xx"],
            "unexpected_4xx": counts["unexpected_4xx"] + counts["accepted_bad"],
            "connection_errors": counts["connection_errors"],
            "stuck_requests": int(after["minispec_requests_running"] + after["minispec_requests_waiting"]),
            "resident_growth": round(self.tally.growth, 4),
            "resident_mib": round(after["process_resident_memory_bytes"] / 2**20, 1),
            "requests": sum(counts[kind] for kind in ("answered", "left", "refused", "wrong")),
            "answered": counts["answered"],
            "left": counts["left"],
            "refused": counts["refused"],
            "busy": counts["busy"],
            "tokens": self.tally.tokens,
            "seconds": round(seconds, 1),
            **{
                name: int(after[f"minispec_{name}_total"] - before[f"minispec_{name}_total"])
                for name in ("preemptions", "speculation_accepted_tokens", "prefix_cache_hits", "engine_stalls")
            },
        }

    async def _visit(self, end: float) -> None:
        """One client, until the time is over."""
        while time.monotonic() < end:
            try:
                if self._rng.random() < _BAD:
                    await self._ask_badly()
                else:
                    await self._ask_well()
            except _Busy as busy:
                self.tally.counts["busy"] += 1
                await asyncio.sleep(busy.seconds)
            except _Refused as refused:
                kind = "unexpected_5xx" if refused.status >= 500 else "unexpected_4xx"
                self.tally.note(kind, f"{refused.status} {refused.body[:300]}")
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                self.tally.note("connection_errors", f"{type(error).__name__}: {error}")

    async def _ask_well(self) -> None:
        index = self._rng.randrange(len(self._cases))
        case, expected = self._cases[index], self._expected[index]
        leaves = self._rng.random() < _LEAVES
        stream = self._rng.random() < 0.7
        body = {**case.body, "stream": stream}
        if stream and not leaves:
            body["stream_options"] = {"include_usage": True}
        if leaves and not stream:
            try:
                async with asyncio.timeout(self._rng.uniform(0.0, 3.0)):
                    answer = await self._ask(body, case.path)
            except TimeoutError:
                self.tally.counts["left"] += 1
                return
        else:
            answer = await self._ask(body, case.path, leave_after=self._rng.randrange(12) if leaves else None)
        if answer.finish_reason is None:
            right = expected.text.startswith(answer.text)
            self.tally.counts["left"] += right
        else:
            right = (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason) and (
                answer.tokens in (None, expected.tokens)
            )
            self.tally.counts["answered"] += right
            self.tally.tokens += answer.tokens or 0
        if not right:
            self.tally.note("wrong", f"case {index}: {answer} instead of {expected}")

    async def _ask_badly(self) -> None:
        path, body = self._rng.choice(BAD_REQUESTS)
        response = await self._client.post(path, json=body)
        if not 400 <= response.status_code < 500:
            kind = "unexpected_5xx" if response.status_code >= 500 else "accepted_bad"
            self.tally.note(kind, f"{response.status_code} to {path} {json.dumps(body)[:200]}")
        elif "message" not in response.json()["error"]:
            self.tally.note("unexpected_4xx", f"an error without a message: {response.text[:200]}")
        else:
            self.tally.counts["refused"] += 1

    async def _ask(self, body: dict[str, Any], path: str, leave_after: int | None = None) -> Answer:
        """Send a request and read its answer, or leave after some pieces of the stream.

        Raises:
            _Refused, _Busy: it was not answered, or a stream ended with an error.
        """
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()
                if response.status_code == 429:
                    raise _Busy(float(response.headers["retry-after"]))
                raise _Refused(response.status_code, text)
            if not body.get("stream"):
                whole = json.loads(await response.aread())
                choice = whole["choices"][0]
                text = choice["text"] if "text" in choice else choice["message"]["content"]
                return Answer(text, choice["finish_reason"], whole["usage"]["completion_tokens"])
            text, reason, tokens, pieces = "", None, None, 0
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return Answer(text, reason, tokens)
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise _Refused(500, line)
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
                for choice in chunk["choices"]:
                    text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
                pieces += 1
                if leave_after is not None and pieces > leave_after and reason is None:
                    return Answer(text, None, None)
            raise httpx.RemoteProtocolError("the stream ended without [DONE]")

    async def _watch(self, start: float) -> None:
        """Note the server's resident memory."""
        while True:
            resident = (await self._metrics())["process_resident_memory_bytes"]
            self.tally.resident.append((time.monotonic() - start, resident))
            await asyncio.sleep(_SAMPLE_SECONDS)

    async def _idle(self) -> tuple[float, dict[str, float]]:
        """Wait a little for the server to become idle: pages that nobody can account for, and the metrics."""
        deadline = time.monotonic() + self._patience
        while True:
            samples = await self._metrics()
            used = samples["minispec_kv_pages_used"]
            busy = used + samples["minispec_requests_running"] + samples["minispec_requests_waiting"]
            if not busy or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        known = samples["minispec_kv_pages_free"] + samples["minispec_kv_pages_cached"]
        return samples["minispec_kv_pages"] - known, samples

    async def _metrics(self) -> dict[str, float]:
        """Samples without labels."""
        response = await self._client.get("/metrics")
        response.raise_for_status()
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
            if not sample.labels
        }


class _Busy(Exception):
    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class _Refused(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body


def failed(report: dict[str, Any]) -> list[str]:
    """The names of what should have been zero, or small, and was not."""
    zero = ("wrong", "leaked_pages", "unexpected_5xx", "unexpected_4xx", "connection_errors", "stuck_requests")
    return [name for name in zero if report[name]] + (
        ["resident_growth"] if report["resident_growth"] > _MAX_GROWTH else []
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", required=True, metavar="URL", help="Server, like http://127.0.0.1:8000.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=10.0, help="Default: 10.")
@click.option("--clients", type=click.IntRange(min=1), default=64, help="Default: 64.")
@click.option("--cases", type=click.IntRange(min=1), default=32, help="Different requests. Default: 32.")
@click.option("--seed", type=int, default=0, help="Of what is asked. Default: 0.")
@click.option("--api-key", envvar="MINISPEC_API_KEY", help="Key that the server wants.")
def main(url: str, minutes: float, clients: int, cases: int, seed: int, api_key: str | None) -> None:
    """Soak a running server."""
    soak = Soak(url, catalogue(cases, seed), api_key=api_key, seed=seed)
    try:
        report = asyncio.run(soak.run(minutes, clients))
    except (httpx.HTTPError, _Refused) as error:
        raise click.ClickException(f"{url} does not answer as a minispec server does: {error}") from None
    for message in soak.tally.messages:
        print(message, file=sys.stderr)
    print(json.dumps(report), flush=True)
    sys.exit(1 if failed(report) else 0)


if __name__ == "__main__":
    main()

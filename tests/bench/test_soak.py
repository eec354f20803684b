"""The soak against the scripted server: it finds nothing where all is well, and finds what is planted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))

from fake_worker import Script, live_server
from minispec.bench.soak import BAD_REQUESTS, Case, Soak, Tally, catalogue, failed, main
from minispec.faults import Faults


@pytest.fixture
def serve(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda script, **settings: stack.enter_context(live_server(script, tmp_path, **settings))


def reply(prompt: str) -> str:
    return "The answer to everything, " * (len(prompt) % 5 + 1)


CASES = [
    Case("/v1/completions", {"prompt": "x" * (3 + i), "max_tokens": 10 + 3 * i, "temperature": 0}) for i in range(6)
] + [Case("/v1/chat/completions", {"messages": [{"role": "user", "content": "y" * 9}], "seed": 1, "temperature": 1.0})]


def soak(server, seconds: float = 2.0) -> tuple[dict, Tally]:
    run = Soak(server.url, CASES, patience=1.0)
    return asyncio.run(run.run(seconds / 60, 12)), run.tally


def test_a_sound_server(serve):
    server = serve(Script(reply=reply, drafts=3, delay=0.001), max_slots=4, pages=24, max_context=90)
    report, tally = soak(server)
    assert failed(report) == [] or failed(report) == ["resident_growth"], tally.messages
    assert report["answered"] > 0 and report["left"] + report["refused"] > 0
    assert report["preemptions"] > 0 and report["speculation_accepted_tokens"] > 0


def test_a_wrong_text_is_found(serve):
    server = serve(Script(reply=reply))
    run = Soak(server.url, CASES)

    async def spoilt() -> dict:
        ask = run._ask

        async def wrong(body, path, leave_after=None):
            answer = await ask(body, path, leave_after)
            return type(answer)("Z" + answer.text, answer.finish_reason, answer.tokens) if "stream" in body else answer

        run._ask = wrong
        return await run.run(1 / 60, 4)

    report = asyncio.run(spoilt())
    assert report["wrong"] > 0 and "wrong" in failed(report) and run.tally.messages[0].startswith("wrong: case ")


def test_faults_and_leaks_are_found(serve, monkeypatch):
    server = serve(Script(reply=reply))
    server.engine.on_stage = faults = Faults()
    watch, release = Soak._watch, server.engine.scheduler.release

    def leaking(slot, **more):
        server.engine.scheduler.release = release
        slot.pages.pop()
        release(slot, sound=False)

    async def planting(self, start):  # once the right answers are known
        faults.plan("detokenise", RuntimeError("boom"), after=3, times=1)
        server.engine.scheduler.release = leaking
        await watch(self, start)

    monkeypatch.setattr(Soak, "_watch", planting)
    report, tally = soak(server)
    assert report["unexpected_5xx"] == 1 and any("engine_error" in message for message in tally.messages)
    assert report["leaked_pages"] >= 1 and {"unexpected_5xx", "leaked_pages"} <= set(failed(report))


def test_memory_that_grows_is_found():
    tally = Tally(resident=[(float(second), 100.0 if second < 60 else 104.0) for second in range(90)])
    assert tally.growth == pytest.approx(0.04)
    assert Tally(resident=[(float(second), 100.0 + (second < 30)) for second in range(90)]).growth == 0


def test_the_command(serve):
    server = serve(Script(reply=reply, drafts=2), max_context=8192, pages=6000)
    result = CliRunner().invoke(
        main, ["--url", f"{server.url}/v1/", "--minutes", "0.01", "--clients", "4", "--cases", "3"]
    )
    report = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == (1 if failed(report) else 0) and report["wrong"] == 0
    result = CliRunner().invoke(main, ["--url", "http://127.0.0.1:9", "--minutes", "0.01"])
    assert result.exit_code == 1 and "does not answer" in result.output


def test_the_catalogue():
    cases = catalogue(40, 3)
    assert cases == catalogue(40, 3) != catalogue(40, 4)
    assert {case.path for case in cases} == {"/v1/completions", "/v1/chat/completions"}
    assert all(case.body["temperature"] == 0 or "seed" in case.body for case in cases)
    assert len(BAD_REQUESTS) > 10

"""The server as a process: start, failure to load, signals (failure cases i8, i9)."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from fake_worker import Script, events_of, scripted_engine, wait_for
from minispec.server.run import ready_line

SERVER = Path(__file__).with_name("scripted_server.py")


class Process:
    def __init__(self, folder, settings):
        self.popen = subprocess.Popen(
            [sys.executable, str(SERVER), str(folder), json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        line = self.popen.stdout.readline()
        self.url = re.search(r"http://127\.0\.0\.1:\d+", line)[0]

    def wait_ready(self):
        wait_for(lambda: self.health().status_code == 200)
        assert "minispec is ready: scripted (device cpu, slots 4)" in self.popen.stdout.readline()

    def health(self):
        return httpx.get(f"{self.url}/health", timeout=5)

    def end(self, seconds):
        """Exit status and stderr."""
        _, stderr = self.popen.communicate(timeout=seconds)
        return self.popen.returncode, stderr

    def stream(self, prompt, answers, **fields):
        """Runs in a thread: reads a whole stream into ``answers``."""
        body = {"prompt": prompt, "stream": True, **fields}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=30) as response:
            text = ""
            answers.append(response.status_code)
            for part in response.iter_text():
                text += part
        answers.append(text)


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(**settings):
            process = Process(tmp_path, settings)
            stack.callback(process.popen.kill)
            return process

        yield start


def streams(process, prompt, count=4, **fields):
    """Running streams, and the lists their answers go to."""
    answers = [[] for _ in range(count)]
    threads = [threading.Thread(target=process.stream, args=(prompt, one), kwargs=fields) for one in answers]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(answers))
    return threads, answers


def test_sigterm_drains(start):
    process = start(delay=0.02)
    process.wait_ready()
    threads, answers = streams(process, "sixty tokens")  # over a second at 20 ms per step
    idle = httpx.Client(timeout=5)
    idle.get(f"{process.url}/health")  # a kept-alive connection does not hold up the exit
    process.popen.send_signal(signal.SIGTERM)
    wait_for(lambda: process.health().status_code == 503)
    assert process.health().json()["status"] == "draining"
    for stream in (False, True):
        refused = httpx.post(f"{process.url}/v1/completions", json={"prompt": "late", "stream": stream})
        assert refused.status_code == 503 and refused.headers["retry-after"]
    for thread in threads:
        thread.join(20)
    for status, text in answers:
        *chunks, done = events_of(text)
        assert status == 200 and done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "x" * 60
    status, stderr = process.end(5)
    assert (status, stderr) == (0, "")
    idle.close()


@pytest.mark.parametrize("how", ["second signal", "timeout"])
def test_drain_is_cut_short(start, how):
    process = start(delay=0.01, drain_timeout=30 if how == "second signal" else 0.3)
    process.wait_ready()
    threads, answers = streams(process, "endless")
    process.popen.send_signal(signal.SIGINT)
    wait_for(lambda: process.health().status_code == 503)
    if how == "second signal":
        process.popen.send_signal(signal.SIGINT)
    started = time.monotonic()
    status, stderr = process.end(10)
    assert status == 1 and time.monotonic() - started < 4  # 2 on an idle machine
    assert "Traceback" not in stderr
    for thread in threads:
        thread.join(5)
    for _, text in answers:
        *_, error = events_of(text)
        assert error["error"]["code"] == "aborted"


def cpu_seconds(pid):
    """What a process has used of the processors so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_idle_server_rests_and_ends_at_once(start):
    process = start()
    process.wait_ready()
    answers = []
    process.stream("sixty", answers)
    if sys.platform == "linux":
        before = cpu_seconds(process.popen.pid)
        time.sleep(1)
        assert cpu_seconds(process.popen.pid) - before <= 0.05  # whatever else the machine does meanwhile
    process.popen.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert process.end(5) == (0, "") and time.monotonic() - started < 5


def test_signal_while_loading(start):
    process = start(load_seconds=20)
    assert process.health().json()["status"] == "loading"
    process.popen.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert process.end(5)[0] == 0 and time.monotonic() - started < 10


def test_load_failure(start):
    process = start(load_seconds=0.2, load_error="the weights are broken; pull them again")
    assert process.end(10) == (1, "error: the weights are broken; pull them again\n")


def test_a_fatal_fault_ends_the_process(start):
    """Failure case i5: everyone is answered within a second, and whoever started the process is told."""
    process = start(delay=0.01, fail_from=30)
    process.wait_ready()
    threads, answers = streams(process, "endless")
    for thread in threads:
        thread.join(10)
    for status, text in answers:
        *chunks, error = events_of(text)
        assert status == 200 and chunks and error["error"]["code"] == "engine_error"
    status, stderr = process.end(10)
    assert status == 1
    assert (
        "error: the engine failed: EngineFailed: the target computes nothing any more: RuntimeError: scripted" in stderr
    )


def test_what_is_said_at_the_start(tmp_path):
    """The model's own sampling defaults too: they decide what a request gets that says nothing."""
    plain = scripted_engine(Script(), tmp_path)
    assert ready_line("m", plain) == "minispec is ready: m (device cpu, slots 4)"
    tuned = scripted_engine(Script(), tmp_path, default_params={"temperature": 0.1, "top_k": 1})
    first, second = ready_line("m", tuned).splitlines()
    assert first == ready_line("m", plain) and "generation_config.json" in second
    assert "temperature 0.1" in second and "top_k 1" in second

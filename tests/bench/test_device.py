"""The device script at its small size: what it needs, how it ends, and that one broken case does not cost the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minispec.bench import device
from minispec.bench.device import Report

ROOT = Path(device.__file__).resolve().parents[2]
ONLY_TORCH = """
import sys
for name in ("tokenizers", "rich", "starlette", "pydantic", "click", "httpx", "jinja2", "filelock", "uvicorn",
             "prometheus_client", "prompt_toolkit", "transformers", "huggingface_hub", "gguf"):
    sys.modules[name] = None
"""
BROKEN = """
import os, sys, time
if "--child" in sys.orig_argv and "kernels" in sys.orig_argv:
    from minispec.bench import device_kernels as d
    def problem(deviation):
        return d.Problem(run=lambda: None, deviation=deviation, bytes=8)
    def raises():
        raise RuntimeError("no such thing")
    def cases(*_):
        yield "case 1 fine", lambda: problem(lambda: 0.5)
        yield "case 2 dies", lambda: os._exit(139)
        yield "case 3 raises", raises
        yield "case 4 wrong", lambda: problem(lambda: 2.0)
        yield "case 5 fine", lambda: problem(lambda: 0.0)
    d.cases = cases
"""


def environment(tmp_path: Path, at_start: str) -> dict[str, str]:
    """Variables under which every process of the script first runs ``at_start``."""
    (tmp_path / "sitecustomize.py").write_text(at_start)
    dropped = ("MINISPEC_KERNELS", "TRITON_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def start(tmp_path: Path, at_start: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "minispec.bench.device", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path, at_start),
    )


def test_small_with_nothing_but_torch(tmp_path):
    child = start(tmp_path, ONLY_TORCH)
    out, _ = child.communicate()
    assert child.returncode == 0, out
    found = json.loads(out.splitlines()[-1])
    names = [result["name"] for result in found["results"]]
    assert len(names) == len(set(names)) > 30
    assert found["failed"] == []
    assert all(result["ok"] for result in found["results"])
    assert found["machine"]["copy_bytes_per_s"] > 0
    for part in ("tree_attention bf16", "tree_attention fp16", "sample truncated", "verify", "text itself", "step 2x5"):
        assert any(name.startswith(part) for name in names), part
    assert all(result["ms"] > 0 for result in found["results"] if result["name"].startswith("step"))


def test_one_broken_case_does_not_cost_the_rest(tmp_path):
    child = start(tmp_path, BROKEN, "--only", "case")
    out, _ = child.communicate()
    assert child.returncode == 1
    found = json.loads(out.splitlines()[-1])
    assert [(result["name"][5:], result["ok"]) for result in found["results"]] == [
        ("1 fine", True),
        ("2 dies", False),
        ("3 raises", False),
        ("4 wrong", False),
        ("5 fine", True),
    ]
    notes = [result.get("note", "") for result in found["results"]]
    assert "139" in notes[1]
    assert "no such thing" in notes[2]
    assert found["failed"] == ["case 2 dies", "case 3 raises", "case 4 wrong"]


def test_interrupted_it_shows_what_it_has(tmp_path):
    child = start(tmp_path, "")
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("ok"):
            break
    child.send_signal(signal.SIGTERM)
    rest = child.stdout.read()
    assert child.wait() == 1
    assert json.loads(rest.splitlines()[-1])["results"]


def test_out_of_time(capsys):
    assert device.main(["--seconds", "0", "--only", "rms_norm"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"][0]["note"] == "skipped: out of time"


def test_a_silent_case_is_given_up(monkeypatch):
    monkeypatch.setattr(device, "_SILENCE", 0.5)
    code = 'import time; print(\'@@ {"start": "slow"}\', flush=True); time.sleep(60)'
    begin = time.monotonic()
    ended, running, trouble = device._follow([sys.executable, "-c", code], Report(), set(), begin + 100)
    assert (ended, running) == (False, "slow")
    assert "no answer" in trouble
    assert time.monotonic() - begin < 30


def test_aims():
    report = Report()
    report.machine = {"cuda": True, "copy_bytes_per_s": 4e12}
    shared = {"ok": True, "step_ms": 5.0, "host_ms": 1.0}
    report.results = [
        {"name": "step 1x1 nodes, 1024 keys, graphs", "ms": 4.0, "weight_bytes": 15e9, **shared},
        {"name": "step 1x64 nodes, 1024 keys, graphs", "ms": 4.4, "weight_bytes": 15e9, **shared},
        {"name": "tree_attention bf16 causal 2048", "ok": True, "ms": 2.0, "rival_ms": 1.0, "rival": "sdpa"},
    ]
    aims = report.aims()
    assert [aim["met"] for aim in aims] == [True, True, True, True, False]
    assert aims[0]["value"] == pytest.approx(0.9375)
    assert aims[1]["value"] == pytest.approx(1.1)
    report.machine = {"cuda": False}
    assert report.aims() == []

"""schemathesis over the OpenAPI document: thousands of requests of its own making, and not one 5xx."""

import subprocess
import sys
from pathlib import Path

import pytest

from fake_worker import Script, live_server
from minispec.config import EngineConfig
from minispec.load import load_engine


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_server_error(tiny_model_folder):
    config = EngineConfig(target=str(tiny_model_folder), draft="ngram", dtype="float32", device="cpu", max_context=48)
    command = [
        Path(sys.executable).with_name("schemathesis"),
        "run",
        "--request-timeout",
        "120",
        "--max-examples",
        "30",
    ]
    # What fits the schema may still be refused: a schema cannot say which fields go together.
    checks = ["--exclude-checks", "positive_data_acceptance", "--phases", "examples,coverage,fuzzing"]
    with live_server(Script(), tiny_model_folder, max_waiting=256, make_engine=lambda: load_engine(config)) as server:
        done = subprocess.run(
            [*command, *checks, f"{server.url}/openapi.json"], capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout[-5000:]
        server.wait_idle(30)
        assert not any(status >= 500 for status in server.api._statuses)

"""From process start to ready, and the memory a server takes: `minispec serve` as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from minispec import hub
from minispec.config import EngineConfig
from minispec.errors import ConfigError

_LISTENING = re.compile(r"listening on (http://\S+)")
_PATIENCE = 600.0  # seconds until a server that is still loading counts as broken


def startup(config: EngineConfig, arguments: Sequence[str], rounds: int = 3) -> dict[str, Any]:
    """Start servers one after the other, ask each for a short answer, stop it.

    Args:
        config: whose target's weights are the yardstick of memory.
        arguments: of ``minispec serve``, without host and port.

    Returns:
        Medians: ``ready_s`` (process start to /health 200), ``rss_mb`` then and ``rss_after_mb`` after the answer
        (10**6 bytes, resident set), ``weights_mb``, ``rss_to_weights``, ``rss_after_to_weights``.

    Raises:
        ConfigError: a server ended before it was ready.
    """
    runs = [_run(arguments) for _ in range(rounds)]
    ready, rss, after = (statistics.median(values) for values in zip(*runs, strict=True))
    weights = sum(file.stat().st_size for file in Path(hub.resolve(config.target)).glob("*.safetensors"))
    return {
        "ready_s": round(ready, 2),
        "rss_mb": round(rss / 1e6, 1),
        "rss_after_mb": round(after / 1e6, 1),
        "weights_mb": round(weights / 1e6, 1),
        "rss_to_weights": round(rss / weights, 3),
        "rss_after_to_weights": round(after / weights, 3),
    }


def _run(arguments: Sequence[str]) -> tuple[float, int, int]:
    """Seconds to ready; resident bytes then and after an answer."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "minispec", "serve", "--host", "127.0.0.1", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = next((found[1] for line in process.stdout if (found := _LISTENING.search(line))), None)
        if url is None:
            raise ConfigError(f"`minispec serve {' '.join(arguments)}` ended at once; see what it printed above")
        with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as http:
            while http.get("/health").status_code != 200:
                if process.poll() is not None or time.perf_counter() - begin > _PATIENCE:
                    raise ConfigError("the server did not become ready; see what it printed above")
                time.sleep(0.01)
            ready = time.perf_counter() - begin
            before = resident_bytes(process.pid)
            body = {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 32}
            http.post("/v1/chat/completions", json=body).raise_for_status()
            return ready, before, resident_bytes(process.pid)
    except httpx.HTTPError as error:
        raise ConfigError(f"the server did not answer ({type(error).__name__}: {error})") from error
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def resident_bytes(pid: int) -> int:
    """Resident set of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

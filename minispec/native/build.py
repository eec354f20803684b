"""Compile the step's C++ on the machine that is to run it, once, into the user's cache.

The library knows no model: shapes and weights are arguments. So it is small, takes seconds to compile, and serves every
model of the machine. Its name holds a hash of what decides what it does: sources, flags, processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from minispec.hub import cache_dir

SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-w",
    "-shared",
    "-fPIC",
    "-pthread",
)
NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni")
"""Instructions the code is written for, as /proc/cpuinfo names them."""

NICENESS = 10
"""Priority of building and checking: a tenth of a core where running streams want them all."""

_TIMEOUT = 900  # seconds; an idle core needs ten
_SELF_TEST = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).minispec_self_test())"


class BuildError(Exception):
    """The library cannot be had here; the message says why."""


def processor() -> tuple[str, frozenset[str]]:
    """Name and instruction sets of this machine's processor; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "", frozenset()
    found = dict(line.replace("\t", "").split(":", 1) for line in reversed(lines) if ":" in line)
    return found.get("model name", "").strip(), frozenset(found.get("flags", "").split())


def compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX``, or the first of g++, clang++, c++ on the path."""
    named = os.environ.get("CXX")
    return next(
        (path for name in ([named] if named else ["g++", "clang++", "c++"]) if (path := shutil.which(name))), None
    )


def obstacle() -> str | None:
    """Why this machine cannot run the compiled step; None if it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"it is written for x86-64, this machine is {platform.machine()}"
    if missing := [name for name in NEEDED if name not in processor()[1]]:
        return f"the processor lacks {', '.join(missing)}"
    return None


def library_path() -> Path:
    """Where the library of this machine lies, whether or not it has been compiled yet."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.read_bytes())
    name, flags = processor()
    for part in (*FLAGS, name, *sorted(flags)):
        digest.update(part.encode() + b"\0")
    return cache_dir() / "compiled" / f"step-{digest.hexdigest()[:16]}.so"


def build(path: Path) -> None:
    """Compile to ``path`` at a low priority, and test it in a process of its own. It appears whole or not at all.

    Raises:
        BuildError: there is no compiler, or it fails, or what it made does; with the end of what it said.
    """
    command = compiler()
    if command is None:
        raise BuildError("there is no C++ compiler; install g++, or name one in CXX")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
        made = Path(folder) / path.name
        _run([command, *FLAGS, "-o", str(made), *map(str, sorted(SOURCES.glob("*.cpp")))], "the C++ compiler")
        # a wrong instruction ends the process it runs in: not this one
        _run([sys.executable, "-c", _SELF_TEST, str(made)], "the self-test of the compiled step")
        os.replace(made, path)


def _run(command: list[str], what: str) -> None:
    nice = shutil.which("nice")
    try:
        done = subprocess.run(
            [nice, "-n", str(NICENESS), *command] if nice else command, capture_output=True, text=True, timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{what} could not be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{what} ended with status {done.returncode}: {done.stderr.strip()[-500:] or 'no message'}")

"""Settings of the whole suite."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from minispec.native.library import Team

# The models here are tiny: a second thread would only wait at barriers, and badly so on a busy machine.
# Set before torch is imported, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Started in the background of a shell, the suite would inherit that Ctrl-C is ignored, and so would what it starts;
# tests of interrupts would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled step, built once for all tests as a user's machine would."""
    from minispec.native import build

    path = tmp_path_factory.mktemp("compiled") / "step.so"
    build.build(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["step.so"]
    return path


@pytest.fixture
def team(library_path: Path) -> Team:
    """Two threads that run it."""
    from minispec.native.library import Library, Team

    return Team(Library(library_path), 2)

"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from minispec.errors import ConfigError


def write(path: Path, how: Callable[[Path], object]) -> None:
    """Make a file in one move: ``how`` writes it under another name.

    Raises:
        ConfigError: it cannot be written; nothing is left of it.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        how(hidden)
        hidden.chmod(0o644)  # safetensors keeps its files to their owner
        hidden.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # of Python, of torch and of safetensors
        with contextlib.suppress(OSError):
            hidden.unlink()
        raise ConfigError(
            f"{path} cannot be written: {error}. See that its folder is there and has room, then go on with --resume"
        ) from error

"""The process's memory."""

from __future__ import annotations

import contextlib
import ctypes


def give_back_memory() -> None:
    """Return to the system what has been freed. glibc would keep it: after loading, a fifth of a small model's weights;
    after a huge prompt, hundreds of megabytes for each thread that ever read one."""
    with contextlib.suppress(AttributeError, OSError):  # other C libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)

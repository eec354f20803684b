"""Notices a step that does not return: a hung driver, a deadlock, a kernel without an end.

A thread of its own looks now and then at when the present step began. Nothing is killed: the log gets the stack of the
stuck thread, /health turns 503 so that whoever supervises the process can decide, and both end if the step returns.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_LOOKS = 4  # per timeout
_LONGEST_PAUSE = 5.0  # seconds


class Watchdog:
    """Watches the steps of one thread.

    Args:
        timeout: seconds that a step may take; 0 watches nothing.
        describe: what the step is at, for the log.

    Attributes:
        stalls: steps that took longer.
    """

    def __init__(self, timeout: float, describe: Callable[[], str]) -> None:
        self.stalls = 0
        self._timeout = timeout
        self._describe = describe
        self._begun: float | None = None
        self._thread_id: int | None = None
        self._reported: float | None = None  # the step that was complained of, by its begin
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="minispec-watchdog", daemon=True)

    @property
    def stalled(self) -> bool:
        """Whether the present step has taken too long."""
        begun = self._begun
        return self._timeout > 0 and begun is not None and time.monotonic() - begun > self._timeout

    def start(self) -> None:
        if self._timeout > 0:
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, in the thread that takes it."""
        self._thread_id = threading.get_ident()
        self._begun = begun = time.monotonic()
        try:
            yield
        finally:
            self._begun = None
            if self._reported == begun:
                logger.warning("the step that was stuck has returned after %.1f s", time.monotonic() - begun)

    def _watch(self) -> None:
        while not self._ended.wait(min(self._timeout / _LOOKS, _LONGEST_PAUSE)):
            begun = self._begun
            if begun is None or begun == self._reported or time.monotonic() - begun <= self._timeout:
                continue
            self._reported = begun
            self.stalls += 1
            frame = sys._current_frames().get(self._thread_id or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (no stack)\n"
            logger.error(
                "a step has not returned for %.1f s (--step-timeout is %g); it is in %s, at\n%s",
                time.monotonic() - begun,
                self._timeout,
                self._describe(),
                stack.rstrip(),
            )

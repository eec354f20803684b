"""Reasoning that a model writes between ``<think>`` and ``</think>``, told from its answer as the text comes."""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
PARSERS = ("auto", "none", "think")
"""Values of ``--reasoning-parser``; auto looks for the markers in the chat template."""

_MARKERS = re.compile(f"{OPEN}|{CLOSE}")


def is_opened(prompt_end: str) -> bool:
    """Whether a prompt, as its control tokens are spelt, leaves the answer inside the reasoning."""
    found = _MARKERS.findall(prompt_end)
    return bool(found) and found[-1] == OPEN and prompt_end.rstrip().endswith(OPEN)


class ReasoningSplitter:
    """Splits one growing answer. What it gives does not depend on where the pieces are cut.

    Reasoning comes once, before everything else. White space around the markers belongs to neither part. Text that
    does not begin with the opening marker holds no reasoning.

    Args:
        inside: the prompt has opened the reasoning already.

    Attributes:
        begun, ended: the opening and the closing marker have been seen (or ``inside`` was given).
    """

    def __init__(self, *, inside: bool = False) -> None:
        self.begun = inside
        self.ended = False
        self._is_plain = False  # everything from here on is the answer
        self._strip = inside  # white space at the beginning of a part
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """The pieces of reasoning and of answer that ``text`` makes certain; the reasoning stands before the answer."""
        if self._is_plain:
            return "", self._trimmed(text)
        text = self._held + text
        self._held = ""
        if not self.begun:
            start = text.lstrip()
            if OPEN.startswith(start) and start != OPEN:
                self._held = text
                return "", ""
            if not start.startswith(OPEN):
                self._is_plain = True
                return "", text
            self.begun = self._strip = True
            text = start.removeprefix(OPEN)
        reasoning, marker, answer = text.partition(CLOSE)
        if marker:
            reasoning = self._trimmed(reasoning.rstrip())
            self.ended = self._is_plain = self._strip = True
            return reasoning, self._trimmed(answer)
        safe = len(without_marker_start(text, CLOSE))
        self._held = text[safe:]
        return self._trimmed(text[:safe]), ""

    def finish(self) -> tuple[str, str]:
        """What was held back, once the text has ended."""
        held, self._held = self._held, ""
        return (self._trimmed(held.rstrip()), "") if self.begun else ("", held)

    def _trimmed(self, text: str) -> str:
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        return text


def without_marker_start(text: str, marker: str) -> str:
    """``text`` without an end that may turn out to be the beginning of ``marker``, nor the white space before it."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            text = text[:-length]
            break
    return text.rstrip()

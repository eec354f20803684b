"""Stop strings in streamed text.

The text arrives in pieces of any size (a step may commit one token or a whole accepted run), and a stop string may
begin and end anywhere in them. Each stop string runs its own Knuth-Morris-Pratt automaton over the characters, so that
the answer does not depend on where the pieces are cut, and no more is held back than may still turn out to be a stop
string. (Knuth, Morris & Pratt 1977, "Fast pattern matching in strings".)
"""

from __future__ import annotations

from collections.abc import Sequence

from minispec.errors import RequestError


def _failure_table(pattern: str) -> list[int]:
    """``table[n]``: length of the longest proper border of ``pattern[:n]`` (a prefix that is also a suffix)."""
    table = [0] * (len(pattern) + 1)
    border = 0
    for end in range(1, len(pattern)):
        while border and pattern[end] != pattern[border]:
            border = table[border]
        if pattern[end] == pattern[border]:
            border += 1
        table[end + 1] = border
    return table


class StopMatcher:
    """Finds the first stop string in streamed text, with minimal hold-back.

    The first match is the one that is complete first; of several complete at the same character, the one that starts
    first (the longest). Held back is only the longest end of the text that is a proper prefix of a stop string.

    Attributes:
        matched: the stop string found, None until then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises RequestError if a stop string is empty: it would match everywhere."""
        if any(not stop for stop in stops):
            raise RequestError("A stop string is empty; leave it out or give at least one character.", param="stop")
        # Longest first, so that the first automaton to finish at a character is the one that started earliest.
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)  # state = how many characters of the stop string the text ends with
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Text that is now safe to show. Once a stop string is found: what stood before it, and "" ever after.

        Without ``may_match`` a stop string that this text completes is text like any other.
        """
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        states = self._states
        for position in range(len(self._held), len(seen)):
            character = seen[position]
            for index, stop in enumerate(self._stops):
                table, state = self._tables[index], states[index]
                while state and stop[state] != character:
                    state = table[state]
                if stop[state] == character:
                    state += 1
                if state == len(stop) and not may_match:
                    state = table[state]
                elif state == len(stop):
                    self.matched = stop
                    self._held = ""
                    return seen[: position + 1 - len(stop)]
                states[index] = state
        safe = len(seen) - max(states)
        self._held = seen[safe:]
        return seen[:safe]

    def finish(self) -> str:
        """The held-back tail, for a request that ends without a stop string (EOS, max_tokens)."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

"""How often guesses of a kind turn out right: learned while running, per request with the whole server as prior."""

from __future__ import annotations

from collections.abc import Sequence

PRIOR = 4.0
"""Guesses that what is known beforehand counts for."""
MEMORY = 512.0
"""Guesses after which older ones weigh half, so that rates follow what is served."""


class Rates:
    """Success of guesses by kind, kinds being numbered.

    A guess may carry a weight below one, its share among guesses of which at most one can be right; a rate is then
    successes per weight, what the shares must be multiplied with to be probabilities.

    Args:
        first: rates to start from, one per kind; or the rates of all requests together, which are then updated too.
    """

    def __init__(self, first: Sequence[float] | Rates) -> None:
        self._prior = first
        kinds = len(first)
        self._hits = [0.0] * kinds
        self._tries = [0.0] * kinds

    def __len__(self) -> int:
        return len(self._tries)

    def __getitem__(self, kind: int) -> float:
        """The rate of a kind, within [0.001, 0.995]: nothing is impossible, and nothing goes without saying."""
        rate = (self._hits[kind] + PRIOR * self._prior[kind]) / (self._tries[kind] + PRIOR)
        return 1e-3 if rate < 1e-3 else 0.995 if rate > 0.995 else rate

    def record(self, kind: int, hit: bool, weight: float = 1.0) -> None:
        """Count a guess of which the outcome is known."""
        self._hits[kind] += hit
        self._tries[kind] += weight
        if self._tries[kind] > MEMORY:
            self._hits[kind] /= 2
            self._tries[kind] /= 2
        if isinstance(self._prior, Rates):
            self._prior.record(kind, hit, weight)

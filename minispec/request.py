"""One generation request: its parameters, its tokens, and the rules that end it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from minispec.errors import RequestError
from minispec.stop import StopMatcher
from minispec.tree import MAX_NODES, DraftTree

if TYPE_CHECKING:
    from minispec.tokenizer import IncrementalDecoder
    from minispec.verify import Acceptance

MAX_STOPS = 16
MAX_TRACE_NODES = 20_000
"""Tree nodes a request's trace may hold; later steps are left out of it."""
_GREEDY_BELOW = 1e-4  # logits that close are equal in bf16; dividing by less would only amplify rounding


class FinishReason(StrEnum):
    """Why a request ended; a request ends with exactly one."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the engine could not go on with it


@dataclass(frozen=True, kw_only=True)
class SpeculationParams:
    """How much is drafted for a request. It changes how fast the text comes, never the text.

    Attributes:
        enabled: False decodes plainly.
        max_nodes: most tree nodes, root included, that a step verifies for it; None leaves it to the engine.
        drafters: the loaded drafters that may draft for it, by name; None for all.
        trace: keep each step's tree with what was accepted (``Request.trace``).

    Raises:
        RequestError: a value is out of range; ``param`` names it.
    """

    enabled: bool = True
    max_nodes: int | None = None
    drafters: tuple[str, ...] | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        for name in ("enabled", "trace"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(
                    f"speculation.{name} must be true or false, not {value!r}", param=f"speculation.{name}"
                )
        if self.max_nodes is not None:
            _require_int("speculation.max_nodes", self.max_nodes, 1, MAX_NODES)
        if self.drafters is not None:
            if isinstance(self.drafters, str) or not all(isinstance(name, str) for name in self.drafters):
                raise RequestError(
                    f"speculation.drafters must be a list of names, not {self.drafters!r}",
                    param="speculation.drafters",
                )
            object.__setattr__(self, "drafters", tuple(self.drafters))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when they end.

    Attributes:
        max_tokens: most tokens to generate; None for all the context has room for.
        temperature: 0 is greedy; at most 2.
        top_p: keep the likeliest tokens up to this mass; 0 keeps the best only.
        top_k: keep this many tokens; 0 or -1 is off.
        min_p: drop tokens less likely than this share of the best.
        seed: None draws a fresh one. The same seed gives the same text, alone or in a batch, speculation on or off.
        stop: strings that end the text and are not part of it.
        ignore_eos: go on past end-of-sequence tokens.
        speculation: how much is drafted for it.

    Raises:
        RequestError: a value is out of range; ``param`` names it.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    speculation: SpeculationParams = SpeculationParams()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            object.__setattr__(self, "stop", tuple(self.stop or ()))
        _require_range("temperature", self.temperature, 0.0, 2.0)
        _require_range("top_p", self.top_p, 0.0, 1.0)
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_int("top_k", self.top_k, -1, None)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1, None)
        if self.seed is not None:
            _require_int("seed", self.seed, -(2**63), 2**63 - 1)
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"at most {MAX_STOPS} stop strings are allowed, {len(self.stop)} given", param="stop")
        for stop in self.stop:
            if not isinstance(stop, str):
                raise RequestError(f"a stop string must be a string, not {type(stop).__name__}", param="stop")
            if not stop:
                raise RequestError("a stop string must not be empty; leave it out instead", param="stop")

    @property
    def greedy(self) -> bool:
        """Plain argmax, no noise."""
        return self.temperature <= _GREEDY_BELOW


def _require_range(name: str, value: float, low: float, high: float) -> None:
    # `not low <= value` also refuses NaN; a whole number may be too large to become a float
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}", param=name)


def _require_int(name: str, value: int, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, not {value!r}", param=name)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be {bounds}, {value} given", param=name)


@dataclass
class SpeculationStats:
    """Counts of one request's verifications. Drafts behind a stop count as drafted but not as accepted.

    Attributes:
        steps: verifications; the first token, which the prompt's last row gives, is not one.
        drafted: draft nodes verified (roots not counted).
        accepted: draft tokens that became part of the text.
        emitted: tokens these verifications appended, bonus tokens included.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0

    def count(self, *, drafted: int, accepted: int, emitted: int) -> None:
        """Add one verification."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per verification, bonus included; None before the first."""
        return self.emitted / self.steps if self.steps else None

    def as_dict(self) -> dict[str, float | None]:
        """As in ``usage.speculation`` of a response."""
        length = self.acceptance_length
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": None if length is None else round(length, 4),
        }


@dataclass(frozen=True)
class TraceStep:
    """One verification, for pictures and debugging.

    Attributes:
        tokens: token id per tree node; node 0 is the last token before the step.
        parents: index of each node's parent; -1 for the root.
        accepted: the nodes that became text, from the root down, the root included.
        bonus: the target's own token behind them, or None where the text ended before it.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]
    bonus: int | None


@dataclass(eq=False)
class Request:
    """A prompt being continued.

    Tokens are append-only, and nothing past the cut that ends the request is ever appended.

    Attributes:
        prompt: token ids, at least one.
        params: sampling parameters.
        decoder: turns generated ids into text, or None where no text is wanted (stop strings then cannot match).
        eos_ids: tokens that end the request unless ``params.ignore_eos``.
        limit: most tokens it may generate; the engine lowers it to the room its context has.
        owner: who asks, as far as texts may be shared: drafters learn from finished outputs of the same owner only.
        seed: key of the request's noise; ``params.seed`` or a random one.
        tokens: prompt and generated ids.
        text: generated text, stop string and held-back tail excluded.
        finish_reason: None while running.
        error: what went wrong, for FinishReason.ERROR.
        preemptions: how often it had to give its pages back and start over.
        trace: its verifications in order, if the parameters ask for them; at most ``MAX_TRACE_NODES`` nodes.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    decoder: IncrementalDecoder | None = None
    eos_ids: frozenset[int] = frozenset()
    limit: int = 0
    owner: str = ""
    seed: int = field(init=False)
    tokens: list[int] = field(init=False)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    preemptions: int = 0
    trace: list[TraceStep] = field(default_factory=list)
    created: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        self.tokens = list(self.prompt)
        self._matcher = StopMatcher(self.params.stop)
        self._trace_room = MAX_TRACE_NODES if self.params.speculation.trace else 0

    @property
    def output(self) -> list[int]:
        """Generated token ids. A token that ends the request, or completes a stop string, is the last of them."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        """How many tokens have been generated."""
        return len(self.tokens) - len(self.prompt)

    @property
    def remaining(self) -> int:
        """How many more tokens may be generated."""
        return self.limit - self.num_output

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def may_draft(self, drafter: str) -> bool:
        """Whether the request lets the drafter of this name draft for it."""
        chosen = self.params.speculation
        return chosen.enabled and (chosen.drafters is None or drafter in chosen.drafters)

    def record(self, tree: DraftTree, acceptance: Acceptance, emitted: int) -> None:
        """Note a verification that appended ``emitted`` tokens, if a trace is wanted and has room."""
        if len(tree) > self._trace_room:
            self._trace_room = 0  # a trace has no gaps
            return
        self._trace_room -= len(tree)
        bonus = acceptance.tokens[-1] if emitted == len(acceptance.tokens) else None
        # of a run that was cut, the tokens that were appended are the nodes behind the root
        accepted = acceptance.path[: emitted + 1]
        self.trace.append(TraceStep(tree.tokens, tree.parents, accepted, bonus))

    def append(self, tokens: Iterable[int]) -> tuple[list[int], str]:
        """Append a verified run up to and including the token that ends the request.

        Each token is tested by itself, in the order end of sequence, stop string, length: a run that is verified in one
        step ends where it would have ended token by token.

        Returns:
            The tokens appended and the text they made safe to show.
        """
        appended: list[int] = []
        shown = ""
        for token in tokens:
            assert self.finish_reason is None and self.remaining > 0
            self.tokens.append(token)
            appended.append(token)
            if token in self.eos_ids and not self.params.ignore_eos:
                self.finish_reason = FinishReason.STOP
            elif self.decoder is not None:
                shown += self._matcher.feed(self.decoder.feed(token))
                if self._matcher.matched is not None:
                    self.finish_reason = FinishReason.STOP
            if self.finish_reason is None and self.remaining == 0:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                break
        if self.finish_reason is not None:
            shown += self._flush()
        self.text += shown
        return appended, shown

    def end(self, reason: FinishReason, error: str | None = None) -> str:
        """End the request from outside (abort or error); returns the text that was held back. Later ends do nothing."""
        if self.finish_reason is not None:
            return ""
        self.finish_reason = reason
        self.error = error
        tail = self._flush()
        self.text += tail
        return tail

    def _flush(self) -> str:
        if self.decoder is None or self._matcher.matched is not None:
            return ""
        return self._matcher.feed(self.decoder.finish()) + self._matcher.finish()


@dataclass(frozen=True)
class TokenEvent:
    """What one step did for one request.

    Attributes:
        request: the request; its counts and finish_reason are those after the step.
        tokens: ids appended in this step.
        text: text that became safe to show.
        finish_reason: set in the request's last event.
    """

    request: Request
    tokens: Sequence[int]
    text: str
    finish_reason: FinishReason | None = None

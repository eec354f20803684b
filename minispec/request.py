"""One generation request: its parameters, its tokens, and the rules that end it."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from minispec.errors import RequestError
from minispec.stop import StopMatcher
from minispec.tree import MAX_NODES, DraftTree

if TYPE_CHECKING:
    from minispec.constraint import Constraint, OutputFormat
    from minispec.tokenizer import IncrementalDecoder
    from minispec.verify import Acceptance

MAX_STOPS = 16
"""Stop strings of a request, and stop tokens likewise."""
MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities a request may ask for at each position."""
LOGPROB_FLOOR = -9999.0
"""What a log-probability of minus infinity is given as: JSON has no infinity."""
MAX_LOGIT_BIAS = 1024
"""Most tokens a request may give a bias."""
MAX_TRACE_NODES = 20_000
"""Tree nodes a request's trace may hold; later steps are left out of it."""
_GREEDY_BELOW = 1e-4  # logits that close are equal in bf16; dividing by less would only amplify rounding


class FinishReason(StrEnum):
    """Why a request ended; a request ends with exactly one."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
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
        max_tokens: most tokens to generate; None for all the context has room for. 0 generates nothing and only scores
            the prompt, so it needs ``prompt_logprobs``.
        min_tokens: before this many tokens only the limit ends the request: the tokens that would are not drawn (unless
            a grammar has nothing else left), and a stop string that is complete by then does not count.
        temperature: 0 is greedy; at most 2.
        top_p: keep the likeliest tokens up to this mass; 0 keeps the best only.
        top_k: keep this many tokens; 0 or -1 is off.
        min_p: drop tokens less likely than this share of the best.
        seed: None draws a fresh one. The same seed gives the same text, alone or in a batch, speculation on or off.
        stop: strings that end the text and are not part of it.
        stop_token_ids: tokens that end it likewise, also with ``ignore_eos``.
        ignore_eos: go on past end-of-sequence tokens.
        frequency_penalty: taken from a token's logit for each time the output has it; from -2 to 2.
        presence_penalty: taken from the logit of every token the output has; from -2 to 2.
        repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens that prompt or
            output have (Keskar et al. 2019, arXiv 1909.05858); from 0.01 to 10, 1 is off.
        logit_bias: added to tokens' logits, by token id; from -100 to 100, for at most ``MAX_LOGIT_BIAS`` tokens.
        logprobs: alternatives whose log-probabilities come with each generated token's own, at most ``MAX_LOGPROBS``;
            None for no log-probabilities at all. They are the model's, before temperature, penalties and bias.
        prompt_logprobs: the same for the tokens of the prompt.
        output_format: the language that the text must be of; None for any. Where the text is complete and nothing may
            follow, the request ends, ``min_tokens`` and ``ignore_eos`` notwithstanding; where ``max_tokens`` comes
            first it is cut short (finish reason ``length``).
        speculation: how much is drafted for it.

    Penalties, bias and bans apply to every drafted position with the text that leads to it.

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
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    output_format: OutputFormat | None = None
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
        _require_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_range("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _require_int(name, count, 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, None)
        _require_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}", param="min_tokens"
            )
        if self.seed is not None:
            _require_int("seed", self.seed, -(2**63), 2**63 - 1)
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"at most {MAX_STOPS} stop strings are allowed, {len(self.stop)} given", param="stop")
        for stop in self.stop:
            if not isinstance(stop, str):
                raise RequestError(f"a stop string must be a string, not {type(stop).__name__}", param="stop")
            if not stop:
                raise RequestError("a stop string must not be empty; leave it out instead", param="stop")
        self._check_token_lists()

    def _check_token_lists(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if len(self.stop_token_ids) > MAX_STOPS:
            raise RequestError(
                f"at most {MAX_STOPS} stop tokens are allowed, {len(self.stop_token_ids)} given", param="stop_token_ids"
            )
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, 0, None)
        bias = self.logit_bias or {}
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not be {bias!r}", param="logit_bias")
        object.__setattr__(self, "logit_bias", dict(bias))
        if len(bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias may name at most {MAX_LOGIT_BIAS} tokens, {len(bias)} given", param="logit_bias"
            )
        for token, value in bias.items():
            _require_int("logit_bias", token, 0, None)
            _require_range("logit_bias", value, -100.0, 100.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RequestError if a token named here is none of the model's ``vocab_size``."""
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    raise RequestError(
                        f"{name} names token {token}; this model's ids go from 0 to {vocab_size - 1}", param=name
                    )

    def choice(self, index: int) -> SamplingParams:
        """The parameters of choice ``index`` of several to one prompt: a given seed is counted up, so that choice 0 is
        the answer to a request for one. Seeds wrap around at 2**63."""
        if self.seed is None or index == 0:
            return self
        return dataclasses.replace(self, seed=(self.seed + index + 2**63) % 2**64 - 2**63)

    @property
    def greedy(self) -> bool:
        """Plain argmax, no noise."""
        return self.temperature <= _GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Tokens that have occurred count."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1


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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model gave one token, and the likeliest ones in its place.

    Log-probabilities are natural, of the model itself (no temperature, penalties, bias or grammar), and finite: what is
    less than ``LOGPROB_FLOOR`` is raised to it.

    Attributes:
        token: its id.
        logprob: its log-probability.
        top: (id, log-probability) of as many alternatives as were asked for, likeliest first. The token itself is one
            of them if it is that likely.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


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
        constraint: the grammar its output obeys, or None.
        seed: key of the request's noise; ``params.seed`` or a random one.
        end_ids: the tokens that do end it: ``eos_ids`` unless ignored, and the stop tokens.
        tokens: prompt and generated ids.
        text: generated text, stop string and held-back tail excluded.
        logprobs: one entry per token of ``output`` if ``params.logprobs`` asks for them, none otherwise.
        prompt_logprobs: likewise per token of the prompt with ``params.prompt_logprobs``, complete before the first
            token comes. The first entry is None: nothing leads to it.
        finish_reason: None while running.
        error: what went wrong, for FinishReason.ERROR.
        preemptions: how often it had to give its pages back and start over.
        cached_tokens: prompt tokens that were not computed for it, as the prefix cache had them.
        trace: its verifications in order, if the parameters ask for them; at most ``MAX_TRACE_NODES`` nodes.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    decoder: IncrementalDecoder | None = None
    eos_ids: frozenset[int] = frozenset()
    limit: int = 0
    owner: str = ""
    constraint: Constraint | None = None
    seed: int = field(init=False)
    end_ids: frozenset[int] = field(init=False)
    tokens: list[int] = field(init=False)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    preemptions: int = 0
    cached_tokens: int = 0
    trace: list[TraceStep] = field(default_factory=list)
    created: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        self.tokens = list(self.prompt)
        self.end_ids = frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else self.eos_ids)
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

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Tokens of the prompt are still to be scored: its chunks must be computed, every row sampled, from the first
        position without a score on."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt)

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

    def append(self, tokens: Iterable[int], logprobs: Sequence[TokenLogprobs] = ()) -> tuple[list[int], str]:
        """Append a verified run up to and including the token that ends the request.

        Each token is tested by itself, in the order end token, stop string, complete grammar, length: a run that is
        verified in one step ends where it would have ended token by token. A request for no tokens at all ends at once,
        and one whose grammar refuses a token, as it knows no way on, ends with an error and without it.

        Args:
            tokens: the run.
            logprobs: one for each, if the request wants them; cut like the tokens.

        Returns:
            The tokens appended and the text they made safe to show.
        """
        appended: list[int] = []
        shown = ""
        if self.remaining <= 0:
            self.finish_reason, tokens = FinishReason.LENGTH, ()
        for token in tokens:
            assert self.finish_reason is None and self.remaining > 0
            if self.constraint is not None and not self.constraint.accept(token):
                self.finish_reason, self.error = FinishReason.ERROR, self.constraint.error
                break
            self.tokens.append(token)
            appended.append(token)
            if token in self.end_ids:  # earlier ones were not to be drawn, unless a grammar had nothing else left
                self.finish_reason = FinishReason.STOP
            elif self.decoder is not None:
                shown += self._matcher.feed(self.decoder.feed(token), may_match=self._may_stop)
                if self._matcher.matched is not None:
                    self.finish_reason = FinishReason.STOP
            if self.constraint is not None and self.constraint.done:  # there is nothing left to say
                self.finish_reason = FinishReason.STOP
            if self.finish_reason is None and self.remaining == 0:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                break
        if self.finish_reason is not None:
            shown += self._flush()
        self.logprobs += logprobs[: len(appended)]
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

    @property
    def _may_stop(self) -> bool:
        """Whether the newest token may complete a stop string."""
        return self.num_output > self.params.min_tokens

    def _flush(self) -> str:
        if self.decoder is None or self._matcher.matched is not None:
            return ""
        return self._matcher.feed(self.decoder.finish(), may_match=self._may_stop) + self._matcher.finish()


@dataclass(frozen=True)
class TokenEvent:
    """What one step did for one request.

    Attributes:
        request: the request; its counts and finish_reason are those after the step.
        tokens: ids appended in this step.
        text: text that became safe to show.
        finish_reason: set in the request's last event.
        logprobs: one per token, if the request asks for them.
    """

    request: Request
    tokens: Sequence[int]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: Sequence[TokenLogprobs] = ()

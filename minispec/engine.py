"""The step loop, single owner of all request, slot, page and KV state.

One step drafts, forwards, verifies and commits for all running slots at once. The engine is single-threaded: whoever
drives it (LLM, the chat, the server's worker thread) calls everything from one thread. It knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from minispec.batch import Span
from minispec.budget import AutoBudget, Budget, FixedBudget
from minispec.constraint import Constraint, Grammars
from minispec.containment import (
    NO_TOKEN,
    Done,
    EngineFailed,
    Failed,
    NotFinite,
    Part,
    Result,
    drawable,
    finite_rows,
    isolate,
    public_message,
    without_tokens,
)
from minispec.costs import StepCost
from minispec.drafters.base import Drafter
from minispec.drafting import Drafting
from minispec.errors import RequestError
from minispec.kv_cache import KVCache, PagePool
from minispec.model.llama import Tapped, Taps
from minispec.request import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from minispec.sampler import Sampler
from minispec.sampling import Noise
from minispec.scheduler import Scheduler, Slot
from minispec.settle import settle
from minispec.stats import EngineStats
from minispec.tree import DraftTree
from minispec.verify import Acceptance

if TYPE_CHECKING:
    from minispec.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What the engine needs of a model: one forward over spans, and its cache."""

    kv: KVCache
    vocab_size: int

    def forward(self, spans: Sequence[Span], *, taps: Taps | None = None) -> Tensor:
        """Write the rows' KV; return the logits of the sampled rows, float32 [samples, vocab_size], good until the next
        forward."""


class Engine:
    """Serves requests from one target model, speculating with one drafter.

    Args:
        runner: the target.
        pool: pages of the target's cache.
        tokenizer: None in tests that speak token ids only.
        drafter: proposes trees.
        noise: keyed noise over the target's vocabulary, shared with the drafter.
        max_slots: requests that run at once.
        max_context: most tokens of one request, prompt and output.
        max_step_tokens: rows of one step.
        tree_budget: nodes, roots included, that a step may verify over all slots.
        step_cost: measured cost that decides how much of the budget pays; None uses the whole budget.
        clock: seconds that drafting and forwards are measured by.
        name: what the model is called in the API.
        description: settings worth showing (device, dtype, …).
        default_params: the model's own sampling defaults.

    Attributes:
        stage: what it is at, or was last: one of ``containment.STAGES``, or ``schedule``.
        on_stage: called with each stage and the requests it is about, before its work is done. What it raises counts as
            raised by the stage; tests inject faults here.
    """

    def __init__(
        self,
        runner: Runner,
        pool: PagePool,
        drafter: Drafter,
        noise: Noise,
        *,
        tokenizer: Tokenizer | None = None,
        max_slots: int = 8,
        max_context: int,
        max_step_tokens: int = 256,
        tree_budget: int = 64,
        step_cost: StepCost | None = None,
        clock: Callable[[], float] = time.perf_counter,
        eos_ids: frozenset[int] = frozenset(),
        name: str = "",
        description: dict[str, Any] | None = None,
        default_params: dict[str, Any] | None = None,
    ) -> None:
        self.runner = runner
        self.pool = pool
        self.max_context = max_context
        self.eos_ids = eos_ids
        self.name = name
        self.description = description or {}
        self.default_params = default_params or {}
        self.stats = EngineStats()
        self.stage = ""
        self.on_stage: Callable[[str, Sequence[Request]], None] | None = None
        self.scheduler = Scheduler(
            pool,
            page_size=runner.kv.page_size,
            max_slots=max_slots,
            max_step_tokens=max_step_tokens,
            max_tree_tokens=tree_budget,
            copy=runner.kv.copy if runner.kv.in_place else None,
        )
        self._clock = clock
        budget = FixedBudget() if step_cost is None else AutoBudget(step_cost)
        self._drafting = Drafting(drafter, budget, self.stats, clock, self._at)
        self._noise = noise
        self._sampler = Sampler(noise)
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, runner.vocab_size, eos_ids) if tokenizer is not None else None
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "this engine was made without a tokenizer"
        return self._tokenizer

    @property
    def drafter(self) -> Drafter:
        """What proposes trees; may be exchanged while no request runs."""
        return self._drafting.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        self._drafting.drafter = drafter

    @property
    def budget(self) -> Budget:
        """What decides how much is drafted; may be exchanged while no request runs."""
        return self._drafting.budget

    @budget.setter
    def budget(self, budget: Budget) -> None:
        self._drafting.budget = budget

    @property
    def drafting_off(self) -> bool:
        """The drafter failed so often that it was switched off."""
        return self._drafting.off

    @property
    def step_cost(self) -> StepCost | None:
        """The current estimate of what a step costs; None under a fixed budget."""
        return self.budget.step_cost

    @property
    def room(self) -> int:
        """Most tokens of one request: the context limit, or the whole page pool if that is smaller."""
        return min(self.max_context, self.pool.total * self.runner.kv.page_size)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def make_request(
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str | None = None, owner: str = ""
    ) -> Request:
        """Check a prompt against the engine's limits and make a request of it. Safe to call from any thread.

        ``max_tokens`` is a cap: where the context has less room, the room ends the request.

        Raises:
            RequestError: the prompt is empty, holds ids outside the vocabulary, or leaves no room to generate; the
                parameters name ids outside it; or the output format cannot be used.
        """
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.runner.vocab_size:
                raise RequestError(
                    f"token ids must be whole numbers from 0 to {self.runner.vocab_size - 1}, not {token!r}",
                    param="prompt",
                )
        if len(prompt) >= self.room:
            limit = (
                f"this model's context limit is {self.max_context} tokens"
                if self.room == self.max_context
                else f"the KV cache holds {self.room} tokens (the context limit is {self.max_context}; "
                "a larger --kv-memory raises what fits)"
            )
            raise RequestError(
                f"{limit}; the prompt has {len(prompt)} tokens and needs room for at least one more. "
                "Shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )
        names = [member.name for member in self.drafter.members]
        if unknown := set(params.speculation.drafters or ()) - set(names):
            raise RequestError(
                f"there is no drafter {min(unknown)!r} here; loaded: {', '.join(names)}",
                param="speculation.drafters",
            )
        params.check_vocabulary(self.runner.vocab_size)
        room = self.room - len(prompt)
        return Request(
            id=request_id or f"req-{next(self._ids)}",
            prompt=tuple(prompt),
            params=params,
            decoder=self._tokenizer.decoder(prompt) if self._tokenizer else None,
            eos_ids=self.eos_ids,
            limit=room if params.max_tokens is None else min(params.max_tokens, room),
            owner=owner,
            constraint=self._constraint(params),
        )

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        if params.output_format is None:
            return None
        assert self._grammars is not None, "without a tokenizer there are no grammars"
        return self._grammars.constraint(params.output_format, ignore_eos=params.ignore_eos)

    def add(self, request: Request) -> None:
        """Queue a request made by ``make_request``."""
        self.scheduler.waiting.append(request)

    def abort(
        self, request: Request, reason: FinishReason = FinishReason.ABORT, error: str | None = None
    ) -> TokenEvent | None:
        """End a request in whatever state it is; its slot and pages come back at once.

        Returns:
            Its last event, or None if it had ended already.
        """
        if request.finished:
            return None
        slot = next((slot for slot in self.scheduler.running if slot.request is request), None)
        if slot is not None:
            self._release(slot, reason)
        elif request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)
        return self._finish(request, reason, error)

    def step(self) -> list[TokenEvent]:
        """Draft, forward, verify and commit once for all slots; returns what each request got.

        What fails in one request, be it by an exception, by logits that are not finite or by lack of memory, ends that
        request with FinishReason.ERROR and touches no other.

        Raises:
            EngineFailed: nothing can be computed any more.
            Exception: the scheduler failed. Nothing may be asked of the engine after either.
        """
        start = self._clock()
        self._at("schedule", ())
        for slot in self.scheduler.admit(self._drafting.reusable):
            if not slot.request.preemptions:
                slot.request.admitted = time.monotonic()
                slot.request.cached_tokens = slot.num_cached
                self.stats.prefix_query_tokens += len(slot.request.prompt)
                self.stats.prefix_hit_tokens += slot.num_cached
            self._drafting.begin(slot)
        plan, max_nodes, preempted = self.scheduler.reserve(self.scheduler.plan())
        for slot in preempted:
            self._drafting.end(slot)
        self.stats.preemptions += len(preempted)
        if plan.empty:
            return []
        parts = [Part(slot, count) for slot, count in plan.chunks]
        parts += [
            Part(slot, 1, tree)
            for slot, tree in zip(plan.decoding, self._drafting.propose(plan, max_nodes), strict=True)
        ]
        parts = [part for part in parts if not part.slot.request.finished]  # aborted while others were drafted for
        forward = -self._clock()
        results = isolate(parts, self._attempt, lambda: self.stage) if parts else []
        failed = [result for result in results if isinstance(result, Failed)]
        forward += self._clock()
        self.stats.steps += 1
        events = [event for result in results if (event := self._advance(result)) is not None]
        for event in events:
            if (reason := event.request.finish_reason) is not None:
                slot = next(slot for slot in self.scheduler.running if slot.request is event.request)
                self._release(slot, reason)
        if parts and not plan.chunks and not failed:  # a prompt's rows cost otherwise, as few of them are sampled
            rows = sum(part.rows for part in parts)
            self.budget.observe(rows, len(plan.decoding), forward, self._clock() - start - forward)
        if failed and len(failed) == len(results):
            self._probe(failed[0])
        return events

    def check(self) -> None:
        """Assert the invariants of slots and pages (DraftTree, Span and Acceptance check themselves when made)."""
        self.scheduler.check()

    def _at(self, stage: str, requests: Sequence[Request]) -> None:
        self.stage = stage
        if self.on_stage is not None:
            self.on_stage(stage, requests)

    def _attempt(self, parts: Sequence[Part]) -> list[Result]:
        """Forward, sample, verify and commit some parts of a step. If it raises, nothing has changed that counts: the
        slots are where they were, and what was written lies behind their committed text."""
        requests = [part.slot.request for part in parts]
        chunks, trees = [part for part in parts if part.tree is None], [part for part in parts if part.tree is not None]
        if chunks:
            self._at("prefill", [part.slot.request for part in chunks])
        if trees:
            self._at("forward", [part.slot.request for part in trees])
        spans = [part.span() for part in parts]
        taps = Taps(self._drafting.taps) if self._drafting.taps else None
        logits = self.runner.forward(spans, taps=taps)
        self._at("sample", requests)
        logits = self._sampler.score_prompts(
            logits, [(part.slot.request, part.slot.num_cached, part.count) for part in chunks]
        )
        beginning = [part.slot.request for part in chunks if part.completes]
        decoding = [(part.slot.request, part.tree) for part in trees if part.tree is not None]
        samples = self._sample(logits, beginning, decoding)
        self._at("commit", requests)
        first_tokens, accepted = settle(
            self.runner.kv,
            samples,
            [tree for _, tree in decoding],
            [(part.slot.pages, part.slot.num_cached) for part in trees],
        )
        logprobs = self._sampler.logprobs(
            logits,
            list(zip(beginning, first_tokens, strict=True)),
            [(*pair, acceptance) for pair, acceptance in zip(decoding, accepted, strict=True)],
        )
        self.stats.forward_rows += sum(part.rows for part in parts)
        if taps is not None:
            row = 0
            for part in parts:
                rows = range(row, row + part.rows)
                row = rows.stop
                if not part.slot.request.finished:
                    self._drafting.observe(part.slot, Tapped(taps, rows))
        first = iter(first_tokens)
        results = [Done(part, Acceptance((0,), (next(first),)) if part.completes else None) for part in chunks]
        results += [Done(part, acceptance) for part, acceptance in zip(trees, accepted, strict=True)]
        return [
            Failed(result.part, "sample", NotFinite("the target's logits are not finite"))
            if result.acceptance is not None and NO_TOKEN in result.acceptance.tokens
            else replace(result, logprobs=own)
            if (own := logprobs.get(result.part.slot.request))
            else result
            for result in results
        ]

    def _sample(
        self, logits: Tensor, first: Sequence[Request], decoding: Sequence[tuple[Request, DraftTree]]
    ) -> Tensor | array[int]:
        """The target's tokens, [samples] int64, with NO_TOKEN after rows without finite logits."""
        if (native := self._noise.native) is not None:
            return self._sampler.natively(native, logits, first, decoding)
        everyone = [*first, *(request for request, _ in decoding)]
        if logits.device.type == "cpu" and all(request.params.greedy for request in everyone):
            samples = self._sampler(logits, first, decoding)
            # of a row with NaN or infinities one of those is taken, so only the logits taken need a look
            return without_tokens(samples, logits.gather(-1, samples[:, None])[:, 0].isfinite())
        finite = finite_rows(logits)
        return without_tokens(self._sampler(drawable(logits, finite), first, decoding), finite)

    def _advance(self, result: Result) -> TokenEvent | None:
        """Append what a part emits; None if it emits nothing yet."""
        slot, tree = result.part.slot, result.part.tree
        request = slot.request
        if request.finished:  # ended from outside in the middle of the step
            return None
        if isinstance(result, Failed):
            return self._fail(request, result.stage, result.error)
        if tree is None:
            slot.num_cached += result.part.count
            self.scheduler.remember(slot)
            if result.acceptance is None:
                return None
            return self._append(request, result.acceptance.tokens, result.logprobs)
        acceptance = result.acceptance
        assert acceptance is not None
        event = self._append(request, acceptance.tokens, result.logprobs)
        emitted = len(event.tokens)
        # drafts behind the cut are not part of the text; the bonus token is no draft
        kept = acceptance.path[1 : emitted + 1]
        sources = self._drafting.sources(slot, tree)
        self.stats.count(tree, sources, kept, truncated=emitted < len(acceptance.tokens))
        request.speculation.count(drafted=len(tree) - 1, accepted=len(kept), emitted=emitted)
        request.record(tree, acceptance, emitted)
        slot.num_cached += emitted
        self.scheduler.remember(slot)
        if not request.finished:
            self._drafting.accept(slot, tree, acceptance)
        return event

    def _append(self, request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> TokenEvent:
        if request.first_token is None:
            request.first_token = time.monotonic()
            self.stats.prompt_tokens += len(request.prompt)
        before = request.num_output
        try:
            self._at("detokenise", [request])
            appended, text = request.append(tokens, logprobs)
        except Exception as error:
            self.stats.generated_tokens += request.num_output - before
            request.finish_reason = None  # nobody has heard of an end yet
            return self._fail(request, "detokenise", error)
        self.stats.generated_tokens += len(appended)
        if request.finish_reason is not None:
            self.stats.finished[request.finish_reason.value] += 1
        return TokenEvent(request, appended, text, request.finish_reason, logprobs[: len(appended)])

    def _fail(self, request: Request, stage: str, error: Exception) -> TokenEvent:
        """End a request that cannot be gone on with. Its slot is still to be released."""
        self.stats.errors[stage] += 1
        logger.error("request %s ended with an error in %s", request.id, stage, exc_info=error)
        return self._finish(request, FinishReason.ERROR, public_message(stage, error))

    def _finish(self, request: Request, reason: FinishReason, error: str | None) -> TokenEvent:
        tail = ""
        with contextlib.suppress(Exception):  # the text held back may be what could not be decoded
            tail = request.end(reason, error)
        self.stats.finished[reason.value] += 1
        return TokenEvent(request, (), tail, reason)

    def _probe(self, failed: Failed) -> None:
        """Every request of a step has failed: is it the requests, or can nothing be computed any more?

        Raises:
            EngineFailed: the latter.
        """
        self._at("forward", ())
        if not self.pool.available:
            return
        page = self.pool.allocate(1)
        try:
            logits = self.runner.forward([Span.chunk([0], page, 0, sample_last=True)])
            healthy = bool(finite_rows(logits).all())
        except Exception as error:
            raise EngineFailed(f"the target computes nothing any more: {type(error).__name__}: {error}") from error
        finally:
            self.pool.release(page)
        if not healthy:
            raise EngineFailed("the target's logits are not finite any more, whatever the text") from failed.error

    def _release(self, slot: Slot, reason: FinishReason) -> None:
        self._drafting.end(slot)
        self.scheduler.release(slot, sound=reason is not FinishReason.ERROR)

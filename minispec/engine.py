"""The step loop, single owner of all request, slot, page and KV state.

One step drafts, forwards, verifies and commits for all running slots at once. The engine is single-threaded: whoever
drives it (LLM, the chat, the server's worker thread) calls everything from one thread. It knows nothing of HTTP.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from minispec.batch import Span
from minispec.budget import AutoBudget, Budget, FixedBudget, Prefill
from minispec.costs import StepCost
from minispec.drafters.base import Drafter
from minispec.errors import RequestError
from minispec.kv_cache import KVCache, PagePool
from minispec.model.llama import Taps
from minispec.request import FinishReason, Request, SamplingParams, TokenEvent
from minispec.sampler import Sampler
from minispec.sampling import Noise
from minispec.scheduler import Scheduler, Slot, StepPlan
from minispec.settle import settle
from minispec.tree import DraftTree
from minispec.verify import Acceptance

if TYPE_CHECKING:
    from minispec.tokenizer import Tokenizer


class Runner(Protocol):
    """What the engine needs of a model: one forward over spans, and its cache."""

    kv: KVCache
    vocab_size: int

    def forward(self, spans: Sequence[Span], *, taps: Taps | None = None) -> Tensor:
        """Write the rows' KV; return the logits of the sampled rows, float32 [samples, vocab_size]."""


@dataclass
class DrafterCounts:
    """Counters of one drafter; a node that two drafters proposed counts for both.

    Attributes:
        steps: verifications of a tree that held nodes of it.
        drafted, accepted: depth in the tree → its nodes verified, and those that became text.
    """

    steps: int = 0
    drafted: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)


@dataclass
class EngineStats:
    """Counters since start; they only grow.

    Attributes:
        steps: steps that ran a forward.
        forward_rows: rows computed by the target.
        prompt_tokens: prompt tokens of requests that produced a first token.
        generated_tokens: tokens appended.
        finished: requests by finish reason.
        preemptions: slots taken back for want of pages.
        verifications: trees verified.
        drafted, accepted: draft nodes verified, and those that became text.
        drafters: the same by drafter and depth.
    """

    steps: int = 0
    forward_rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    preemptions: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    drafters: dict[str, DrafterCounts] = field(default_factory=dict)

    def count(self, tree: DraftTree, sources: Sequence[Sequence[str]], accepted: Collection[int]) -> None:
        """Count a verified tree whose nodes ``accepted`` became text."""
        self.verifications += 1
        self.drafted += len(tree) - 1
        self.accepted += len(accepted)
        for name in {name for own in sources[1:] for name in own}:
            counts = self.drafters.setdefault(name, DrafterCounts())
            counts.steps += 1
            for node in range(1, len(tree)):
                if name in sources[node]:
                    depth = tree.depth[node]
                    # drafted first: whoever reads from another thread, accepted first, never sees more of those
                    counts.drafted[depth] = counts.drafted.get(depth, 0) + 1
                    counts.accepted[depth] = counts.accepted.get(depth, 0) + (node in accepted)


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
        self.drafter = drafter
        self.max_context = max_context
        self.eos_ids = eos_ids
        self.name = name
        self.description = description or {}
        self.default_params = default_params or {}
        self.budget: Budget = FixedBudget() if step_cost is None else AutoBudget(step_cost)
        self.stats = EngineStats()
        self.scheduler = Scheduler(
            pool,
            page_size=runner.kv.page_size,
            max_slots=max_slots,
            max_step_tokens=max_step_tokens,
            max_tree_tokens=tree_budget,
        )
        self._clock = clock
        self._sampler = Sampler(noise)
        self._tokenizer = tokenizer
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "this engine was made without a tokenizer"
        return self._tokenizer

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
            RequestError: the prompt is empty, holds ids outside the vocabulary, or leaves no room to generate.
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
        room = self.room - len(prompt)
        return Request(
            id=request_id or f"req-{next(self._ids)}",
            prompt=tuple(prompt),
            params=params,
            decoder=self._tokenizer.decoder(prompt) if self._tokenizer else None,
            eos_ids=self.eos_ids,
            limit=room if params.max_tokens is None else min(params.max_tokens, room),
            owner=owner,
        )

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
            self._release(slot)
        elif request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)
        tail = request.end(reason, error)
        self.stats.finished[reason.value] += 1
        return TokenEvent(request, (), tail, reason)

    def step(self) -> list[TokenEvent]:
        """Draft, forward, verify and commit once for all slots; returns what each request got."""
        for slot in self.scheduler.admit():
            self.drafter.begin(slot)
        plan, max_nodes, preempted = self.scheduler.reserve(self.scheduler.plan())
        for slot in preempted:
            self._end_draft(slot)
        self.stats.preemptions += len(preempted)
        if plan.empty:
            return []
        trees = self._draft(plan, max_nodes)

        spans = [
            Span.chunk(
                slot.request.tokens[slot.num_cached : slot.num_cached + count],
                slot.pages,
                slot.num_cached,
                sample_last=count == slot.num_pending,
            )
            for slot, count in plan.chunks
        ]
        spans += [Span.tree(tree, slot.pages, slot.num_cached) for slot, tree in zip(plan.decoding, trees, strict=True)]
        begin = self._clock()
        taps = Taps(self.drafter.taps) if self.drafter.taps else None
        logits = self.runner.forward(spans, taps=taps)
        if taps is not None:
            self._observe(plan, spans, taps.features)
        first = [slot.request for slot, count in plan.chunks if count == slot.num_pending]
        decoding = [(slot.request, tree) for slot, tree in zip(plan.decoding, trees, strict=True)]
        samples = self._sampler(logits, first, decoding)
        places = [(slot.pages, slot.num_cached) for slot in plan.decoding]
        first_tokens, accepted = settle(self.runner.kv, samples, trees, places)
        self.stats.steps += 1
        rows = sum(len(span.tokens) for span in spans)
        self.stats.forward_rows += rows
        if not plan.chunks:  # a prompt's rows cost otherwise, as few of them are sampled
            self.budget.observe(rows, len(plan.decoding), self._clock() - begin)
        return self._advance(plan, trees, first_tokens, accepted)

    def check(self) -> None:
        """Assert the invariants of slots and pages (DraftTree, Span and Acceptance check themselves when made)."""
        self.scheduler.check()

    def _draft(self, plan: StepPlan, max_nodes: Sequence[int]) -> list[DraftTree]:
        """A tree per decoding slot, cut to the nodes that pay."""
        slots = plan.decoding
        prefill = Prefill(rows=sum(count for _, count in plan.chunks), tokens=len(plan.chunks))
        wanted = [self._wanted(slot, count) for slot, count in zip(slots, max_nodes, strict=True)]
        limits = self.budget.limits(self.drafter, slots, wanted, prefill)
        drafting = [(slot, count) for slot, count in zip(slots, limits, strict=True) if count > 1]
        if not drafting:
            return [DraftTree.root(slot.request.tokens[-1]) for slot in slots]
        begin = self._clock()
        proposed = dict(
            zip((slot for slot, _ in drafting), self.drafter.propose(*zip(*drafting, strict=True)), strict=True)
        )
        deepest = max(max(tree.depth) for tree in proposed.values())
        self.budget.drafted(self.drafter, len(drafting), deepest, self._clock() - begin)
        trees = [
            # a walk of depth d emits d + 1 tokens: deeper nodes than that could never be used
            proposed[slot].best(count, max_depth=slot.request.remaining - 1)
            if slot in proposed
            else DraftTree.root(slot.request.tokens[-1])
            for slot, count in zip(slots, limits, strict=True)
        ]
        return self.budget.cut(self.drafter, slots, trees, plan.tree_budget, prefill)

    def _wanted(self, slot: Slot, count: int) -> int:
        """Most nodes of a slot's tree, of the ``count`` it has room for, as its request wishes."""
        if not any(slot.request.may_draft(member.name) for member in self.drafter.members):
            return 1
        return min(count, slot.request.params.speculation.max_nodes or count)

    def _observe(self, plan: StepPlan, spans: Sequence[Span], features: Tensor) -> None:
        """Hand the drafter each slot's rows of the tapped hidden states."""
        slots = [slot for slot, _ in plan.chunks] + list(plan.decoding)
        rows = features.split([len(span.tokens) for span in spans])
        for slot, own in zip(slots, rows, strict=True):
            self.drafter.observe(slot, own)

    def _advance(
        self,
        plan: StepPlan,
        trees: Sequence[DraftTree],
        first_tokens: Sequence[int],
        accepted: Sequence[Acceptance],
    ) -> list[TokenEvent]:
        """Append what the step emits; release the slots whose requests ended."""
        events: list[TokenEvent] = []
        first = iter(first_tokens)
        for slot, count in plan.chunks:
            complete = count == slot.num_pending
            slot.num_cached += count
            if complete:
                events.append(self._append(slot, [next(first)]))

        for slot, tree, acceptance in zip(plan.decoding, trees, accepted, strict=True):
            request = slot.request
            event = self._append(slot, acceptance.tokens)
            emitted = len(event.tokens)
            # drafts behind the cut are not part of the text; the bonus token is no draft
            kept = acceptance.path[1 : emitted + 1]
            sources = self.drafter.sources(slot, tree)
            self.stats.count(tree, sources, kept)
            request.speculation.count(drafted=len(tree) - 1, accepted=len(kept), emitted=emitted)
            request.record(tree, acceptance, emitted)
            if not request.finished:
                self.budget.learn(slot, tree, sources, acceptance)
                slot.num_cached += emitted
                self.drafter.accept(slot, tree, acceptance)
            events.append(event)
        for event in events:
            if event.request.finished:
                self._release(next(slot for slot in self.scheduler.running if slot.request is event.request))
        return events

    def _append(self, slot: Slot, tokens: Sequence[int]) -> TokenEvent:
        request = slot.request
        if request.first_token is None:
            request.first_token = time.monotonic()
            self.stats.prompt_tokens += len(request.prompt)
        appended, text = request.append(tokens)
        self.stats.generated_tokens += len(appended)
        if request.finish_reason is not None:
            self.stats.finished[request.finish_reason.value] += 1
        return TokenEvent(request, appended, text, request.finish_reason)

    def _release(self, slot: Slot) -> None:
        self._end_draft(slot)
        self.scheduler.release(slot)

    def _end_draft(self, slot: Slot) -> None:
        self.drafter.end(slot)
        self.budget.end(slot)

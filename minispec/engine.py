"""The step loop, single owner of all request, slot, page and KV state.

One step drafts, forwards, verifies and commits for all running slots at once. The engine is single-threaded: whoever
drives it (LLM, the chat, the server's worker thread) calls everything from one thread. It knows nothing of HTTP.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from minispec import kernels
from minispec.batch import Span
from minispec.budget import StepCost, allot
from minispec.drafters.base import Drafter
from minispec.errors import RequestError
from minispec.kv_cache import KVCache, PagePool
from minispec.model.llama import Taps
from minispec.request import FinishReason, Request, SamplingParams, TokenEvent
from minispec.sampling import Noise, SamplingBatch
from minispec.scheduler import Scheduler, Slot, StepPlan
from minispec.tokenizer import Tokenizer
from minispec.tree import DraftTree
from minispec.verify import verify


class Runner(Protocol):
    """What the engine needs of a model: one forward over spans, and its cache."""

    kv: KVCache
    vocab_size: int

    def forward(self, spans: Sequence[Span], *, taps: Taps | None = None) -> Tensor:
        """Write the rows' KV; return the logits of the sampled rows, float32 [samples, vocab_size]."""


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
        self.step_cost = step_cost
        self.stats = EngineStats()
        self.scheduler = Scheduler(
            pool,
            page_size=runner.kv.page_size,
            max_slots=max_slots,
            max_step_tokens=max_step_tokens,
            max_tree_tokens=tree_budget,
        )
        self._noise = noise
        self._tokenizer = tokenizer
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "this engine was made without a tokenizer"
        return self._tokenizer

    @property
    def room(self) -> int:
        """Most tokens of one request: the context limit, or the whole page pool if that is smaller."""
        return min(self.max_context, self.pool.total * self.runner.kv.page_size)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def make_request(self, prompt: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Request:
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
        room = self.room - len(prompt)
        return Request(
            id=request_id or f"req-{next(self._ids)}",
            prompt=tuple(prompt),
            params=params,
            decoder=self._tokenizer.decoder(prompt) if self._tokenizer else None,
            eos_ids=self.eos_ids,
            limit=room if params.max_tokens is None else min(params.max_tokens, room),
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
            self.drafter.end(slot)
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
        taps = Taps(self.drafter.taps) if self.drafter.taps else None
        logits = self.runner.forward(spans, taps=taps)
        if taps is not None:
            self._observe(plan, spans, taps.features)
        samples = self._sample(logits, plan, trees)
        self.stats.steps += 1
        self.stats.forward_rows += sum(len(span.tokens) for span in spans)
        return self._advance(plan, trees, samples)

    def check(self) -> None:
        """Assert the invariants of slots and pages (DraftTree, Span and Acceptance check themselves when made)."""
        self.scheduler.check()

    def _draft(self, plan: StepPlan, max_nodes: Sequence[int]) -> list[DraftTree]:
        """A tree per decoding slot, cut to the nodes that pay."""
        drafting = [(slot, count) for slot, count in zip(plan.decoding, max_nodes, strict=True) if count > 1]
        proposed: dict[Slot, DraftTree] = {}
        if drafting:
            slots, counts = zip(*drafting, strict=True)
            proposed = {
                # a walk of depth d emits d + 1 tokens: deeper nodes than that could never be used
                slot: tree.best(count, max_depth=slot.request.remaining - 1)
                for slot, count, tree in zip(slots, counts, self.drafter.propose(slots, counts), strict=True)
            }
        trees = [proposed.get(slot) or DraftTree.root(slot.request.tokens[-1]) for slot in plan.decoding]
        return allot(trees, plan.tree_budget, self.step_cost, other_rows=sum(count for _, count in plan.chunks))

    def _observe(self, plan: StepPlan, spans: Sequence[Span], features: Tensor) -> None:
        """Hand the drafter each slot's rows of the tapped hidden states."""
        slots = [slot for slot, _ in plan.chunks] + list(plan.decoding)
        rows = features.split([len(span.tokens) for span in spans])
        for slot, own in zip(slots, rows, strict=True):
            self.drafter.observe(slot, own)

    def _sample(self, logits: Tensor, plan: StepPlan, trees: Sequence[DraftTree]) -> list[int]:
        """The target's token after each sampled row: the chunks that end their prompt, then every node."""
        rows = [(slot.request, len(slot.request.tokens)) for slot, count in plan.chunks if count == slot.num_pending]
        for slot, tree in zip(plan.decoding, trees, strict=True):
            rows += [(slot.request, len(slot.request.tokens) + depth) for depth in tree.depth]
        if not rows:
            return []
        tokens: list[int] = kernels.sample(logits, SamplingBatch.build(rows, logits.device), self._noise).tolist()
        return tokens

    def _advance(self, plan: StepPlan, trees: Sequence[DraftTree], samples: Sequence[int]) -> list[TokenEvent]:
        """Verify, commit, append; release the slots whose requests ended."""
        events: list[TokenEvent] = []
        sampled = iter(samples)
        for slot, count in plan.chunks:
            complete = count == slot.num_pending
            slot.num_cached += count
            if complete:
                events.append(self._append(slot, [next(sampled)]))

        commits = []
        for slot, tree in zip(plan.decoding, trees, strict=True):
            request = slot.request
            acceptance = verify(tree, list(itertools.islice(sampled, len(tree))))
            event = self._append(slot, acceptance.tokens)
            emitted = len(event.tokens)
            # drafts behind the cut are not part of the text; the bonus token is no draft
            accepted = min(emitted, len(acceptance.path) - 1)
            for counts in (request.speculation, self.stats):
                counts.drafted += len(tree) - 1
                counts.accepted += accepted
            request.speculation.steps += 1
            request.speculation.emitted += emitted
            self.stats.verifications += 1
            if not request.finished:
                commits.append((slot.pages, slot.num_cached, acceptance.path))
                slot.num_cached += emitted
                self.drafter.accept(slot, tree, acceptance)
            events.append(event)
        self.runner.kv.commit(commits)
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
        self.drafter.end(slot)
        self.scheduler.release(slot)

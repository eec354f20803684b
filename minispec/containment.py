"""A fault in one request ends that request and nobody else's.

A step that fails is tried again in halves until the requests that cannot be computed stand alone. That is safe because
an attempt leaves nothing behind: no ``num_cached`` has moved, and KV past it is dead until it is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minispec.batch import Span
from minispec.errors import MinispecError
from minispec.request import TokenLogprobs
from minispec.scheduler import Slot
from minispec.tree import DraftTree
from minispec.verify import Acceptance

STAGES = ("draft", "prefill", "forward", "sample", "commit", "detokenise", "listener")
"""Where a fault can come from: the parts of a step in their order, and whoever is told of its tokens."""

NO_TOKEN = -1
"""Stands for the target's token after a row whose logits are not finite; no tree has such a child."""


class NotFinite(ArithmeticError):
    """The target's logits are NaN or infinite."""


class EngineFailed(MinispecError):
    """Nothing can be computed any more; the process has to be started anew."""


@dataclass(frozen=True)
class Part:
    """One slot's share of a step.

    Attributes:
        count: tokens of a prefill chunk; 1 for a tree, whose root is the one token pending.
        tree: what is verified, None for a chunk.
    """

    slot: Slot
    count: int
    tree: DraftTree | None = None

    @property
    def rows(self) -> int:
        return self.count if self.tree is None else len(self.tree)

    @property
    def completes(self) -> bool:
        """A chunk after which nothing is pending: its last row gives the request's first token."""
        return self.tree is None and self.count == self.slot.num_pending

    def span(self) -> Span:
        slot = self.slot
        if self.tree is not None:
            return Span.tree(self.tree, slot.pages, slot.num_cached)
        tokens = slot.request.tokens[slot.num_cached : slot.num_cached + self.count]
        return Span.chunk(
            tokens,
            slot.pages,
            slot.num_cached,
            sample_last=self.completes,
            sample_all=slot.request.wants_prompt_logprobs,
        )

    def smaller(self, error: Exception) -> Part | None:
        """What to try instead: a tree without its drafts, half a chunk where memory was short; None if nothing."""
        if self.tree is not None and len(self.tree) > 1:
            return replace(self, tree=DraftTree.root(self.tree.tokens[0]))
        if self.tree is None and self.count > 1 and is_out_of_memory(error):
            return replace(self, count=self.count // 2)
        return None


@dataclass(frozen=True)
class Done:
    """A part that was computed. ``acceptance`` is None for a chunk that leaves tokens pending; ``logprobs`` has one for
    each of its tokens, where the request wants them."""

    part: Part
    acceptance: Acceptance | None
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True)
class Failed:
    """A part that cannot be computed, and the stage in which it failed."""

    part: Part
    stage: str
    error: Exception


Result = Done | Failed


def isolate(
    parts: Sequence[Part], attempt: Callable[[Sequence[Part]], list[Result]], stage: Callable[[], str]
) -> list[Result]:
    """Compute ``parts`` together; where that fails, by halves, down to single parts and smaller ones.

    Args:
        attempt: computes parts in one go and changes nothing if it raises.
        stage: where the attempt was when it raised.

    Returns:
        One result per part, in order.
    """
    try:
        return attempt(parts)
    except Exception as error:
        if len(parts) > 1:
            half = len(parts) // 2
            return isolate(parts[:half], attempt, stage) + isolate(parts[half:], attempt, stage)
        smaller = parts[0].smaller(error)
        if smaller is not None:
            return isolate([smaller], attempt, stage)
        return [Failed(parts[0], stage(), error)]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the host (where torch says so in words only)."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def public_message(stage: str, error: Exception) -> str:
    """What a client is told; the details are the log's."""
    if is_out_of_memory(error):
        return "There was not enough memory to compute this request; try a shorter one, or later."
    if isinstance(error, NotFinite):
        return "The model's logits are not finite (NaN or infinity) after this text; no token can be drawn from them."
    return f"This request failed in {stage} ({type(error).__name__}); the server's log has the details."


def finite_rows(logits: Tensor) -> Tensor:
    """[rows] bool: no logit is NaN or +inf, and some are not -inf. ``logits`` is [rows, vocab]; the maximum tells."""
    return logits.amax(-1).isfinite()


def drawable(logits: Tensor, finite: Tensor) -> Tensor:
    """``logits`` with zeros in the rows that are not ``finite``, so that something can be drawn from each."""
    if not logits.is_cuda and bool(finite.all()):  # a GPU's answer would have to be waited for
        return logits
    return logits.where(finite[:, None], 0.0)


def without_tokens(samples: Tensor, finite: Tensor) -> Tensor:
    """``samples`` [rows] with NO_TOKEN where the row was not finite."""
    return samples.where(finite, NO_TOKEN)

"""A draft model with another tokenizer: drafting over the strings that both vocabularies have.

Token-level intersection, as in universal assisted generation (Timor et al. 2025, arXiv 2502.05202): the draft's
probabilities are restricted to tokens that the target spells too, and these are proposed under the target's ids. The
target's text reaches the draft token by token: shared strings one to one, others cut into tokens of the draft. So every
tree node is one token on both sides, and the draft's KV of accepted nodes is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from minispec import kernels
from minispec.batch import Span
from minispec.drafters.draft_model import DraftModelDrafter, DraftState
from minispec.drafters.grow import Growth
from minispec.errors import ModelError
from minispec.kv_cache import PagePool
from minispec.runner import ModelRunner
from minispec.sampling import Noise, SamplingBatch
from minispec.scheduler import Slot
from minispec.tokenizer import Tokenizer

MIN_OVERLAP = 0.5
"""Least share of the target's vocabulary that a draft must know."""
_SAME = 0.99
_ZIPF = 1000

Key = tuple[bytes, bool]
"""What a token stands for: its spelling, and whether it is a control token."""


class Translation:
    """From a target's vocabulary to a draft's.

    Attributes:
        pairs: (target id, draft id) of every string that both spell. Where a vocabulary spells a string twice, as with
            byte-fallback tokens, the last id counts, which is the piece and not the byte.
        overlap: share of the target's text tokens that the draft knows. Vocabularies are more or less in order of
            frequency, so that, by Zipf's law, id i counts 1 / (i + 1000).
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target = target
        self._draft = draft
        self._known = _keys(draft)
        mine = _keys(target)
        self.pairs = sorted((i, self._known[key]) for key, i in mine.items() if key in self._known)
        text = {i: (key in self._known) / (i + _ZIPF) for key, i in mine.items() if not key[1]}
        self.overlap = sum(text.values()) / max(sum(1 / (i + _ZIPF) for i in text), 1e-9)
        self._encoded: dict[int, tuple[int, ...]] = {}

    def encode(self, token: int) -> tuple[int, ...]:
        """The draft's ids for one token of the target, at least one: the same string, or else the fewest that spell it.

        Bytes that the draft cannot spell are left out; a token of which nothing is left becomes the draft's id 0, which
        makes for worse drafts and does no other harm.
        """
        if token not in self._encoded:
            spelling = self._target.spelling(token)
            same = self._known.get((spelling, token in self._target.special_ids))
            self._encoded[token] = (same,) if same is not None else self._cut(spelling) or (0,)
        return self._encoded[token]

    def _cut(self, spelling: bytes) -> tuple[int, ...]:
        """The fewest text tokens of the draft that spell these bytes, longer ones first."""
        best: list[tuple[int, ...]] = [()] * (len(spelling) + 1)  # by how many bytes have been spelt from the end
        for rest in range(1, len(spelling) + 1):
            start = len(spelling) - rest
            ways = [
                (self._known[piece], *best[rest - length])
                for length in range(min(rest, self._longest), 0, -1)
                if (piece := (spelling[start : start + length], False)) in self._known
            ]
            best[rest] = min(ways, key=len) if ways else best[rest - 1]
        return best[-1]

    @cached_property
    def _longest(self) -> int:
        return max(len(spelling) for spelling, _ in self._known)


def relate(target: Tokenizer, draft: Tokenizer, name: str) -> Translation | None:
    """How a draft's vocabulary relates to the target's: None if ids mean the same, as far as both have them.

    A draft may lack or add ids at the end (padding, extra specials). One that spells nearly all ids as the target does,
    but not all, is taken to be damaged or of another version, and refused: its drafts would be subtly wrong.

    Args:
        name: of the draft, for messages.

    Raises:
        ModelError: the vocabularies differ in few ids, or have too few strings in common.
    """
    first = target.first_difference(draft)
    if first is None:
        return None
    common = min(target.vocab_size, draft.vocab_size)
    same = sum(target.spelling(i) == draft.spelling(i) for i in range(common))
    if same >= _SAME * common:
        raise ModelError(
            f"the draft {name} has another vocabulary than the target: token {first} is {draft.spelling(first)!r} "
            f"there and {target.spelling(first)!r} here, while {same} of {common} ids agree. Fetch the draft that goes "
            "with the target, or use --draft ngram."
        )
    translation = Translation(target, draft)
    if translation.overlap < MIN_OVERLAP:
        raise ModelError(
            f"the draft {name} has another tokenizer than the target and knows {translation.overlap:.1%} of the "
            f"target's tokens, weighted by frequency; at least {MIN_OVERLAP:.0%} are needed. Choose a draft of the "
            "same family, or --draft ngram."
        )
    return translation


@dataclass
class _State(DraftState):
    """As of any draft model, and the text in the draft's ids.

    Attributes:
        text: what the first ``translated`` tokens of the request become.
    """

    text: list[int] = field(default_factory=list)
    translated: int = 0


class TranslatingDrafter(DraftModelDrafter):
    """A draft model that speaks another vocabulary than the target. Trees hold the target's ids throughout.

    Args:
        name, runner, pool, noise, shape: see ``DraftModelDrafter``; ``noise`` is over the target's vocabulary.
        translation: between the two.
    """

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        pool: PagePool,
        noise: Noise,
        translation: Translation,
        **shape: int,
    ) -> None:
        super().__init__(name, runner, pool, noise, **shape)
        self._translation = translation
        # a head may have fewer rows than its tokenizer has ids
        pairs = [(t, d) for t, d in translation.pairs if t < noise.vocab_size and d < runner.vocab_size]
        # both [pairs] int64
        self._target_ids, self._draft_ids = torch.tensor(pairs, device=runner.kv.k.device).unbind(-1)
        self._choices = len(pairs)
        self._children = min(self._children, self._choices)

    def _new_state(self) -> _State:
        return _State()

    def _text(self, slot: Slot) -> Sequence[int]:
        state, tokens = self._states[slot], slot.request.tokens
        assert isinstance(state, _State)
        for token in tokens[state.translated :]:
            state.text += self._translation.encode(token)
        state.translated = len(tokens)
        return state.text

    def _span(self, growth: Growth, pages: Sequence[int], num_cached: int) -> Span:
        span = super()._span(growth, pages, num_cached)
        return replace(span, tokens=[self._translation.encode(token)[0] for token in span.tokens])

    def _best_children(self, logits: Tensor, sampling: SamplingBatch) -> tuple[Tensor, Tensor]:
        # the noise belongs to the target's ids, so the logits move there; what the draft cannot say has no weight
        wide = logits.new_full((len(logits), self.noise.vocab_size), float("-inf"))
        wide[:, self._target_ids] = logits[:, self._draft_ids]
        return kernels.top_children(wide, sampling, self.noise, self._children)


def _keys(tokenizer: Tokenizer) -> dict[Key, int]:
    """What each id stands for; ids that stand for nothing are left out."""
    special = tokenizer.special_ids
    keys = {(tokenizer.spelling(i), i in special): i for i in range(tokenizer.vocab_size)}
    return {key: i for key, i in keys.items() if key[0]}

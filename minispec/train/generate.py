"""The target writes its own training text: a user turn, then the answer to it, many at once through the engine.

Self-distillation: what a head must imitate is the target on text of the kind that the target is asked for, and that
text it can write itself. The hidden states that the head reads are recorded while the answers are written.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minispec.drafters.base import BaseDrafter
from minispec.engine import Engine
from minispec.errors import RequestError
from minispec.kv_cache import PagePool
from minispec.model.llama import Tapped
from minispec.request import Request, SamplingParams
from minispec.sampling import Noise
from minispec.scheduler import Slot
from minispec.tokenizer import Tokenizer
from minispec.train.prompts import Opening
from minispec.train.shards import ANSWER, GIVEN, WRITTEN, Sample
from minispec.train.target import Target

_PAGE = 16
_ROWS = 384
"""Prompt rows of a step, beside one row per running request."""
_MAX_PROMPT = 384
"""Longest conversation before its answer, in tokens."""
ANSWERS = ((0.75, 128), (0.9, 192), (1.0, 256))
"""Cumulative share of answers, and the tokens they are cut at: mostly beginnings, where most requests end."""
_LEAST = 8
"""Tokens from which on an answer that is cut off is kept."""
SAMPLED = 0.45
"""Share of the user turns that are answered a second time, at a temperature of 0.7 or 1; the first time it is 0."""


class Recorder(BaseDrafter):
    """Drafts nothing; keeps the tapped hidden states of all requests until they are dropped.

    Attributes:
        taps: see ``Drafter.taps``.
        before: request → one whose text begins alike, whose hidden states serve for what the prefix cache has of it.
    """

    name = "recorder"

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self.before: dict[Request, Request] = {}
        self._rows: dict[Request, list[Tensor]] = {}

    def rows(self, request: Request) -> Tensor:
        """[tokens but the last, taps * hidden] bfloat16, of a request between steps."""
        return torch.cat(self._rows[request])[: len(request.tokens) - 1]

    def drop(self, request: Request) -> None:
        """Forget a request."""
        self._rows.pop(request, None)
        self.before.pop(request, None)

    def reusable(self, request: Request, positions: int) -> int:
        earlier = self.before.get(request)
        if earlier is None:
            return 0
        return min(positions, len(earlier.tokens) - 1, _common(earlier.tokens, request.tokens))

    def begin(self, slot: Slot) -> None:
        known = [self.rows(self.before[slot.request])[: slot.num_cached]] if slot.num_cached else []
        self._rows[slot.request] = known

    def observe(self, slot: Slot, tapped: Tapped) -> None:
        # a copy of its own: the step's tensor holds everybody's rows
        self._rows[slot.request].append(tapped.features.to("cpu", torch.bfloat16, copy=True))


class PooledNoise(Noise):
    """Gumbel noise cut out of one pool at places that depend on (seed, position).

    Keyed noise costs as much as the forward where a hundred requests are sampled at once on a CPU. Rows from the pool
    overlap each other, which no longer is an exact draw for every pair of them; for training text that does not matter.
    """

    _SIZE = 1 << 23

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        super().__init__(vocab_size, device)
        generator = torch.Generator().manual_seed(0)
        uniform = torch.rand(self._SIZE + vocab_size, generator=generator).clamp(1e-10, 1 - 1e-7)
        self._pool = -torch.log(-torch.log(uniform)).to(device)

    def rows(self, keys: Sequence[tuple[int, int]]) -> Tensor:
        # hashes of whole numbers, and of tuples of them, are the same in every process
        starts = [hash((seed, position, 0x5EED)) % self._SIZE for seed, position in keys]
        return torch.stack([self._pool[start : start + self.vocab_size] for start in starts])


@dataclass
class _Conversation:
    """A conversation under way.

    Attributes:
        prefix: the user turn as far as it is given.
        user: the whole of it, once it is written.
        last: the request that ended last.
        samples: what is done.
    """

    index: int
    opening: Opening
    prefix: list[int]
    user: str | None = None
    last: Request | None = None
    samples: list[Sample] = field(default_factory=list)


class Generator:
    """Writes conversations with one target.

    Attributes:
        written: tokens so far, those of conversations that are not complete included.

    Args:
        target: the model.
        tokenizer: its tokenizer, with a chat template.
        taps: the hidden states to record.
        seed: of everything that is drawn.
        slots: conversations written at once.
    """

    def __init__(
        self, target: Target, tokenizer: Tokenizer, taps: tuple[int, ...], *, seed: int, slots: int = 128
    ) -> None:
        longest = _MAX_PROMPT + ANSWERS[-1][1]
        context = min(longest, target.model.config.max_position)
        pages = slots * -(-context // _PAGE)
        runner = target.runner(pages=pages, page_size=_PAGE, max_context=context)
        self.written = 0
        self._recorder = Recorder(taps)
        self._tokenizer = tokenizer
        self._seed = seed
        self._context = context
        self._engine = Engine(
            runner,
            PagePool(pages, _PAGE),
            self._recorder,
            PooledNoise(runner.vocab_size, runner.device),
            tokenizer=tokenizer,
            max_slots=slots,
            max_context=context,
            max_step_tokens=_ROWS + slots,
            tree_budget=slots,
            eos_ids=tokenizer.eos_ids,
        )

    def stream(
        self,
        openings: Iterable[tuple[int, Opening]],
        tick: Callable[[], None] = lambda: None,
        enough: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, list[Sample]]]:
        """Write conversations, always as many at once as there are slots.

        What is written depends on the number of the conversation, its opening and the seed, and on nothing else but
        rounding. Closing the iterator drops those that are under way.

        Args:
            openings: numbers of the conversations and how they begin.
            tick: called before every step; may raise.
            enough: asked before every step; once it is true, what is under way is given as far as it goes, and that is
                all. Half an answer is as good to learn from as a whole one.

        Yields:
            (number, samples), as conversations end: one per answer; none where the opening leaves no room for one.
        """
        pending, running = iter(openings), dict[Request, _Conversation]()
        try:
            while True:
                while len(running) < self._engine.scheduler.max_slots and (begun := next(pending, None)) is not None:
                    conversation = self._begin(*begun)
                    if not self._advance(conversation, running):
                        yield conversation.index, conversation.samples
                if not running:
                    return
                tick()
                if enough():
                    for request, conversation in running.items():
                        if conversation.user is not None and request.num_output >= _LEAST:
                            conversation.samples.append(self._sample(conversation, request))
                        yield conversation.index, conversation.samples
                    return
                for event in self._engine.step():
                    self.written += len(event.tokens)
                    if event.finish_reason is not None:
                        conversation = running.pop(event.request)
                        self._end(conversation, event.request)
                        if not self._advance(conversation, running):
                            yield conversation.index, conversation.samples
        finally:
            for request, conversation in running.items():
                self._engine.abort(request)
                self._recorder.drop(request)
                if conversation.last is not None:
                    self._recorder.drop(conversation.last)

    def _begin(self, index: int, opening: Opening) -> _Conversation:
        messages = _messages(opening.system, opening.start)
        prefix = self._tokenizer.apply_chat_template(messages, continue_final_message=True)
        return _Conversation(index, opening, prefix, opening.start if opening.complete else None)

    def _end(self, conversation: _Conversation, request: Request) -> None:
        """Take over what a request has brought."""
        if conversation.user is None:
            conversation.user = conversation.opening.start + _whole(request)
        else:
            conversation.samples.append(self._sample(conversation, request))
        if conversation.last is not None:
            self._recorder.drop(conversation.last)
        conversation.last = request

    def _advance(self, conversation: _Conversation, running: dict[Request, _Conversation]) -> bool:
        """Queue the next part of a conversation; False if there is none."""
        request = self._next(conversation)
        if request is None:
            if conversation.last is not None:
                self._recorder.drop(conversation.last)
            return False
        if conversation.last is not None:
            self._recorder.before[request] = conversation.last
        running[request] = conversation
        self._engine.add(request)
        return True

    def _next(self, conversation: _Conversation) -> Request | None:
        """The request for the user turn, or for the next answer."""
        rng = random.Random(f"{self._seed}:{conversation.index}:answer")
        opening, answers = conversation.opening, len(conversation.samples)
        if conversation.user is None:
            params = SamplingParams(
                temperature=1.0, top_p=0.95, max_tokens=opening.max_tokens, seed=self._key(conversation.index, 0)
            )
            return self._engine.make_request(conversation.prefix, params)
        lengths, again, warmth = (rng.random(), rng.random()), rng.random() < SAMPLED, rng.choice((0.7, 1.0))
        if answers > again:
            return None
        try:
            prompt = self._tokenizer.apply_chat_template(_messages(opening.system, conversation.user))
            if len(prompt) > self._context - ANSWERS[0][1]:
                return None
            params = SamplingParams(
                temperature=warmth if answers else 0.0,
                top_p=0.95,
                max_tokens=next(tokens for share, tokens in ANSWERS if lengths[answers] <= share),
                seed=self._key(conversation.index, 1 + answers),
            )
            return self._engine.make_request(prompt, params)
        except RequestError:  # what the target wrote cannot be a user turn
            return None

    def _sample(self, conversation: _Conversation, request: Request) -> Sample:
        tokens = torch.tensor(request.tokens)
        classes = torch.full((len(tokens),), GIVEN, dtype=torch.uint8)
        # the user turn is learnt once
        if not conversation.opening.complete and not conversation.samples:
            assert conversation.user is not None
            whole = self._tokenizer.apply_chat_template(
                _messages(conversation.opening.system, conversation.user), continue_final_message=True
            )
            classes[_common(conversation.prefix, request.tokens) : _common(whole, request.tokens)] = WRITTEN
        classes[len(request.prompt) :] = ANSWER
        return Sample(tokens, classes, self._recorder.rows(request))

    def _key(self, index: int, part: int) -> int:
        return random.Random(f"{self._seed}:{index}:{part}").getrandbits(62)


def _messages(system: str | None, user: str) -> list[dict[str, str]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": user}]


def _whole(request: Request) -> str:
    """What the target wrote of a user turn; where its length ended it, up to the last sentence."""
    text = request.text
    if request.tokens[-1] in request.eos_ids:
        return text.rstrip()
    end = max(text.rfind(mark) for mark in (". ", ".\n", "? ", "! ", "\n"))
    return text[: end + 1].rstrip() if end > len(text) // 2 else text.rstrip()


def _common(first: Iterable[int], second: Iterable[int]) -> int:
    """Length of the common beginning."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count

"""A scripted target and drafters for tests of control flow: tables and functions instead of weights.

The scripted target keeps the token ids themselves in a real KV cache and reads them back through pages and ancestor
bits, so a wrong page, a wrong mask or a wrong commit changes the text just as it would with a real model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from minispec.batch import Span, StepBatch
from minispec.drafters.base import NoDrafter
from minispec.engine import Engine
from minispec.kv_cache import KVCache, PagePool
from minispec.request import Request, SamplingParams
from minispec.sampling import Noise
from minispec.scheduler import Slot
from minispec.tree import DraftTree

Prefix = tuple[int, ...]
Logits = Callable[[Prefix], Sequence[float]]


def table(script: Mapping[Prefix, int] | Callable[[Prefix], int], vocab: int) -> Logits:
    """Logits that make one token certain after each prefix."""

    def logits(prefix: Prefix) -> list[float]:
        token = script(prefix) if callable(script) else script[prefix]
        row = [0.0] * vocab
        row[token] = 50.0
        return row

    return logits


class ScriptedRunner:
    """A target whose logits are a function of the token prefix. Its cache holds token ids and is poisoned at first."""

    def __init__(self, logits: Logits, vocab_size: int, *, pages: int = 64, page_size: int = 4) -> None:
        self.kv = KVCache(
            layers=1, kv_heads=1, head_dim=1, pages=pages, page_size=page_size, dtype=torch.float64, device="cpu"
        )
        self.kv.k.fill_(float("nan"))
        self.kv.v.fill_(float("nan"))
        self.vocab_size = vocab_size
        self.logits = logits
        self.forwards = 0
        self.rows: list[int] = []

    def forward(self, spans: Sequence[Span], *, taps=None) -> Tensor:
        batch = StepBatch.build(spans, self.kv.page_size)
        self.forwards += 1
        self.rows.append(len(batch.tokens))
        memory = self.kv.k[0, 0, :, 0]
        memory[batch.kv_index] = batch.tokens.double()
        # positions stand in for the rotation: a key's position is fixed when it is written
        self.kv.v[0, 0, batch.kv_index, 0] = batch.positions.double()
        return torch.tensor(
            [self.logits(self._prefix(batch, int(row))) for row in batch.sample_rows], dtype=torch.float32
        ).view(-1, self.vocab_size)

    def _prefix(self, batch: StepBatch, row: int) -> Prefix:
        """The tokens that a row sees, read out of the cache by its mask, ordered and checked by position."""
        index = int(torch.searchsorted(batch.row_start, row, right=True)) - 1
        span = batch.spans[index]
        visible = batch.visible[index]
        keys = range(span.num_cached + span.tree_size)
        if visible is not None:
            keys = [key for key in keys if visible[row - int(batch.row_start[index]), key]]
        physical = [self.kv.kv_index(span.pages, key) for key in keys]
        tokens = self.kv.k[0, 0, physical, 0]
        positions = self.kv.v[0, 0, physical, 0]
        assert not tokens.isnan().any(), "a position was read before it was written"
        assert positions.tolist() == list(range(len(positions))), f"positions {positions.tolist()} are not consecutive"
        assert int(batch.positions[row]) == len(positions) - 1
        return tuple(int(token) for token in tokens)


class ScriptedDrafter(NoDrafter):
    """Proposes what a function of the text says: (tokens, parents) of the nodes behind the root, or None for none."""

    name = "scripted"

    def __init__(self, script: Callable[[Prefix], tuple[Sequence[int], Sequence[int]] | None]) -> None:
        self.script = script
        self.begun: list[Slot] = []
        self.ended: list[Slot] = []
        self.accepted: list[tuple[int, ...]] = []

    def begin(self, slot: Slot) -> None:
        self.begun.append(slot)

    def end(self, slot: Slot) -> None:
        self.ended.append(slot)

    def propose(self, slots: Sequence[Slot], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._tree(slot, count) for slot, count in zip(slots, max_nodes, strict=True)]

    def accept(self, slot, tree, acceptance) -> None:
        self.accepted.append(acceptance.path)

    def _tree(self, slot: Slot, count: int) -> DraftTree:
        drafted = self.script(tuple(slot.request.tokens))
        tokens, parents = drafted if drafted else ((), ())
        tree = DraftTree(
            (slot.request.tokens[-1], *tokens), (-1, *parents), tuple(-0.01 * i for i in range(len(tokens) + 1))
        )
        return tree.best(count)


def chain(tokens: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """A draft without branches."""
    return tokens, range(len(tokens))


def scripted_engine(
    logits: Logits,
    vocab: int,
    drafter=None,
    *,
    pages: int = 64,
    page_size: int = 4,
    max_context: int = 200,
    prefix_cache: bool = True,
    **settings,
) -> Engine:
    """An engine over a scripted target."""
    return Engine(
        ScriptedRunner(logits, vocab, pages=pages, page_size=page_size),
        PagePool(pages, page_size if prefix_cache else None),
        drafter or NoDrafter(),
        Noise(vocab),
        max_context=max_context,
        **settings,
    )


def pools(engine: Engine) -> list[PagePool]:
    """The target's pool, and those of drafters that have one."""
    own = (getattr(member, "_pool", None) for member in engine.drafter.members)
    return [engine.pool, *(pool for pool in own if pool is not None)]


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Request]:
    """Run requests together to their end, checking the invariants after every step."""
    requests = [engine.make_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.has_work:
        engine.step()
        engine.check()
        steps += 1
        assert steps < 10_000, "the engine makes no progress"
    assert all(pool.owned == 0 for pool in pools(engine))
    return requests


def generate(engine: Engine, prompt: Sequence[int], **params) -> Request:
    """Run one request alone."""
    return run(engine, [prompt], [SamplingParams(**{"temperature": 0.0, **params})])[0]

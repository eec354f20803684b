"""What may run compiled, and forwards to check and time it with: a target or draft model, or an EAGLE head."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from minispec.batch import Span, StepBatch
from minispec.drafters.eagle_runner import EagerHead, HeadForward, HeadRunner
from minispec.kv_cache import KVCache
from minispec.model.llama import Llama
from minispec.native import eagle
from minispec.native.library import Team
from minispec.native.model import (
    CompiledForward,
    PackedHead,
    PackedLinear,
    arena_for,
    packed_layer,
    plain_layer,
    unsupported,
)
from minispec.runner import ModelRunner

_PAGE = 16
_PAGES = (*range(5, 24), *range(5), *range(24, 32))
"""Of a probe's cache; not in order."""


class Probe(Protocol):
    """Forwards on a small cache of its own, that go through everything a forward does."""

    def logits(self, forward: Any) -> list[Tensor]:
        """[samples, vocab] float32 of a few forwards."""

    def seconds(self, forward: Any) -> dict[int, float]:
        """Rows to the fastest of a few forwards; ``logits`` comes first."""


class Candidate(Protocol):
    """What may run compiled."""

    @property
    def obstacle(self) -> str | None:
        """Why it cannot; None if it can."""

    @property
    def bits(self) -> int:
        """Of a weight."""

    @property
    def eager(self) -> Any:
        """Its forward in torch."""

    def probe(self) -> Probe:
        """Forwards for it."""

    def pack(self, team: Team, packer: Team) -> None:
        """Lay its weights out anew, which eager forwards go on reading; arguments as for ``PackedLinear``."""

    def undo(self, packer: Team) -> None:
        """The way back, wherever ``pack`` came to."""

    def compiled(self, team: Team) -> Any:
        """Its forward on packed weights, in one call."""

    def use(self, forward: Any) -> None:
        """Compute with ``forward`` from now on."""


class ModelCandidate:
    """A model."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._model = runner, runner.model
        self._before = runner.model.head

    @property
    def obstacle(self) -> str | None:
        return unsupported(self._model)

    @property
    def bits(self) -> int:
        head = self._model.head
        return head.struct.bits if isinstance(head, PackedHead) else 16

    @property
    def eager(self) -> Callable[..., Tensor]:
        return self._model.forward

    def probe(self) -> ModelProbe:
        return ModelProbe(self._model)

    def pack(self, team: Team, packer: Team) -> None:
        model, arena = self._model, arena_for(self._model, packer)
        for i, layer in enumerate(model.layers):
            model.layers[i] = packed_layer(team, packer, layer, arena)
        model.head = PackedHead(team, packer, model.head, arena)

    def undo(self, packer: Team) -> None:
        # layer by layer, as they are many: there is one copy of the weights at all times
        for i, layer in enumerate(self._model.layers):
            if isinstance(layer.qkv, PackedLinear):
                self._model.layers[i] = plain_layer(layer, packer)
        self._model.head = self._before

    def compiled(self, team: Team) -> CompiledForward:
        return CompiledForward(team, self._model)

    def use(self, forward: CompiledForward) -> None:
        self._runner.use(forward)


class HeadCandidate:
    """An EAGLE head. While it is checked there are two copies of its weights: they are few."""

    bits = 8

    def __init__(self, runner: HeadRunner) -> None:
        self._runner, self._head = runner, runner.head
        self._before = runner.head.weights, runner.head.output

    @property
    def obstacle(self) -> str | None:
        return eagle.unsupported(self._head)

    @property
    def eager(self) -> EagerHead:
        return EagerHead(self._head)

    def probe(self) -> HeadProbe:
        return HeadProbe(self._runner)

    def pack(self, team: Team, packer: Team) -> None:
        eagle.pack(team, packer, self._head)

    def undo(self, packer: Team) -> None:
        self._head.weights, self._head.output = self._before

    def compiled(self, team: Team) -> eagle.CompiledHead:
        return eagle.CompiledHead(team, self._head)

    def use(self, forward: HeadForward) -> None:
        self._runner.use(forward)


def candidate_for(runner: ModelRunner | HeadRunner) -> Candidate:
    """For a runner."""
    return HeadCandidate(runner) if isinstance(runner, HeadRunner) else ModelCandidate(runner)


class ModelProbe:
    """Steps of a model."""

    _SIZES = (1, 16)

    def __init__(self, model: Llama) -> None:
        config = model.config
        self._vocab = min(model.vocab_size, config.vocab_size)
        self._window = config.sliding_window
        self._kv = KVCache(
            layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim, pages=len(_PAGES),
            page_size=_PAGE, dtype=model.dtype, device=model.device,
        )  # fmt: skip

    def logits(self, forward: Callable[[StepBatch, KVCache], Tensor]) -> list[Tensor]:
        """Logits of two chunks of text, and of a tree and a single token behind them."""
        first, second = _PAGES[:20], _PAGES[20:]
        batches = [
            [
                Span([self._token(i) for i in range(280)], first, 0, range(280), None, (0, 100, 279)),
                Span([self._token(i + 7) for i in range(21)], second, 0, range(21), None, (3, 20)),
            ],
            [self._tree(13, first, 280), Span.chunk([self._token(3)], second, 21, sample_last=True)],
        ]
        return [self._run(forward, spans).clone() for spans in batches]

    def seconds(self, forward: Callable[[StepBatch, KVCache], Tensor], rounds: int = 3) -> dict[int, float]:
        """Behind 280 tokens."""
        best = dict.fromkeys(self._SIZES, float("inf"))
        for _ in range(rounds):
            for rows in self._SIZES:
                begin = time.perf_counter()
                self._run(forward, [self._tree(rows, _PAGES[:20], 280)])
                best[rows] = min(best[rows], time.perf_counter() - begin)
        return best

    def _run(self, forward: Callable[[StepBatch, KVCache], Tensor], spans: Sequence[Span]) -> Tensor:
        with torch.inference_mode():
            return forward(StepBatch.build(spans, _PAGE, "cpu", self._window), self._kv)

    def _token(self, i: int) -> int:
        return _token(i, self._vocab)

    def _tree(self, nodes: int, pages: Sequence[int], cached: int) -> Span:
        """A binary tree."""
        ancestors, depths = [1], [0]
        for i in range(1, nodes):
            parent = (i - 1) // 2
            ancestors.append(ancestors[parent] | 1 << i)
            depths.append(depths[parent] + 1)
        return Span([self._token(i) for i in range(nodes)], pages, cached, depths, ancestors, range(nodes))


class HeadProbe:
    """Proposals of a head: text is read, then a tree grows on the head's own hidden states."""

    _WIDTHS = (1, 8)

    def __init__(self, runner: HeadRunner) -> None:
        head = runner.head
        self._runner = HeadRunner(head, pages=len(_PAGES), page_size=_PAGE)
        self._vocab = head.weights.embedding.shape[0]
        taps = len(head.config.taps) * head.config.layer.hidden_size
        width = head.weights.fc.in_features if head.config.version == 3 else taps
        features = torch.randn((301, width), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            self._text = head.fuse(features.to(head.dtype))

    def logits(self, forward: HeadForward) -> list[Tensor]:
        """Logits behind two texts, the second with a gap before it, and of two layers of a tree behind each."""
        read, g = self._read(forward)
        layers = [read.clone()]
        for layer in range(2):
            logits, g = self._layer(forward, layer, 4, g)
            layers.append(logits.clone())
        return layers

    def seconds(self, forward: HeadForward, rounds: int = 5) -> dict[int, float]:
        """A layer of a tree behind 280 tokens."""
        best = dict.fromkeys(self._WIDTHS, float("inf"))
        g = self._read(forward)[1].clone()
        for _ in range(rounds):
            for width in self._WIDTHS:
                begin = time.perf_counter()
                self._layer(forward, 0, width, g[:1])
                best[width] = min(best[width], time.perf_counter() - begin)
        return best

    def _read(self, forward: HeadForward) -> tuple[Tensor, Tensor]:
        first, second = _PAGES[:20], _PAGES[20:]
        spans = [
            Span([_token(i, self._vocab) for i in range(280)], first, 0, range(280), None, (100, 279)),
            Span([_token(i + 7, self._vocab) for i in range(21)], second, 0, range(21), None, (20,)),
        ]
        logits, g = self._run(forward, spans, [0, 9], self._text)
        return logits, g[1:]

    def _layer(self, forward: HeadForward, layer: int, width: int, g: Tensor) -> tuple[Tensor, Tensor]:
        """Layer 0 or 1 of a tree behind each of the texts that ``g`` has rows of: ``width`` children, then one of each.

        Args:
            g: [texts, hidden], or [texts * width, hidden] of layer 0.
        """
        texts = len(g) if layer == 0 else len(g) // width
        spans = [
            Span(
                [_token(i + 3, self._vocab) for i in range(width)],
                pages,
                cached,
                [layer] * width,
                [1 << i | (1 << i + width) * layer for i in range(width)],
                range(width),
                first_key=width * layer,
            )
            for pages, cached in ((_PAGES[:20], 280), (_PAGES[20:], 21))[:texts]
        ]
        hidden = g.repeat_interleave(width, 0) if layer == 0 else g
        return self._run(forward, spans, [0, 9][:texts], hidden)

    def _run(
        self, forward: HeadForward, spans: Sequence[Span], gaps: Sequence[int], hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._runner.use(forward)
        with torch.inference_mode():
            g, logits = self._runner.forward(spans, gaps, hidden)
            forward.best(logits, min(10, logits.shape[1]))  # which a proposal wants too
        return logits, g


def _token(i: int, vocab: int) -> int:
    return (i * 7919 + 11) % vocab

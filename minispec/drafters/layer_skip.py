"""The target's own first layers as drafter: layer skip.

Self-speculation as in Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) and LayerSkip (Elhoushi et al. 2024,
arXiv 2404.16710), with one early exit: the first N layers, then the target's final norm and head. Nothing is loaded
besides the target, and nothing is read twice: the KV of the text is in the target's cache for these layers too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from minispec.batch import Span
from minispec.drafters.grow import CacheState, GrowingDrafter, Growth
from minispec.errors import ConfigError
from minispec.kv_cache import KVCache, PagePool
from minispec.sampling import Noise
from minispec.scheduler import Slot


class LayeredRunner(Protocol):
    """A target that can stop early."""

    kv: KVCache
    vocab_size: int

    def forward(self, spans: Sequence[Span], *, layers: int | None = None) -> Tensor:
        """As in ``ModelRunner.forward``."""

    def prepare(self, slots: int, *, layers: int | None = None) -> None:
        """As in ``ModelRunner.prepare``."""


class LayerSkipDrafter(GrowingDrafter[CacheState]):
    """Drafts with the target's first ``layers`` layers, in the target's KV cache.

    The one drafter that writes there, and only where verification writes too: the root at ``num_cached``, nodes behind
    it in the order in which they are run, all within the pages that are reserved for the tree. Verification lays its
    nodes out anew from ``num_cached`` on, in every layer, before it reads any.

    Args:
        runner: the target.
        num_layers: how many layers it has.
        layers: how many of them are run, 1 to ``num_layers - 1``.
        noise, depth, width, children: see ``GrowingDrafter``.

    Raises:
        ConfigError: there are no such layers, or no layer would be skipped.
    """

    def __init__(
        self,
        runner: LayeredRunner,
        num_layers: int,
        layers: int,
        noise: Noise,
        *,
        depth: int = 4,
        width: int = 4,
        children: int = 4,
    ) -> None:
        check_layers(layers, num_layers)
        super().__init__(
            f"layers:{layers}",
            runner.kv,
            PagePool(0),  # pages are the slots' own
            noise,
            depth=depth,
            width=width,
            children=children,
            choices=runner.vocab_size,
            chunk=1 << 30,  # one row for each slot, the root's
        )
        self._runner = runner
        self._layers = layers

    def prepare(self, slots: int) -> None:
        self._runner.prepare(slots, layers=self._layers)

    def _new_state(self) -> CacheState:
        return CacheState()

    def _num_pending(self, slot: Slot) -> int:
        return 1

    def _extend(self, state: CacheState, positions: int) -> bool:
        return True  # the scheduler has reserved ``max_nodes`` positions, which ``_run`` keeps to

    def _read(self, reads: Sequence[tuple[Slot, int, bool]]) -> Tensor:
        spans = [
            Span.chunk([slot.request.tokens[-1]], slot.pages, slot.num_cached, sample_last=True) for slot, _, _ in reads
        ]
        return self._runner.forward(spans, layers=self._layers)

    def _run(self, growths: Sequence[Growth]) -> Tensor:
        spans = []
        for growth in growths:
            # The root has taken one of the reserved positions. What is left is shared among the layers to come; it is
            # at least one for each that propose asks for, as a layer needs more nodes than it is deep.
            room = growth.max_nodes - 1 - len(growth.keys)
            layers_left = self._depth - growth.depths[growth.frontier[0]]
            del growth.frontier[max(room // max(layers_left, 1), 1) :]
            spans.append(growth.span(growth.slot.pages, growth.slot.num_cached + 1))
        return self._runner.forward(spans, layers=self._layers)


def check_layers(layers: int, num_layers: int) -> None:
    """Whether a target of ``num_layers`` can draft with its first ``layers``.

    Raises:
        ConfigError: it cannot; the message says how many it can.
    """
    if not 1 <= layers < num_layers:
        raise ConfigError(
            f"--draft layers:{layers} does not fit a target of {num_layers} layers: 1 to {num_layers - 1} of them can "
            "draft" + (f"; try layers:{max(num_layers // 3, 1)}" if num_layers > 1 else "; try --draft suffix")
        )

"""From a step's logits to the target's tokens: which row draws for whom, at which position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minispec import kernels
from minispec.request import Request
from minispec.sampling import Noise, SamplingBatch
from minispec.tree import DraftTree


class Sampler:
    """Draws the target's token after each sampled row of a step.

    Args:
        noise: keyed noise over the target's vocabulary.
    """

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def __call__(self, logits: Tensor, first: Sequence[Request], trees: Sequence[tuple[Request, DraftTree]]) -> Tensor:
        """Args:
            logits: [samples, vocab_size] float32, rows in the order of ``first`` and then of the trees' nodes.
            first: requests whose prompt ends in this step; each draws one token.
            trees: the decoding requests and what is verified for them; each node draws the token that follows it.

        Returns:
            [samples] int64.
        """
        rows = [(request, len(request.tokens)) for request in first]
        for request, tree in trees:
            rows += [(request, len(request.tokens) + depth) for depth in tree.depth]
        if not rows:
            return logits.new_empty(0, dtype=torch.int64)
        return kernels.sample(logits, SamplingBatch.build(rows, logits.device), self._noise)

"""Conversations ready to train on: what the target thought of every token, over the head's vocabulary; and batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.kernels.rms_norm import rms_norm_ref
from minispec.model.llama import Llama
from minispec.train.head import usual
from minispec.train.shards import ANSWER, GIVEN, Sample
from minispec.train.unroll import Batch

LABELS = 32
"""Tokens a label may name; what the target gives to others is left out."""
LEAST = 0.002
"""Probability below which a token is not part of a label."""
_WINDOW = 96  # conversations that are sorted by length to be batched


@dataclass(frozen=True)
class Example:
    """One conversation; fields as in Batch, features without the target's last hidden states."""

    tokens: Tensor
    features: Tensor
    labels: Tensor
    weights: Tensor
    best: Tensor
    classes: Tensor
    sound: Tensor

    @property
    def answer(self) -> int:
        """Tokens of the answer."""
        return int((self.classes == ANSWER).sum())


def choose_vocabulary(samples: Iterable[Sample], target: Llama, size: int) -> Tensor:
    """[size] int64, ascending: the commonest tokens of what the target wrote. Of equals, unseen ones too, the lower
    ids: tokenizers number frequent strings first."""
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(sample.tokens[sample.classes != GIVEN], minlength=target.vocab_size)
    size = min(size, target.vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


class Labeller:
    """Makes examples of samples.

    Args:
        target: whose norm and head turn its last hidden states into what it thought.
        ids: [logits], the head's vocabulary.
        scale: [taps * hidden], of the features.
    """

    def __init__(self, target: Llama, ids: Tensor, scale: Tensor) -> None:
        self._norm, self._eps = target.norm.float(), target.config.rms_norm_eps
        self._output = target.head.weight[ids.to(target.device)].float()
        self._index = torch.full((target.config.vocab_size,), -1)
        self._index[ids] = torch.arange(len(ids))
        self._scale = scale.cpu()

    @torch.no_grad()
    def __call__(self, sample: Sample) -> Example:
        hidden = len(self._norm)
        features, last = sample.features.split([sample.features.shape[1] - hidden, hidden], dim=-1)
        wanted = sample.wanted  # nobody asks for the others' labels
        normed = rms_norm_ref(last[wanted].to(self._norm.device).float(), self._norm, self._eps)[0]
        probabilities = F.linear(normed, self._output).softmax(-1)
        size = min(LABELS, len(self._output))
        weights, labels = torch.zeros(len(last), size), torch.zeros(len(last), size, dtype=torch.int64)
        weights[wanted], labels[wanted] = (t.cpu() for t in probabilities.topk(size, dim=-1))
        weights = weights * (weights >= LEAST)
        weights[:, 0] += (weights.sum(-1) == 0) & wanted
        following, classes = sample.tokens[1:], sample.classes[1:]
        return Example(
            tokens=following,
            features=features,  # where they lie: in the file, as far as that was not read into memory
            labels=labels,
            weights=weights / weights.sum(-1, keepdim=True).clamp(min=LEAST),
            best=labels[:, 0].masked_fill((self._index[following] < 0) & (classes == ANSWER), -1),
            classes=classes,
            sound=usual(features, self._scale),
        )


def join(examples: Sequence[Example], device: torch.device) -> Batch:
    """Examples behind one another."""
    starts = [0]
    for example in examples:
        starts.append(starts[-1] + len(example.tokens))

    def cat(name: str) -> Tensor:
        return torch.cat([getattr(example, name) for example in examples]).to(device)

    return Batch(
        starts=starts,
        tokens=cat("tokens"),
        features=cat("features"),
        labels=cat("labels"),
        weights=cat("weights"),
        best=cat("best"),
        classes=cat("classes"),
        sound=cat("sound"),
    )


def batches(lengths: Sequence[int], rows: int, generator: torch.Generator) -> list[list[int]]:
    """One epoch's batches, in random order: indices of conversations of like lengths, about ``rows`` rows each."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    made: list[list[int]] = []
    for first in range(0, len(order), _WINDOW):
        window = sorted(order[first : first + _WINDOW], key=lambda i: lengths[i])
        batch: list[int] = []
        for index in window:
            # padded to the longest, which is the newest
            if batch and (len(batch) + 1) * lengths[index] > rows:
                made.append(batch)
                batch = []
            batch.append(index)
        made.append(batch)
    return [made[i] for i in torch.randperm(len(made), generator=generator).tolist()]

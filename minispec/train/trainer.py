"""The training loop: soft labels, several steps of training-time test, AdamW; the same curve whenever it is resumed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.train.data import Example, batches, join
from minispec.train.head import TrainableHead
from minispec.train.shards import ANSWER, GIVEN
from minispec.train.unroll import Batch, Unroll

DEPTH = 6
"""Steps that ``Trainer.evaluate`` looks at."""


def going_on(steps: int) -> Mapping[str, Any]:
    """``Settings`` for a head that was trained before: nothing has to be easy at first, and a high rate undoes more
    than a short run makes good. 120 steps on 89,000 rows of new text took the shipped head's held-out loss from 2.16 to
    2.24 at 7e-4, and left it at 2.16 at 2e-4 and 1e-4; thousands of steps have the time to come back.
    """
    return {"rate": min(2e-4 * math.sqrt(max(steps / 1000, 1.0)), 5e-4), "onset": (0.0,) * 4}


@dataclass(frozen=True)
class Settings:
    """How a head is trained.

    Attributes:
        steps: of the optimizer.
        seed: of everything drawn.
        rate: AdamW's learning rate; it rises over ``warmup`` steps, stays, and falls to nothing over the last ``decay``
            of the run.
        fuse: rate of ``fc``, as a share of the others'.
        rows: tokens of a batch, padding included.
        onset: share of the run after which each step of training-time test takes part; as many steps as entries.
        follow: share of the chains of a step that the next one follows.
        fade: weight of a step's loss to that of the step before.
        negatives: tokens drawn for the denominator of the softmax, beside those of the labels; None takes all.
        written: weight of the tokens of user turns; those of answers count 1.
        bfloat16: multiply matrices in bfloat16; parameters and sums stay in float32.
    """

    steps: int
    seed: int = 0
    rate: float = 7e-4
    warmup: int = 20
    decay: float = 0.35
    fuse: float = 0.05
    rows: int = 2048
    onset: tuple[float, ...] = (0.0, 0.0, 0.1, 0.2)
    follow: float = 0.6
    fade: float = 0.8
    negatives: int | None = 1024
    written: float = 0.5
    bfloat16: bool = False


@dataclass(frozen=True)
class Quality:
    """What a head is worth on held-out text, by the target's greedy choices after the text as it stands.

    Attributes:
        accuracy: per step s, how often the head names the target's token there, given that it did at all steps before.
        chain: tokens per verification of a chain of ``DEPTH``, bonus included.
        loss: cross-entropy of step 1.
    """

    accuracy: tuple[float, ...]
    chain: float
    loss: float


@dataclass
class Trainer:
    """Trains a head.

    Attributes:
        head: the head.
        examples: what it is trained on.
        settings: how.
        step: optimizer steps made.
        curve: per step (step, loss of the first step of training-time test, share of tokens it named).
    """

    head: TrainableHead
    examples: Sequence[Example]
    settings: Settings
    step: int = 0
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        parameters = self.head.parameters
        self._device = parameters["fc"].device
        # fc is a good map from the start, and the widest: its outputs would move furthest
        groups = [
            {"params": [parameter for name, parameter in parameters.items() if (name == "fc") == first], "share": share}
            for first, share in ((True, self.settings.fuse), (False, 1.0))
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.settings.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self._epoch = -1
        self._batches: list[list[int]] = []
        self._first = 0  # step at which the epoch began

    @property
    def done(self) -> bool:
        return self.step >= self.settings.steps

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        return self.step / max(self.settings.steps, 1)

    @property
    def epoch_batches(self) -> int:
        """Steps of the epoch under way."""
        return len(self._batches)

    def advance(self) -> int:
        """Make one optimizer step; returns the tokens of its batch."""
        batch = self.batch()
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate() * group["share"]
        self.optimizer.zero_grad(set_to_none=True)
        with self._precision():
            loss, first, named = self._loss(batch, generator)
        if math.isfinite(float(loss.detach())):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters.values(), 1.0)
            self.optimizer.step()
        self.step += 1
        self.curve.append((self.step, first, named))
        return batch.starts[-1]

    def batch(self) -> Batch:
        """What the next step is made on."""
        return join([self.examples[i] for i in self._next_batch()], self._device)

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs to go on."""
        return {
            "step": self.step,
            "curve": self.curve,
            "parameters": {name: p.detach() for name, p in self.head.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.step = state["step"]
        self.curve = [(int(step), loss, named) for step, loss, named in state["curve"]]
        with torch.no_grad():
            for name, parameter in self.head.parameters.items():
                parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def evaluate(self, examples: Sequence[Example]) -> Quality:
        """Measure the head on ``examples``, on what follows each token of their answers."""
        with self._precision():
            return self._evaluate(examples)

    def _evaluate(self, examples: Sequence[Example]) -> Quality:
        reached = torch.zeros(DEPTH)
        named = torch.zeros(DEPTH)
        loss = count = 0.0
        for i in range(0, len(examples), 8):
            batch = join(examples[i : i + 8], self._device)
            unroll = Unroll(self.head, batch)
            alive = torch.ones(len(unroll.rows), dtype=torch.bool, device=self._device)
            roots: Tensor | None = None
            for step in range(DEPTH):
                after, inside = unroll.next_rows()
                inside &= batch.classes[after] == ANSWER
                keep = inside.nonzero()[:, 0]
                logits = self._logits(unroll.hidden[keep])
                right = logits.argmax(-1) == batch.best[after[keep]]
                if step == 0:
                    loss += float(_cross_entropy(logits, batch, after[keep]).sum())
                    count += len(keep)
                    roots = torch.zeros(len(unroll.rows), dtype=torch.bool, device=self._device)
                    roots[keep] = True
                assert roots is not None
                reached[step] += int(alive[keep].sum())
                alive[keep] &= right
                named[step] += int(alive[keep].sum())
                if step + 1 < DEPTH:
                    unroll.advance(keep)
                    alive = alive[keep]
        accuracy = named / reached.clamp(min=1)
        return Quality(
            tuple(round(a, 4) for a in accuracy.tolist()), 1 + float(accuracy.cumprod(0).sum()), loss / max(count, 1)
        )

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self.settings.bfloat16)

    def _next_batch(self) -> list[int]:
        while self._epoch < 0 or self.step >= self._first + len(self._batches):
            self._first += len(self._batches)
            self._epoch += 1
            generator = torch.Generator().manual_seed(self.settings.seed * 7919 + self._epoch)
            self._batches = batches([len(e.tokens) for e in self.examples], self.settings.rows, generator)
        return self._batches[self.step - self._first]

    def _rate(self) -> float:
        s = self.settings
        rising = min(1.0, (self.step + 1) / max(s.warmup, 1))
        falling = min(1.0, (1 - self.progress) / s.decay)
        return s.rate * rising * max(falling, 0.01)

    def _loss(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, float, float]:
        """(loss, that of step 1, share of tokens that step 1 named)."""
        s = self.settings
        vocabulary, correction = self._vocabulary(batch, generator)
        total = torch.zeros((), device=self._device)
        first = named = 0.0
        weight = norm = 1.0
        unroll: Unroll | None = None
        for step, onset in enumerate(s.onset):
            if self.progress < onset:
                break
            if unroll is None:
                unroll = Unroll(self.head, batch)
            after, inside = unroll.next_rows()
            kinds = batch.classes[after]
            wanted = inside & (kinds != GIVEN) & batch.sound[unroll.roots]
            if step > 0:
                wanted &= kinds == ANSWER
                weight *= s.fade
                norm += weight
            keep = wanted.nonzero()[:, 0]
            if len(keep) == 0:
                break
            rows = after[keep]
            logits = self._logits(unroll.hidden[keep], vocabulary, correction)
            losses = _cross_entropy(logits, batch, rows, vocabulary)
            importance = torch.where(batch.classes[rows] == ANSWER, 1.0, s.written)
            mean = (losses * importance).sum() / importance.sum()
            total = total + weight * mean
            if step == 0:
                first = float(mean.detach())
                best = batch.best[rows]
                guess = logits.detach().argmax(-1)
                named = float(((guess if vocabulary is None else vocabulary[guess]) == best).float().mean())
            # chains that stand at a token of the answer, and have another to go to
            behind = keep[(batch.classes[rows] == ANSWER)]
            lucky = torch.rand(len(behind), generator=generator) < s.follow
            behind = behind[lucky.to(behind.device)]
            if step + 1 < len(s.onset) and self.progress >= s.onset[step + 1] and len(behind):
                unroll.advance(behind)
            else:
                break
        return total / norm, first, named

    def _logits(self, hidden: Tensor, ids: Tensor | None = None, correction: Tensor | None = None) -> Tensor:
        output = self.head.output if ids is None else self.head.output[ids]
        logits = F.linear(self.head.forward.normed(hidden), output).float()
        return logits if correction is None else logits + correction

    def _vocabulary(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor | None, Tensor | None]:
        """The logits that a batch's softmax runs over, ascending, and what is added to those that were drawn, so that
        the expected denominator is that over all of them."""
        size, negatives = len(self.head.output), self.settings.negatives
        if negatives is None:
            return None, None
        chosen = torch.zeros(size, dtype=torch.bool)
        chosen[batch.labels[batch.weights > 0].cpu()] = True
        others = (~chosen).nonzero()[:, 0]
        if len(others) <= negatives:
            return None, None
        drawn = others[torch.randperm(len(others), generator=generator)[:negatives]]
        correction = torch.zeros(size)
        correction[drawn] = math.log(len(others) / negatives)
        chosen[drawn] = True
        ids = chosen.nonzero()[:, 0]
        return ids.to(self._device), correction[ids].to(self._device)


def _cross_entropy(logits: Tensor, batch: Batch, rows: Tensor, ids: Tensor | None = None) -> Tensor:
    """[n]: of ``rows``' soft labels.

    Args:
        logits: [n, len(ids)], of the head's vocabulary, or of the part ``ids`` (ascending) that holds all labels.
    """
    labels, weights = batch.labels[rows], batch.weights[rows]
    if ids is not None:
        labels = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)  # those of weight 0 may be missing
    return logits.logsumexp(-1) - (weights * logits.gather(-1, labels)).sum(-1)

"""A tiny training run in memory: text whose hidden states tell what follows."""

from __future__ import annotations

import torch

from minispec.train.data import Labeller, choose_vocabulary
from minispec.train.head import TrainableHead
from minispec.train.shards import ANSWER, GIVEN, Sample
from minispec.train.trainer import Settings, Trainer
from tiny_heads import HIDDEN, head_target

TAPS = (0, 1)
STEPS = 30


def texts(count=24, seed=0) -> list[Sample]:
    """Conversations whose last hidden states tell the next token, which follows from the one before."""
    target = head_target()
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        length = int(torch.randint(12, 24, (1,), generator=generator))
        tokens = torch.empty(length, dtype=torch.int64)
        tokens[0] = torch.randint(0, 64, (1,), generator=generator)
        for i in range(1, length):
            tokens[i] = (tokens[i - 1] * 5 + 7) % 64
        # such that norm and head name the next token
        last = target.head.weight[(tokens[:-1] * 5 + 7) % 64] / target.norm * 30
        early = target.embedding[tokens[:-1]]
        noise = torch.randn(length - 1, HIDDEN, generator=generator) * 0.1
        classes = torch.full((length,), ANSWER, dtype=torch.uint8)
        classes[:2] = GIVEN
        result.append(Sample(tokens, classes, torch.cat([early, early + noise, last], dim=-1).bfloat16()))
    return result


def trainer(settings: Settings | None = None) -> tuple[Trainer, list]:
    samples = texts()
    target = head_target()
    ids = choose_vocabulary(samples, target, 100)
    head = TrainableHead.start(target, ids, TAPS, samples, seed=0)
    examples = [Labeller(target, ids, head.scale)(sample) for sample in samples]
    return Trainer(head, examples[4:], settings or Settings(steps=STEPS, rows=256, negatives=16)), examples[:4]

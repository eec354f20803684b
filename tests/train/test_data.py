"""Examples for training."""

from __future__ import annotations

import torch

from minispec.train.data import LABELS, Labeller
from minispec.train.head import text_scale
from minispec.train.shards import ANSWER, GIVEN, Sample, Shard
from tiny_heads import HIDDEN, head_target


def test_features_stay_in_their_file(tmp_path):
    """All text has to be at hand while a head is trained, and may be more than there is memory."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.tensor([GIVEN] * 3 + [ANSWER] * 9, dtype=torch.uint8)
    written = [
        Sample(
            torch.randint(0, 512, (12,), generator=generator),
            classes,
            torch.randn(11, 4 * HIDDEN, generator=generator).bfloat16(),
        )
        for _ in range(3)
    ]
    Shard(written).save(tmp_path / "shard", "tag")
    samples = Shard.load(tmp_path / "shard", "tag").samples
    labeller = Labeller(head_target(), torch.arange(100), text_scale(samples, 3 * HIDDEN))
    for before, sample in zip(written, samples, strict=True):
        example = labeller(sample)
        assert example.features.untyped_storage().data_ptr() == sample.features.untyped_storage().data_ptr()
        assert torch.equal(example.features, before.features[:, : 3 * HIDDEN])
        assert example.labels.shape == example.weights.shape == (11, LABELS)

"""The unrolled forward of training against the exported head, run as drafting runs it."""

from __future__ import annotations

import json

import pytest
import torch

from minispec.drafters.eagle_head import load_eagle_head
from minispec.kernels.rope import rope_ref
from minispec.train.data import Labeller, join
from minispec.train.head import TrainableHead
from minispec.train.shards import ANSWER, GIVEN, Sample
from minispec.train.unroll import Unroll
from tiny_heads import HIDDEN, head_target

TAPS = (0, 1, 2)
VOCAB = 100


def samples(lengths, seed=0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    result = []
    for length in lengths:
        classes = torch.full((length,), ANSWER, dtype=torch.uint8)
        classes[:3] = GIVEN
        features = torch.randn(length - 1, 4 * HIDDEN, generator=generator).bfloat16()
        result.append(Sample(torch.randint(0, 512, (length,), generator=generator), classes, features))
    return result


def started(lengths=(9, 14, 6), seed=0):
    """A head before training, and a batch."""
    texts = samples(lengths, seed)
    target = head_target()
    ids = torch.randperm(512, generator=torch.Generator().manual_seed(3))[:VOCAB].sort().values
    head = TrainableHead.start(target, ids, TAPS, texts, seed=1)
    with torch.no_grad():
        for parameter in head.parameters.values():  # so that every part matters
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    labeller = Labeller(target, ids, head.scale)
    return head, join([labeller(text) for text in texts], torch.device("cpu"))


def dense(head, position, keys, values):
    """Attention over the rows so far and the ones given, all of them visible to the last."""

    def attend(layer, q, k, v):
        cos, sin = head.rope.cos_sin(position)
        q, k = rope_ref(q, cos, sin), rope_ref(k, cos, sin)
        keys.append(k)
        values.append(v)
        seen, value = torch.cat(keys), torch.cat(values)
        group = q.shape[1] // seen.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, seen.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
        own = torch.arange(len(seen)) > (len(seen) - len(q) + torch.arange(len(q)))[:, None]
        weights = scores.masked_fill(own, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1))

    return attend


@pytest.mark.parametrize("keep", ["all", "some"])
def test_every_step_is_what_drafting_computes(tmp_path, keep):
    head, batch = started()
    head.save(tmp_path, head_target().config)
    files = json.loads((tmp_path / "config.json").read_text())
    loaded = load_eagle_head(tmp_path, files, 3, head_target())
    unroll = Unroll(head, batch)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        logits = torch.nn.functional.linear(head.forward.normed(unroll.hidden), head.output)
        for chain in range(0, len(unroll.rows), 3):
            root, row = int(unroll.roots[chain]), int(unroll.rows[chain])
            assert row == root + step
            start = max(s for s in batch.starts if s <= root)
            keys, values = [], []
            # the text up to the root, then a row on the head's own g for every token behind it
            context = torch.arange(start, root + 1)
            hidden = loaded.forward(
                batch.tokens[context],
                loaded.fuse(batch.features[context].float()),
                dense(loaded, context - start, keys, values),
            )[-1:]
            for behind in range(root + 1, row + 1):
                at = torch.tensor([behind])
                hidden = loaded.forward(batch.tokens[at], hidden, dense(loaded, at - start, keys, values))
            # the checkpoint is rounded to bfloat16
            torch.testing.assert_close(loaded.logits(hidden)[0], logits[chain], rtol=0.05, atol=0.15)
        _, inside = unroll.next_rows()
        going = inside.nonzero()[:, 0]
        if keep == "some":
            going = going[torch.rand(len(going), generator=generator) < 0.7]
        unroll.advance(going)
    assert len(unroll.rows) > 0

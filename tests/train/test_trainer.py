"""Training on a tiny target: it learns, and it is the same curve however often it was interrupted."""

from __future__ import annotations

import pytest
import torch

from minispec.train.data import batches, choose_vocabulary
from minispec.train.run import price
from minispec.train.shards import ANSWER, GIVEN, Sample
from minispec.train.trainer import Settings
from tiny_heads import head_target
from tiny_training import trainer


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_head_learns_what_the_target_does(bfloat16):
    # a narrow model needs larger steps
    made, held_out = trainer(Settings(steps=120, rate=4e-3, rows=256, negatives=16, bfloat16=bfloat16))
    before = made.evaluate(held_out)
    while not made.done:
        made.advance()
    after = made.evaluate(held_out)
    assert after.loss < before.loss * 0.7
    assert before.accuracy[0] > 0.8, "here a linear map names the next token: where training starts"
    assert after.accuracy[0] > 0.8
    assert after.accuracy[3] > 0.8 > before.accuracy[3], "training-time test did not reach depth 4"
    assert after.chain == pytest.approx(1 + sum(torch.tensor(after.accuracy).cumprod(0).tolist()), rel=1e-3)
    assert [step for step, _, _ in made.curve] == list(range(1, 121))


def test_resuming_follows_the_same_curve_bit_for_bit(tmp_path):
    straight, _ = trainer()
    while not straight.done:
        straight.advance()
    first, _ = trainer()
    for _ in range(11):
        first.advance()
    torch.save(first.state(), tmp_path / "state.pt")
    second, _ = trainer()
    second.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.step == 11
    while not second.done:
        second.advance()
    assert second.curve == straight.curve
    for name, parameter in straight.head.parameters.items():
        assert torch.equal(parameter, second.head.parameters[name]), name


def test_finding_the_price_of_a_step_leaves_the_head_as_it_was():
    made, _ = trainer()
    before = {name: p.detach().clone() for name, p in made.head.parameters.items()}
    epoch, seconds = price(made.head, made.examples, {"rows": 128, "negatives": 16})
    assert epoch == len(batches([len(e.tokens) for e in made.examples], 128, torch.Generator().manual_seed(0)))
    assert seconds > 0
    assert all(p.equal(before[name]) for name, p in made.head.parameters.items())


def test_drawn_negatives_estimate_the_whole_softmax():
    """The expected loss is that over the whole vocabulary."""
    made, _ = trainer(Settings(steps=10, rows=256, negatives=None, onset=(0.0, 0.5)))
    batch = made.batch()
    whole, first, _ = made._loss(batch, torch.Generator().manual_seed(0))
    made.settings = Settings(steps=10, rows=256, negatives=24, onset=(0.0, 0.5))
    drawn = [made._loss(batch, torch.Generator().manual_seed(seed))[1] for seed in range(20)]
    assert sum(drawn) / len(drawn) == pytest.approx(first, rel=0.05)
    assert float(whole.detach()) == pytest.approx(first, rel=1e-6), "one step of training-time test at first"


def test_batches_hold_every_conversation_once():
    lengths = [int(n) for n in torch.randint(5, 60, (301,), generator=torch.Generator().manual_seed(0))]
    made = batches(lengths, 128, torch.Generator().manual_seed(1))
    assert sorted(i for batch in made for i in batch) == list(range(301))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 128 or len(batch) == 1 for batch in made)
    again = batches(lengths, 128, torch.Generator().manual_seed(2))
    assert again != made


def test_the_vocabulary_is_the_commonest_tokens_in_order():
    classes = torch.tensor([GIVEN, ANSWER, ANSWER, ANSWER, ANSWER, GIVEN], dtype=torch.uint8)
    sample = Sample(torch.tensor([9, 7, 7, 300, 12, 9]), classes, torch.empty(5, 0))
    assert choose_vocabulary([sample], head_target(), 5).tolist() == [0, 1, 7, 12, 300]

"""The profile of a step: what it counts, and that it leaves nothing behind."""

from __future__ import annotations

import pytest

from minispec import settle
from minispec.batch import StepBatch
from minispec.bench.profile import PARTS, Profile
from minispec.request import Request
from scripted import generate
from tiny_engine import tiny_engine


@pytest.mark.parametrize("draft", ["none", "ngram", "layers"])
def test_every_part_of_a_step_is_counted_once(draft):
    engine = tiny_engine(draft)
    with Profile(engine) as profile:
        request = generate(engine, [1, 2, 3, 1, 2], max_tokens=24, temperature=0.0)
    assert request.num_output == 24
    report = profile.report()
    assert report["steps"] == engine.stats.steps == profile.steps
    assert set(report["parts_ms"]) == set(PARTS)
    assert sum(report["shares"].values()) == pytest.approx(1, abs=1e-3)
    assert report["step_ms"] == pytest.approx(sum(report["parts_ms"].values()), abs=0.01)
    assert all(profile.seconds[part] > 0 for part in ("prepare", "forward", "sample", "verify", "detokenise", "rest"))
    # layer skip runs the target's own layers: its forwards are drafting, not the target's pass
    assert (profile.seconds["draft forward"] > 0) == (draft == "layers")
    forwards = report["shares"]["forward"] + report["shares"]["draft forward"]
    assert report["host_share"] == pytest.approx(1 - forwards, abs=1e-3)


def test_leaves_nothing_behind():
    engine = tiny_engine("ngram")
    before = StepBatch.build, settle.verify, Request.append, engine._sample
    with pytest.raises(RuntimeError, match="boom"), Profile(engine):
        raise RuntimeError("boom")
    assert (StepBatch.build, settle.verify, Request.append, engine._sample) == before
    assert not {"step", "forward"} & (vars(engine).keys() | vars(engine.runner).keys())
    assert "propose" not in vars(engine.drafter)
    generate(engine, [1, 2, 3], max_tokens=4)


def test_an_idle_engine_has_a_profile_of_nothing():
    with Profile(tiny_engine("none")) as profile:
        pass
    report = profile.report()
    assert report["steps"] == 0 and report["step_ms"] == 0

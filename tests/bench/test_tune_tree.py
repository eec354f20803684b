"""The best fixed tree: the dynamic programme against brute force, and what it is fed with."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minispec.bench.tune_tree import BestTrees, acceptance, best_sizes, comb, run_tune_tree
from minispec.config import EngineConfig
from minispec.costs import StepCost
from minispec.drafters.fixed_tree import TreeShape
from minispec.errors import ConfigError
from minispec.request import TraceStep
from tiny_folders import tiny_folder

RATES = [[0.6, 0.2], [0.5, 0.3], [0.4, 0.1]]


def expected(shape, rates) -> float:
    """Expected tokens per step of a tree: the bonus, and every node times the chance that the walk comes to it."""
    total = 1.0
    for path in shape:
        reach = 1.0
        for depth, rank in enumerate(path):
            reach *= rates[depth][rank]
        total += reach
    return total


@cache
def shapes(nodes: int, depth: int, children: int) -> frozenset[frozenset[tuple[int, ...]]]:
    """Every tree of ``nodes`` nodes, root included."""
    if nodes == 1:
        return frozenset({frozenset()})
    found = set()
    for smaller in shapes(nodes - 1, depth, children):
        for parent in [(), *smaller]:
            for rank in range(children):
                path = (*parent, rank)
                if len(path) <= depth and path not in smaller:
                    found.add(smaller | {path})
    return frozenset(found)


rates = st.lists(st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=2, max_size=2), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(rates, st.integers(1, 6))
def test_no_tree_expects_more_tokens(rates, nodes):
    trees = BestTrees(rates, 6)
    best = max(expected(shape, rates) for n in range(1, nodes + 1) for shape in shapes(n, len(rates), 2))
    assert trees.tokens(nodes) == pytest.approx(best)
    shape = trees.shape(nodes)
    assert len(shape) < nodes + 1 and expected(shape, rates) == pytest.approx(best)
    assert not shape or TreeShape.of(shape).paths == frozenset(map(tuple, shape))


def test_the_size_follows_the_costs():
    dear, cheap = StepCost(0.0, 1.0), StepCost(10.0, 0.01)
    sizes, shape = best_sizes(RATES, 12, dear, 0.0)
    assert max(sizes, key=lambda size: size.speed).nodes == 1 and shape == []
    sizes, shape = best_sizes(RATES, 12, cheap, 0.0)
    assert len(sizes) == 12 and len(shape) == 11
    _, shallow = best_sizes(RATES, 12, cheap, 3.0)
    assert 0 < len(shallow) < 11 and max(map(len, shallow)) < 3
    assert best_sizes(RATES, 12, cheap, 100.0)[1] == []


def test_more_nodes_than_the_tree_can_have():
    assert len(BestTrees([[0.5, 0.5]], 20).shape(20)) == 2


def test_acceptance_is_counted_along_the_walk():
    shape = comb(2, 2)
    assert shape == [[0], [1], [0, 0], [0, 1]] and TreeShape.of(shape)
    # node 1 is the best child of the root, 3 and 4 are its children
    parents = (-1, 0, 0, 1, 1)
    steps = [
        TraceStep((9, 5, 6, 7, 8), parents, (0, 1, 3), 1),  # rank 0, then rank 0
        TraceStep((9, 5, 6, 7, 8), parents, (0, 1), 2),  # rank 0, then none
        TraceStep((9, 5, 6, 7, 8), parents, (0, 2), 3),  # rank 1, where the comb ends
        TraceStep((9, 5, 6, 7, 8), parents, (0,), 3),  # none
        TraceStep((9, 5, 6, 7, 8), parents, (0, 1), None),  # rank 0, and the text ended
        TraceStep((9,), (-1,), (0,), 3),  # nothing was drafted
    ]
    assert acceptance(steps, 2, 2, prior=0) == [[3 / 5, 1 / 5], [1 / 2, 0]]
    first, second = acceptance(steps, 2, 2, prior=2)
    assert first == [3 / 5, 1 / 5] and second == [(1 + 2 * 0.6) / 4, (2 * 0.2) / 4]
    assert acceptance([], 2, 2) == [[0, 0], [0, 0]]


def test_from_a_model_to_a_file(tmp_path, capsys):
    target = tiny_folder(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab"}\n{"prompt": "cd"}\n')
    settings = {"prompts": prompts, "max_tokens": 12, "temperature": 0.0, "depth": 2, "children": 3, "nodes": 8}
    config = EngineConfig(target=str(target), draft=str(target), device="cpu", dtype="float32", max_context=64)
    assert run_tune_tree(config, out=tmp_path / "tree.json", as_json=True, **settings) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    # the draft is the target: its best choice is always right
    assert report["rates"][0] == [1, 0, 0] and report["steps"] > 0
    if report["tree"]:  # whether it pays is a matter of time
        assert json.loads((tmp_path / "tree.json").read_text()) == report["tree"]
        TreeShape.from_file(tmp_path / "tree.json")
    assert run_tune_tree(config, out=None, as_json=False, **settings) == 0
    assert "best tree of each size" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused(tmp_path):
    target = tiny_folder(tmp_path / "target")
    settings = {"prompts": None, "out": None, "max_tokens": 12, "temperature": 0.0, "nodes": 8, "as_json": True}
    for draft in ("ngram", "auto", "none", "layers:1,ngram"):
        config = EngineConfig(target=str(target), draft=draft, device="cpu", max_context=64)
        with pytest.raises(ConfigError, match=f"which --draft {draft} is not"):
            run_tune_tree(config, depth=2, children=2, **settings)
    with pytest.raises(ConfigError, match="tree of 257 nodes"):
        run_tune_tree(config, depth=16, children=16, **settings)

"""Trees of a fixed shape: the file's checks, and drafters that follow it."""

from __future__ import annotations

import json

import pytest

from minispec.config import EngineConfig
from minispec.drafters.fixed_tree import TreeShape
from minispec.errors import ConfigError
from minispec.load import load_engine, preflight
from minispec.request import SamplingParams, SpeculationParams
from minispec.tree import MAX_NODES
from scripted import generate, run
from test_speculation_is_invisible import alone
from tiny_engine import tiny_engine
from tiny_folders import tiny_folder

CHOICES = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 0, 1]]


def test_a_shape():
    shape = TreeShape.of(CHOICES)
    assert (shape.depth, shape.children, shape.width) == (3, 3, 2)
    assert shape.parents == {(), (0,), (2,), (0, 0)}
    flat = TreeShape.of([[0], [1]])
    assert (flat.depth, flat.children, flat.width) == (1, 2, 0)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([[0], "a"], r"entry 1 is 'a'"),
        ([[0], []], r"entry 1 is \[\]"),
        ([[0], [-1]], r"entry 1 is \[-1\]"),
        ([[0], [True]], r"entry 1 is \[True\]"),
        ([[0], [0.0]], r"entry 1 is \[0\.0\]"),
        ([[MAX_NODES]], rf"entry 0 .* ranks go up to {MAX_NODES - 1}"),
        ([[0], [1], [0]], r"entry 2 is \[0\], and so is entry 0"),
        ([[0], [1, 0]], r"entry 1 is \[1, 0\], but its parent \[1\] is no entry"),
        ([], "1 to 255 nodes besides its root, not 0"),
        ([[i] for i in range(MAX_NODES)], "1 to 255 nodes besides its root, not 256"),
    ],
)
def test_entries_are_checked(entries, message):
    with pytest.raises(ConfigError, match=f"t.json: .*{message}"):
        TreeShape.of(entries, "t.json")


def test_a_parent_may_come_after_its_child():
    assert TreeShape.of([[0, 0], [0]]).depth == 2


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ("[[0]", "cannot be read"), ("{}", "a dict")]
)
def test_files_are_checked(tmp_path, content, message):
    path = tmp_path / "tree.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        TreeShape.from_file(path)


def test_a_shape_deeper_than_the_drafter_names_the_entry():
    shape = TreeShape.of([[0], [0, 0], [0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1, 0]])
    shape.require_depth(5, "x")
    with pytest.raises(ConfigError, match=r"entry \[0, 0, 0, 1, 0\] of depth 5; x drafts 3 deep"):
        shape.require_depth(3, "x")


def test_over_layers():
    layers = [[(10, -0.1), (11, -1.0), (12, -2.0)], [(20, -0.1), (21, -1.0)]]
    tree = TreeShape.of(CHOICES).over(5, layers, 16)
    assert tree.tokens == (5, 10, 11, 12, 20, 21, 20)
    assert tree.parents == (-1, 0, 0, 0, 1, 1, 3)
    assert TreeShape.of(CHOICES).over(5, layers, 3).tokens == (5, 10, 20)
    assert len(TreeShape.of(CHOICES).over(5, [], 16)) == 1


@pytest.mark.parametrize("mode", [{"temperature": 0.0}, {"temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["itself", "other", "layers"])
def test_growing_drafters_follow_it(draft, mode):
    engine = tiny_engine(draft, max_slots=3)
    engine.drafter.follow(TreeShape.of(CHOICES))
    prompts = [(5, 6, 7), tuple(range(30)), (9,)]
    trace = SpeculationParams(trace=True)
    params = [SamplingParams(**mode, max_tokens=24, seed=i) for i in range(3)]
    traced = [SamplingParams(**mode, max_tokens=24, seed=i, speculation=trace) for i in range(3)]
    shapes = []
    propose = engine.drafter.propose

    def noting(slots, max_nodes):
        trees = propose(slots, max_nodes)
        shapes.extend(tree for slot, tree in zip(slots, trees, strict=True) if slot.request.remaining > 4)
        return trees

    engine.drafter.propose = noting
    for request, prompt, one in zip(run(engine, prompts, traced), prompts, params, strict=True):
        assert request.output == alone(prompt, one)
    whole = [tree for tree in shapes if len(tree) > 1]
    assert whole
    for tree in whole:
        degree = [sum(parent == node for parent in tree.parents) for node in range(len(tree))]
        assert degree[0] == 3 and sorted(degree, reverse=True) == [3, 2, 1, 1, 0, 0, 0, 0] and max(tree.depth) == 3


@pytest.mark.parametrize("draft", ["small", "eagle3"])
def test_ranks_above_the_vocabulary_and_layers_of_many_nodes(draft):
    """No node has more children than the draft has tokens, and no more pages are asked for than such a tree needs."""
    engine = tiny_engine(draft, pages=40, page_size=8)
    wide = [[rank] for rank in range(120)] + [[rank, 0] for rank in range(30)]
    engine.drafter.follow(TreeShape.of([*wide, *([0] * depth for depth in range(3, 30))]))
    request = generate(engine, (5, 6, 7), max_tokens=40)
    assert request.output == alone((5, 6, 7), SamplingParams(temperature=0.0, max_tokens=40))
    assert request.speculation.drafted > 0


def test_the_target_drafting_for_itself_takes_the_first_ranks():
    engine = tiny_engine("itself")
    engine.drafter.follow(TreeShape.of([[0], [0, 0], [0, 0, 0]]))
    stats = generate(engine, (5, 6, 7), max_tokens=41).speculation
    assert (stats.steps, stats.drafted, stats.accepted) == (10, 30, 30)


def test_from_settings(tmp_path):
    target, path = tiny_folder(tmp_path / "target", layers=3), tmp_path / "tree.json"
    path.write_text(json.dumps(CHOICES))

    def config(draft, tree=path):
        return EngineConfig(
            target=str(target), draft=draft, tree=str(tree), device="cpu", dtype="float32", max_context=64,
            page_size=8, tree_budget=32,
        )  # fmt: skip

    engine = load_engine(config("layers:1,suffix"))
    assert engine.drafter.members[0]._shape == TreeShape.of(CHOICES)
    assert generate(engine, [1, 2, 3], max_tokens=20, ignore_eos=True).num_output == 20
    for draft in ("ngram", "suffix,ngram", "auto", "none"):
        with pytest.raises(ConfigError, match="draws no ranks"):
            preflight(config(draft))
    with pytest.raises(ConfigError, match="cannot be read"):
        preflight(config("layers:1", tmp_path / "absent.json"))

"""Union: merging trees, dividing the budget, and every member's view of it."""

from __future__ import annotations

import math

import pytest
import torch

from minispec.drafters.base import BaseDrafter
from minispec.drafters.ngram import NgramDrafter
from minispec.drafters.suffix import SuffixDrafter
from minispec.drafters.union import UnionDrafter
from minispec.model.llama import Tapped, Taps
from minispec.request import Request, SamplingParams, SpeculationParams
from minispec.scheduler import Slot
from minispec.tree import MAX_NODES, DraftTree
from minispec.verify import verify
from scripted import generate, run, scripted_engine, table


class Fixed(BaseDrafter):
    """Proposes the same tree (nodes behind the root) every time and notes what it is told."""

    def __init__(self, name, tokens=(), parents=(), probabilities=None, taps=()):
        self.name, self.taps = name, taps
        self.tokens, self.parents = tuple(tokens), tuple(parents)
        self.probabilities = probabilities or [0.5] * len(tokens)
        self.calls, self.asked, self.seen = [], [], []

    def begin(self, slot):
        self.calls.append("begin")

    def end(self, slot):
        self.calls.append("end")

    def propose(self, slots, max_nodes):
        self.asked.append(tuple(max_nodes))
        values = [0.0]
        for parent, probability in zip(self.parents, self.probabilities, strict=True):
            values.append(values[parent] + math.log(probability))
        trees = [
            DraftTree((slot.request.tokens[-1], *self.tokens), (-1, *self.parents), tuple(values)) for slot in slots
        ]
        return [tree.best(count) for tree, count in zip(trees, max_nodes, strict=True)]

    def observe(self, slot, tapped):
        self.seen.append(tapped)

    def accept(self, slot, tree, acceptance):
        self.calls.append((tree.tokens, acceptance.path))


def slot_for(**speculation):
    params = SamplingParams(speculation=SpeculationParams(**speculation))
    return Slot(0, Request("r", (5,), params, limit=100))


def begun(*members, **speculation):
    union, slot = UnionDrafter(members), slot_for(**speculation)
    union.begin(slot)
    return union, slot


def paths(tree):
    return {tuple(tree.tokens[j] for j in tree.path(i)[1:]) for i in range(1, len(tree))}


def test_the_same_child_is_one_node():
    union, slot = begun(Fixed("a", [1, 2, 3], [0, 1, 0]), Fixed("b", [3, 1, 2, 7], [0, 0, 2, 3], [0.9] * 4))
    [tree] = union.propose([slot], [16])
    assert paths(tree) == {(1,), (1, 2), (1, 2, 7), (3,)}
    names = dict(zip([tuple(tree.tokens[j] for j in tree.path(i)[1:]) for i in range(len(tree))],
                     union.sources(slot, tree), strict=True))  # fmt: skip
    assert names[1,] == names[3,] == names[1, 2] == ("a", "b") and names[1, 2, 7] == ("b",)
    # the likelier estimate counts
    assert math.exp(tree.values[tree.tokens.index(3)]) > 0.8


def test_sources_of_a_cut_tree():
    union, slot = begun(Fixed("a", [1, 2], [0, 1], [0.9, 0.9]), Fixed("b", [3], [0], [0.2]))
    [tree] = union.propose([slot], [16])
    assert union.sources(slot, tree.best(3))[1:] == [("a",), ("a",)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_budget_holds_for_all_together(count):
    union, slot = begun(Fixed("a", [1, 2, 3], [0, 1, 2]), Fixed("b", [4, 5, 6], [0, 1, 2]))
    [tree] = union.propose([slot], [count])
    assert len(tree) == count


def test_merged_trees_fit_into_one():
    many = range(1, MAX_NODES)
    union, slot = begun(
        Fixed("a", many, [0] * len(many), [0.001] * len(many)),
        Fixed("b", [n + 1000 for n in many], [0] * len(many), [0.001] * len(many)),
    )
    [tree] = union.propose([slot], [MAX_NODES])
    assert len(tree) == MAX_NODES


def test_the_budget_follows_success():
    """Whoever is right gets the nodes, though the other thinks more of itself."""
    modest, boastful = (
        Fixed("modest", [1, 2, 3], [0, 1, 2], [0.4] * 3),
        Fixed("boastful", [7, 8, 9], [0, 1, 2], [0.95] * 3),
    )
    union, slot = begun(modest, boastful)
    [before] = union.propose([slot], [4])
    assert paths(before) == {(7,), (7, 8), (7, 8, 9)}
    for _ in range(30):
        [tree] = union.propose([slot], [12])
        follows = {5: 1, 1: 2, 2: 3}
        union.accept(slot, tree, verify(tree, [follows.get(token, 0) for token in tree.tokens]))
    [after] = union.propose([slot], [4])
    assert paths(after) == {(1,), (1, 2), (1, 2, 3)}
    assert modest.asked[-1] == (4,) and boastful.asked[-1] == (2,), "the unsuccessful is still asked for a little"
    other = slot_for()
    union.begin(other)
    [elsewhere] = union.propose([other], [4])
    assert paths(elsewhere) >= {(1,), (1, 2)}, "a new request starts from what the others taught"


def test_members_share_the_slots_life():
    a, b = Fixed("a", [1], [0]), Fixed("b", [2], [0])
    union, slot = begun(a, b)
    [tree] = union.propose([slot], [8])
    acceptance = verify(tree, [2] * len(tree))
    union.accept(slot, tree, acceptance)
    union.end(slot)
    assert a.calls == b.calls == ["begin", (tree.tokens, acceptance.path), "end"]


def test_a_request_chooses_among_members():
    a, b = Fixed("a", [1], [0]), Fixed("b", [2], [0])
    union, slot = begun(a, b, drafters=("b",))
    everyone = slot_for()
    union.begin(everyone)
    first, second = union.propose([slot, everyone], [8, 8])
    assert paths(first) == {(2,)} and paths(second) == {(1,), (2,)}
    none = slot_for(drafters=())
    union.begin(none)
    assert len(union.propose([none], [8])[0]) == 1


def test_a_member_at_depth_0_is_left_out_and_keeps_its_standing():
    a, b = Fixed("a", [1], [0]), Fixed("b", [2], [0])
    union, slot = begun(a, b)
    b.depth_limit = 0
    for _ in range(50):
        [tree] = union.propose([slot], [8])
        assert paths(tree) == {(1,)}
        union.accept(slot, tree, verify(tree, [1] * len(tree)))
    assert b.asked == []
    b.depth_limit = 4
    union.propose([slot], [8])
    assert b.asked == [(8,)]
    assert a.seconds > 0 and b.seconds > 0


@pytest.mark.parametrize("cheap", [NgramDrafter, SuffixDrafter])
def test_a_member_left_out_learns_nothing_from_others(cheap):
    """Its last proposal is over, though the others propose the same again."""
    lookup = cheap()
    union = UnionDrafter([lookup, Fixed("b", [6, 7], [0, 1])])
    slot = Slot(0, Request("r", (5, 6, 7, 5), SamplingParams(), limit=100))
    union.begin(slot)
    [tree] = union.propose([slot], [8])
    wrong = verify(tree, [9] * len(tree))
    union.accept(slot, tree, wrong)
    lookup.depth_limit = 0
    for _ in range(50):
        [tree] = union.propose([slot], [8])
        union.accept(slot, tree, wrong)
    lookup.depth_limit = 4
    [tree] = lookup.propose([slot], [8])
    assert math.exp(tree.values[1]) > 0.05


def test_members_get_the_hidden_states_they_tap():
    a, b, c = Fixed("a", taps=(1, 4)), Fixed("b"), Fixed("c", taps=(2, 4))
    union, slot = begun(a, b, c)
    assert union.taps == (1, 2, 4)
    one, two, four = torch.full((3, 2), 1.0), torch.full((3, 2), 2.0), torch.full((3, 2), 4.0)
    taps = Taps(union.taps)
    for layer, stream in zip(union.taps, (one, two, four), strict=True):
        taps.see(layer, stream)
    union.observe(slot, Tapped(taps, range(1, 3)))
    assert torch.equal(a.seen[0].features, torch.cat([one, four], dim=-1)[1:])
    assert torch.equal(c.seen[0].features, torch.cat([two, four], dim=-1)[1:]) and b.seen == []


def test_invalid_rows_are_summed():
    a, b = Fixed("a"), Fixed("b")
    a.invalid, b.invalid = 2, 3
    assert UnionDrafter([a, b]).invalid == 5
    assert UnionDrafter([a, b]).members == (a, b)


def test_what_is_no_union():
    with pytest.raises(ValueError, match="two drafters or more"):
        UnionDrafter([Fixed("a")])
    with pytest.raises(ValueError, match="each once"):
        UnionDrafter([Fixed("a"), Fixed("a")])


def test_through_the_engine():
    drafter = UnionDrafter([NgramDrafter(), SuffixDrafter()])
    script = table(lambda prefix: (prefix[-1] + 1) % 12, 12)
    engine = scripted_engine(script, 12, drafter, pages=12, max_slots=4)
    requests = run(engine, [[i] for i in range(6)], [SamplingParams(max_tokens=30, temperature=0)] * 6)
    assert engine.stats.preemptions > 0 and drafter._states == {}
    for i, request in enumerate(requests):
        assert request.output == [(i + 1 + n) % 12 for n in range(30)]
    again = generate(scripted_engine(script, 12, drafter), [3], max_tokens=12)
    assert again.speculation.steps <= 2

"""Suffix decoding: the tree against counting by hand, what is shared with whom, and the drafts that come of it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from minispec.drafters.suffix import MAX_CONTEXT, SuffixDrafter
from minispec.drafters.suffix_tree import Node, Place, Reader, SharedTrees, SuffixTree
from minispec.request import FinishReason, Request, SamplingParams
from minispec.scheduler import Slot
from minispec.verify import verify
from scripted import generate, run, scripted_engine, table


def occurrences(texts, string):
    """How often a string stands in the texts."""
    n = len(string)
    return sum(tuple(text[i : i + n]) == string for text in texts for i in range(len(text) - n + 1))


def check_counts(tree: SuffixTree, texts):
    """Every node's count, and every pointer, is what counting by hand gives; every string in the texts is found."""
    strings = {
        tuple(text[i : i + n])
        for text in texts
        for i in range(len(text))
        for n in range(1, min(tree.max_depth, len(text) - i) + 1)
    }

    def walk(node: Node, string):
        if string:
            assert node.count == occurrences(texts, string)
        if node.children is None:
            n = len(string)
            assert tuple(node.text[node.at - n : node.at]) == string
            return
        for token, child in node.children.items():
            walk(child, (*string, token))

    walk(tree.root, ())
    for string in strings:
        place = Place.of(tree.root)
        for token in string:
            place = place.follow(token)
            assert place is not None, string


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("alphabet", [1, 2, 4, 30])
def test_counts_are_those_of_all_strings(alphabet, seed):
    rng = random.Random(seed)
    tree = SuffixTree(max_depth=6)
    texts = [tuple(rng.randrange(alphabet) for _ in range(rng.randrange(1, 40))) for _ in range(4)]
    for text in texts:
        tree.add(text)
    check_counts(tree, texts)
    while texts:
        tree.remove(texts.pop(rng.randrange(len(texts))))
        check_counts(tree, texts)
    assert not tree.root.children


@pytest.mark.parametrize("seed", range(10))
def test_a_growing_text_is_read_piece_by_piece(seed):
    rng = random.Random(seed)
    text: list[int] = []
    tree = SuffixTree(max_depth=5)
    reader = Reader(tree, text)
    for _ in range(12):
        text += [rng.randrange(3) for _ in range(rng.randrange(5))]
        reader.advance(len(text))
        check_counts(tree, [text])


def test_matches_are_the_ends_that_occurred_before_with_a_continuation():
    text = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    tree = SuffixTree()
    reader = Reader(tree, text)
    reader.advance(len(text))
    found = tree.matches(text, longest=8)
    # "3" occurs as often as "2 3" and says no more
    assert [length for length, _ in found] == [3, 2]
    assert [sorted(token for token, _ in place.next()) for _, place in found] == [[9], [8, 9]]
    assert tree.matches([7], longest=8) == []
    text.append(7)
    reader.advance(len(text))
    assert tree.matches(text, longest=8) == [], "a token does not find itself"


def test_a_leaf_follows_the_text_it_points_into():
    text = [1, 2]
    tree = SuffixTree()
    reader = Reader(tree, text)
    reader.advance(2)
    text += [3, 4, 1]
    [(_, place)] = tree.matches([1], longest=1)
    drafted = []
    while following := list(place.next()):
        [(token, place)] = following
        drafted.append(token)
    assert drafted == [2, 3, 4, 1]


def count_nodes(node: Node) -> int:
    return 1 + sum(map(count_nodes, (node.children or {}).values()))


def test_nodes_stay_few():
    rng = random.Random(0)
    novel = [rng.randrange(20_000) for _ in range(5000)]
    tree = SuffixTree()
    tree.add(novel)
    assert count_nodes(tree.root) < 2 * len(novel)
    tree = SuffixTree()
    tree.add([7] * 5000)
    assert count_nodes(tree.root) == tree.max_depth + 1


def test_finished_texts_are_bounded_and_the_least_used_goes_first():
    trees = SharedTrees(capacity=40)
    texts = [[100 + 10 * i + j for j in range(10)] for i in range(5)]
    for text in texts[:4]:
        trees.add("a", text)
    trees.read(40)
    assert trees.tokens == 40
    [(_, place)] = trees.tree("a").matches(texts[0][:1], 4)
    trees.touch(place.text)
    trees.add("b", texts[4])
    trees.read(10)
    assert trees.tokens == 40
    known = [bool(trees.tree("a").matches(text[:1], 4)) for text in texts[:4]]
    assert known == [True, False, True, True]
    assert trees.tree("b").matches(texts[4][:1], 4) and not trees.tree("a").matches(texts[4][:1], 4)
    trees.add("b", list(range(1000)))
    assert trees.tokens <= 40
    for i in range(5):
        trees.add("b", [i] * 10)
    assert trees.tree("a") is None, "an owner without texts leaves nothing behind"


@pytest.mark.parametrize("seed", range(20))
def test_finished_texts_are_read_a_piece_at_a_time(seed):
    """Whatever is read when: in the end the trees count what the texts hold."""
    rng = random.Random(seed)
    trees = SharedTrees(capacity=60)
    for _ in range(40):
        trees.add(rng.choice("ab"), [rng.randrange(3) for _ in range(rng.randrange(16))])
        trees.read(rng.choice([0, 1, 5, 30]))
    assert trees.tokens <= 60
    trees.read(60)
    for owner in "ab":
        texts = [list(text) for whose, text in trees._texts.values() if whose == owner]
        if texts:
            check_counts(trees.tree(owner), texts)
        else:
            assert trees.tree(owner) is None


def test_reading_finished_texts_is_spread_over_proposals():
    trees = SharedTrees(capacity=400)
    trees.add("a", list(range(100)))
    trees.add("a", list(range(100, 200)))
    for read, known in ((30, 30), (60, 90), (60, 149), (60, 198)):  # nothing follows a text's last token
        trees.read(read)
        assert sum(bool(trees.tree("a").matches([token], 1)) for token in range(200)) == known


def slot_for(tokens, owner="", prompt=None):
    request = Request("r", tuple(tokens if prompt is None else prompt), SamplingParams(), limit=100, owner=owner)
    return Slot(0, request)


def finish(drafter, prompt, output, *, reason=FinishReason.STOP, owner=""):
    slot = slot_for(prompt, owner)
    drafter.begin(slot)
    slot.request.tokens += output
    slot.request.finish_reason = reason
    drafter.end(slot)


def proposal(drafter, tokens, owner="", count=16):
    slot = slot_for(tokens, owner)
    drafter.begin(slot)
    [tree] = drafter.propose([slot], [count])
    return tree


ANSWER = list(range(50, 70))


def test_a_finished_answer_is_drafted_for_the_same_owner_only():
    drafter = SuffixDrafter()
    finish(drafter, [1, 2, 3], ANSWER, owner="ann")
    assert list(proposal(drafter, [9, 50, 51], "ann").tokens) == ANSWER[1:17]
    assert len(proposal(drafter, [9, 50, 51], "bob")) == 1
    assert len(proposal(drafter, [9, 50, 51])) == 1
    assert len(proposal(drafter, [9, 1, 2], "ann")) == 1, "prompts are not learned"


@pytest.mark.parametrize("reason", [None, FinishReason.ABORT, FinishReason.ERROR])
def test_unfinished_answers_are_not_learned(reason):
    drafter = SuffixDrafter()
    finish(drafter, [1, 2, 3], ANSWER, reason=reason)
    assert len(proposal(drafter, [9, 50, 51])) == 1


def test_likelier_continuations_come_first():
    #  after 1 2: twice 3, once 4; after a lone 2 also 5
    text = [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 4, 9, 2, 5, 1, 2]
    tree = proposal(SuffixDrafter(), text, count=40)
    children = {tree.tokens[i]: tree.values[i] for i in range(1, len(tree)) if tree.parents[i] == 0}
    assert set(children) == {3, 4, 5}
    assert children[3] > children[4] > children[5]
    assert all(tree.values[i] >= tree.values[i + 1] for i in range(len(tree) - 1)), "grown best-first"


def test_the_budget_is_kept():
    for count in (1, 2, 5):
        assert len(proposal(SuffixDrafter(), [1, 2, 3, 4] * 5, count=count)) == count


def test_rates_learn_from_what_was_accepted():
    drafter = SuffixDrafter()
    slot = slot_for([1, 2, 3, 4, 1, 2])
    drafter.begin(slot)
    before = drafter.propose([slot], [3])[0]
    for _ in range(20):
        [tree] = drafter.propose([slot], [3])
        drafter.accept(slot, tree, verify(tree, [9] * len(tree)))
    [tree] = drafter.propose([slot], [3])
    assert tree.tokens == before.tokens and tree.values[1] < before.values[1] - 1
    other = slot_for([1, 2, 3, 4, 1, 2])
    drafter.begin(other)
    [elsewhere] = drafter.propose([other], [3])
    assert before.values[1] > elsewhere.values[1] > tree.values[1], "other requests learn more slowly"


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
    monkeypatch.setattr("minispec.drafters.suffix.READ_AT_ONCE", 10)
    drafter = SuffixDrafter()
    slot = slot_for([*range(30), 5])
    drafter.begin(slot)
    sizes = [len(drafter.propose([slot], [4])[0]) for _ in range(3)]
    assert sizes == [4, 4, 4] and drafter._states[slot].reader.read == 30


def test_contexts_longer_than_the_limit_are_one_kind():
    text = [*range(40), *range(20)]
    tree = proposal(SuffixDrafter(), text, count=20)
    assert list(tree.tokens) == list(range(19, 39))
    drops = [a - b for a, b in pairwise(tree.values)]
    assert len({round(drop, 6) for drop in drops}) == 1 and MAX_CONTEXT < 20


def cycle(prefix):
    return (prefix[-1] + 1) % 12


def test_a_second_answer_takes_fewer_steps():
    engine = scripted_engine(table(cycle, 12), 12, SuffixDrafter(), max_slots=2)
    first = generate(engine, [3], max_tokens=12)
    second = generate(engine, [3], max_tokens=12)
    assert first.output == second.output == [(4 + i) % 12 for i in range(12)]
    assert first.speculation.steps == 11 and second.speculation.steps <= 2


def test_slots_leave_nothing_behind():
    drafter = SuffixDrafter(capacity=100)
    engine = scripted_engine(table(cycle, 12), 12, drafter, pages=12, max_slots=4)
    requests = run(engine, [[i] for i in range(6)], [SamplingParams(max_tokens=30, temperature=0)] * 6)
    assert engine.stats.preemptions > 0 and all(r.num_output == 30 for r in requests)
    assert drafter._states == {} and drafter._finished.tokens <= 100

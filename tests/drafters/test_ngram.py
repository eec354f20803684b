"""Drafts looked up in the text itself."""

from __future__ import annotations

import math
import random

import pytest

from minispec.drafters import ngram
from minispec.drafters.ngram import MAX_AGREEMENT, MAX_DEPTH, MAX_OCCURRENCES, NgramDrafter, Rates
from minispec.request import Request, SamplingParams
from minispec.scheduler import Slot
from minispec.tree import DraftTree
from minispec.verify import Acceptance, verify
from scripted import generate, scripted_engine, table


def slot_of(tokens) -> Slot:
    request = Request(id="r", prompt=tuple(tokens[:1]), params=SamplingParams(), limit=100_000)
    request.tokens = list(tokens)
    return Slot(0, request)


def begun(tokens) -> tuple[NgramDrafter, Slot]:
    drafter, slot = NgramDrafter(), slot_of(tokens)
    drafter.begin(slot)
    return drafter, slot


def propose(drafter: NgramDrafter, slot: Slot, max_nodes: int = 64) -> DraftTree:
    [tree] = drafter.propose([slot], [max_nodes])
    assert tree.tokens[0] == slot.request.tokens[-1] and len(tree) <= max(max_nodes, 1)
    # grown best-first: values fall from node to node, not only along a path
    assert list(tree.values) == sorted(tree.values, reverse=True)
    assert all(value < 0 for value in tree.values[1:])
    return tree


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """The token paths from the root to each leaf."""
    return {tuple(tree.tokens[i] for i in tree.path(n)[1:]) for n in range(1, len(tree)) if not tree.children[n]}


@pytest.mark.parametrize("text", [[5], [1, 2, 3, 4], [1, 1, 1, 2]])
def test_a_token_that_did_not_occur_before_gets_no_draft(text):
    """The last token must not find itself."""
    assert propose(*begun(text)) == DraftTree.root(text[-1])


def test_what_followed_last_time_follows_up_to_the_end_of_the_text():
    assert paths(propose(*begun([1, 2, 3, 4, 5, 9, 2]))) == {(3, 4, 5, 9, 2)}


def test_several_continuations_branch_and_share_their_beginning():
    #              1  2 → 3 4,        1  2 → 3 5,        9  2 → 7
    drafter, slot = begun([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 9, 2, 7, 8, 1, 2])
    tree = propose(drafter, slot)
    assert set(tree.children[0]) == {3, 7}
    three = tree.children[0][3]
    assert set(tree.children[three]) == {4, 5}  # both at equal odds
    assert tree.values[tree.children[three][4]] == tree.values[tree.children[three][5]]


def test_the_longest_agreement_comes_first():
    """After (5, 6, 2) came 30, after the bare 2 came 40, more often and more recently."""
    drafter, slot = begun([5, 6, 2, 30, 7, 2, 40, 8, 2, 40, 5, 6, 2])
    tree = propose(drafter, slot)
    assert tree.tokens[1] == 30
    assert tree.values[tree.children[0][30]] > tree.values[tree.children[0][40]]


def test_a_repetition_is_followed_as_deep_as_there_is_text():
    tree = propose(*begun([1, 2] * 6))
    assert tree.tokens[:5] == (2, 1, 2, 1, 2)
    tree = propose(*begun([7] * 100), max_nodes=256)
    assert max(tree.depth) == MAX_DEPTH and set(tree.tokens) == {7}


def test_what_is_not_worth_a_row_is_not_proposed_but_the_likeliest_is():
    drafter, slot = begun([5, 6, 2, 30, 7, 2, 40, 8, 2, 40, 5, 6, 2])
    whole = propose(drafter, slot)
    drafter.least_node = math.exp(whole.values[2]) * 1.01  # more than what comes second
    assert propose(drafter, slot) == whole.keep([0, 1])
    drafter.least_node = 1.0
    assert propose(drafter, slot) == whole.keep([0, 1])
    drafter.least_node = math.exp(whole.values[3]) * 0.99
    assert len(propose(drafter, slot)) >= 4


@pytest.mark.parametrize("most", [1, 2, 3, 5, 17])
def test_max_nodes_is_honoured(most):
    rng = random.Random(0)
    drafter, slot = begun([rng.randrange(3) for _ in range(200)])
    tree = propose(drafter, slot, most)
    assert len(tree) == most
    whole = propose(drafter, slot, 100)
    assert tree.tokens == whole.tokens[:most] and tree.parents == whole.parents[:most]


def test_slots_do_not_see_each_other():
    drafter = NgramDrafter()
    slots = [slot_of([1, 2, 3, 1]), slot_of([1, 5, 6, 1]), slot_of([9, 8, 1])]
    for slot in slots:
        drafter.begin(slot)
    trees = drafter.propose(slots, [2, 3, 4])
    assert [tree.tokens for tree in trees] == [(1, 2), (1, 5, 6), (1,)]


def test_new_text_is_found_as_it_grows():
    drafter, slot = begun([1, 2])
    text = slot.request.tokens
    for tokens, expected in [([3, 1], (1, 2, 3, 1)), ([2], (2, 3, 1, 2)), ([4, 1], (1, 2))]:
        text += tokens
        assert propose(drafter, slot).tokens[: len(expected)] == expected


def test_a_slot_that_begins_anew_knows_nothing_of_before():
    drafter, slot = begun([1, 2, 3, 1])
    assert len(propose(drafter, slot)) > 1
    drafter.end(slot)
    with pytest.raises(KeyError):
        drafter.propose([slot], [4])
    again = slot_of([1, 9, 9, 8, 1])
    drafter.begin(again)
    assert paths(propose(drafter, again)) == {(9, 9, 8, 1)}
    drafter.begin(slot)  # as after a preemption: the same request, longer meanwhile
    slot.request.tokens += [5, 6, 1]
    assert {path[0] for path in paths(propose(drafter, slot))} == {2, 5}


def test_first_guesses_grow_with_the_agreement():
    prior = Rates.prior()
    rates = [prior.rate(n) for n in range(1, MAX_AGREEMENT + 1)]
    assert rates == sorted(rates) and rates[0] == pytest.approx(0.15) and 0.8 < rates[-1] < 0.85


def answer(drafter: NgramDrafter, slot: Slot, tree: DraftTree, right: bool) -> None:
    """Let the target agree with the likeliest path, or with nothing."""
    samples = [next(iter(tree.children[i]), 0) if right else 99 for i in range(len(tree))]
    drafter.accept(slot, tree, verify(tree, samples))


@pytest.mark.parametrize("right", [True, False])
def test_rates_follow_what_happens(right):
    drafter, slot = begun([1, 2, 3, 1])
    before = propose(drafter, slot)
    first = before.values[1]
    assert math.exp(first) == pytest.approx(0.15)
    for _ in range(30):
        answer(drafter, slot, propose(drafter, slot), right)
    after = propose(drafter, slot).values[1]
    assert math.exp(after) > 0.85 if right else math.exp(after) < 0.02
    # the whole server learned too: a new text starts from there, less sure than the one it was learned on
    other = slot_of([4, 5, 6, 4])
    drafter.begin(other)
    new = propose(drafter, other).values[1]
    assert (first < new <= after) if right else (first > new >= after)


def test_the_children_of_rejected_nodes_count_neither_way():
    drafter, slot = begun([1, 2, 3, 4, 1])
    tree = propose(drafter, slot)
    drafter.accept(slot, tree, Acceptance((0,), (99,)))
    text = drafter._texts[slot]
    assert sum(text.tries) == 1 and sum(text.hits) == 0  # the first node was wrong; nothing is known of those behind
    tree = propose(drafter, slot)
    drafter.accept(slot, tree, verify(tree, [2, 99, 99, 99, 99]))
    assert sum(text.tries) == 1 + 2 and sum(text.hits) == 1


def test_only_verified_nodes_count():
    drafter, slot = begun([1, 2, 3, 4, 1])
    root = propose(drafter, slot).best(1)
    drafter.accept(slot, root, Acceptance((0,), (2,)))
    assert sum(drafter._texts[slot].tries) == 0


def test_a_rate_is_never_certain():
    drafter, slot = begun([1, 2, 3, 1])
    text = drafter._texts[slot]
    for counts in (text, drafter._rates):
        counts.tries = [1e6] * (MAX_AGREEMENT + 1)
        counts.hits = [1e6] * (MAX_AGREEMENT + 1)
    assert propose(drafter, slot).values[1] == pytest.approx(math.log(0.995))
    text.hits = drafter._rates.hits = [0.0] * (MAX_AGREEMENT + 1)
    assert propose(drafter, slot).values[1] == pytest.approx(math.log(1e-3))


class Counting(list):
    """A text that counts how often it is looked at."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("alphabet", [1, 2, 50])
def test_a_long_text_costs_no_more_than_a_short_one(alphabet):
    rng = random.Random(1)
    drafter, slot = begun([0])
    tokens = slot.request.tokens = Counting(rng.randrange(alphabet) for _ in range(10_000))
    drafter.propose([slot], [64])
    assert tokens.reads < 10_000 + 64 * MAX_OCCURRENCES + 3 * MAX_AGREEMENT * MAX_OCCURRENCES  # reads the text once
    for _ in range(20):
        tokens.append(rng.randrange(alphabet))
        tokens.reads = 0
        drafter.propose([slot], [64])
        assert tokens.reads < 64 * MAX_OCCURRENCES + 3 * MAX_AGREEMENT * MAX_OCCURRENCES + 20


def test_only_recent_occurrences_are_looked_at(monkeypatch):
    monkeypatch.setattr(ngram, "MAX_OCCURRENCES", 2)
    drafter, slot = begun([1, 20, 1, 30, 1, 40, 1])
    assert set(propose(drafter, slot).children[0]) == {30, 40}


def test_slots_come_and_go_under_the_engine():
    """A repeating text under an engine that preempts: every state that began has ended."""
    drafter = NgramDrafter()
    engine = scripted_engine(
        table(lambda p: (p[-1] + 1) % 5, 8), 8, drafter, pages=18, max_context=60, max_slots=2, max_step_tokens=16
    )
    for first in range(3):
        engine.add(engine.make_request([first] * 20, SamplingParams(max_tokens=30, temperature=0)))
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.stats.preemptions > 0 and drafter._texts == {}
    assert engine.stats.accepted > 0.5 * engine.stats.drafted > 10
    repeated = generate(engine, [0, 1, 2, 3, 4] * 4, max_tokens=30)
    assert repeated.output == [i % 5 for i in range(30)] and repeated.speculation.steps < 10

"""Forced chains joined with a drafter's tree."""

from __future__ import annotations

from minispec.guide import SOURCE, Guided
from minispec.tree import DraftTree
from minispec.verify import Acceptance, verify

DRAFTED = DraftTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 3), (0.0, -0.5, -1.0, -1.5, -2.0))


def test_without_a_grammar_nothing_changes() -> None:
    guided = Guided.merge(DRAFTED, ())
    assert guided.tree is DRAFTED and guided.sources([("a",)] * 5) == [("a",)] * 5
    assert guided.drafters_part(Acceptance((0, 1), (1, 7))) == Acceptance((0, 1), (1, 7))


def test_a_chain_that_begins_as_the_draft_does() -> None:
    """1, 3 are the drafter's own, 5 and 6 are new; the drafter's nodes keep their places; what is sure has value 0."""
    guided = Guided.merge(DRAFTED, (1, 3, 5, 6))
    assert guided.tree.tokens == (9, 1, 2, 3, 4, 5, 6)
    assert guided.tree.parents == (-1, 0, 0, 1, 3, 3, 5)
    assert guided.tree.values == (0.0, 0.0, -1.0, 0.0, -2.0, 0.0, 0.0)
    assert guided.chain == (1, 3, 5, 6)
    sources = guided.sources([("a",)] * 5)
    assert sources == [("a",), ("a", SOURCE), ("a",), ("a", SOURCE), ("a",), (SOURCE,), (SOURCE,)]


def test_the_drafter_learns_of_its_own_nodes_only() -> None:
    guided = Guided.merge(DRAFTED, (1, 3, 5, 6))
    samples = [1, 3, 0, 5, 0, 6, 8]  # after each node
    acceptance = verify(guided.tree, samples)
    assert acceptance == Acceptance((0, 1, 3, 5, 6), (1, 3, 5, 6, 8))
    assert guided.drafters_part(acceptance) == verify(DRAFTED, samples[:5]) == Acceptance((0, 1, 3), (1, 3, 5))


def test_a_chain_beside_the_draft() -> None:
    guided = Guided.merge(DraftTree.root(9), (5, 6))
    assert guided.tree == DraftTree((9, 5, 6), (-1, 0, 1), (0.0,) * 3)
    assert guided.drafters_part(verify(guided.tree, [5, 6, 7])) == Acceptance((0,), (5,))

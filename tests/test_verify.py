from __future__ import annotations

import pytest

from minispec.tree import DraftTree
from minispec.verify import Acceptance, verify

TREE = DraftTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 3), (0.0, -1, -1, -2, -3))  # 9 → {1 → 3 → 4, 2}


@pytest.mark.parametrize(
    ("samples", "path", "tokens"),
    [
        ([7, 0, 0, 0, 0], (0,), (7,)),  # no child carries 7: it is the bonus
        ([2, 0, 5, 0, 0], (0, 2), (2, 5)),
        ([1, 8, 0, 0, 0], (0, 1), (1, 8)),
        ([1, 3, 0, 4, 6], (0, 1, 3, 4), (1, 3, 4, 6)),
        ([1, 3, 0, 9, 6], (0, 1, 3), (1, 3, 9)),
    ],
)
def test_walk(samples, path, tokens):
    assert verify(TREE, samples) == Acceptance(path, tokens)


def test_only_what_the_target_wants_is_accepted():
    """However likely a draft is, it is accepted only if the target's own token is that draft."""
    assert verify(DraftTree((9, 0, 1), (-1, 0, 0), (0.0, -0.1, -2)), [1, 5, 6]).tokens == (1, 6)
    assert verify(DraftTree((9, 0), (-1, 0), (0.0, -0.1)), [1, 5]) == Acceptance((0,), (1,))


def test_plain_decoding_is_the_tree_with_one_node():
    assert verify(DraftTree.root(3), [8]) == Acceptance((0,), (8,))


def test_acceptance_pairs_path_and_tokens():
    with pytest.raises(ValueError, match="acceptance"):
        Acceptance((0, 1), (5,))
    with pytest.raises(ValueError, match="acceptance"):
        Acceptance((1,), (5,))

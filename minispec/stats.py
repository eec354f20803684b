"""What an engine counts. Counters only grow; whoever charts them takes differences."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from minispec.containment import STAGES
from minispec.request import FinishReason
from minispec.tree import DraftTree


@dataclass
class DrafterCounts:
    """Counters of one drafter; a node that two drafters proposed counts for both.

    Attributes:
        steps: verifications of a tree that held nodes of it.
        drafted, accepted: depth in the tree → its nodes verified, and those that became text.
    """

    steps: int = 0
    drafted: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)


@dataclass
class EngineStats:
    """Counters since start; they only grow.

    Attributes:
        steps: steps that ran a forward.
        forward_rows: rows computed by the target.
        prompt_tokens: prompt tokens of requests that produced a first token.
        generated_tokens: tokens appended.
        finished: requests by finish reason.
        preemptions: slots taken back for want of pages.
        prefix_query_tokens: prompt tokens of requests that got a slot for the first time.
        prefix_hit_tokens: those of them that were found in the prefix cache.
        errors: by the stage they came from: requests that ended with an error, and drafters and listeners that failed.
            A step of the target that fails and passes when it is tried again is not counted.
        verifications: trees verified.
        drafted, accepted: draft nodes verified, and those that became text.
        truncated: tokens that a verification had found and the end of the request cut off, so that the tokens appended
            by verifications are ``accepted + verifications - truncated``.
        drafters: the same by drafter and depth.
    """

    steps: int = 0
    forward_rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    errors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    truncated: int = 0
    drafters: dict[str, DrafterCounts] = field(default_factory=dict)

    def count(
        self, tree: DraftTree, sources: Sequence[Sequence[str]], accepted: Collection[int], *, truncated: bool
    ) -> None:
        """Count a verified tree whose nodes ``accepted`` became text; ``truncated`` if its bonus token did not."""
        self.verifications += 1
        self.drafted += len(tree) - 1
        self.accepted += len(accepted)
        self.truncated += truncated
        for name in {name for own in sources[1:] for name in own}:
            counts = self.drafters.setdefault(name, DrafterCounts())
            counts.steps += 1
            for node in range(1, len(tree)):
                if name in sources[node]:
                    depth = tree.depth[node]
                    # drafted first: whoever reads from another thread, accepted first, never sees more of those
                    counts.drafted[depth] = counts.drafted.get(depth, 0) + 1
                    counts.accepted[depth] = counts.accepted.get(depth, 0) + (node in accepted)

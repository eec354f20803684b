"""The Drafter protocol: whatever proposes trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from minispec.request import Request
from minispec.scheduler import Slot
from minispec.tree import MAX_NODES, DraftTree
from minispec.verify import Acceptance

if TYPE_CHECKING:
    from minispec.drafters.eagle_runner import HeadRunner
    from minispec.model.llama import Tapped
    from minispec.runner import ModelRunner


class Drafter(Protocol):
    """Proposes trees for slots; never touches the target's KV.

    A slot's life is ``begin``, then ``propose`` and ``accept`` in turn, then ``end``. What a drafter knows of a slot
    dies with ``end``, which also comes when a request is preempted.
    """

    @property
    def name(self) -> str:
        """As in ``--draft``."""

    @property
    def members(self) -> Sequence[Drafter]:
        """The drafters it consists of: itself, or those a union merges. Requests choose among their names
        (``Request.may_draft``: a union asks for each member), and counters are kept for each."""

    @property
    def invalid(self) -> int:
        """Rows it could not draft from, as its model's logits were not finite."""

    @property
    def depth_limit(self) -> int:
        """Deepest layer worth growing in the next proposal; the engine sets it on the drafter and on its members, from
        measured costs. Those that draft in one go need not heed it: what is deeper is cut. At 0 a union leaves the
        member out."""

    @depth_limit.setter
    def depth_limit(self, depth: int) -> None: ...

    @property
    def least_gain(self) -> float:
        """How many accepted tokens a further layer must promise, over all slots together, to be grown; set like
        ``depth_limit``. Where it is not 0, a drafter that grows layer by layer goes by it instead of by the limit: deep
        where it is sure, and not where it is not."""

    @least_gain.setter
    def least_gain(self, tokens: float) -> None: ...

    @property
    def least_value(self) -> float:
        """How likely a walk must come to a node for its children to be worth the rows that verify them. A drafter that
        goes by ``least_gain`` runs no other nodes, and promises what is beyond it only."""

    @least_value.setter
    def least_value(self, probability: float) -> None: ...

    @property
    def least_node(self) -> float:
        """How likely a walk must come to a node for it to be worth proposing, except the likeliest: less is never
        verified."""

    @least_node.setter
    def least_node(self, probability: float) -> None: ...

    @property
    def seconds(self) -> float:
        """What its part of the last proposal took; a union measures its members, the engine everybody else."""

    @seconds.setter
    def seconds(self, seconds: float) -> None: ...

    @property
    def grown(self) -> int:
        """How many layers its part of the last proposal had; set together with ``seconds``."""

    @grown.setter
    def grown(self, layers: int) -> None: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Which of the target's hidden states it reads (``minispec.model.llama.Taps.layers``); mostly none."""

    @property
    def runners(self) -> Sequence[ModelRunner | HeadRunner]:
        """Draft models and heads of its own, which may then be compiled like the target."""

    def prepare(self, slots: int) -> None:
        """Do ahead what would delay the first proposals for up to ``slots`` slots. Called once, on each member."""

    def reusable(self, request: Request, positions: int) -> int:
        """How much of the request's first ``positions`` tokens, which the target has cached, it may skip. Less than all
        for a drafter that needs the target's hidden states and lacks some; they are computed again then."""

    def begin(self, slot: Slot) -> None:
        """A request took the slot; the first ``slot.num_cached`` tokens of its text are cached already. After a
        preemption the text goes on past the prompt."""

    def propose(self, slots: Sequence[Slot], max_nodes: Sequence[int]) -> list[DraftTree]:
        """One tree per slot, at most ``max_nodes[i]`` nodes (root included) each; node 0 is the slot's last token."""

    def sources(self, slot: Slot, tree: DraftTree) -> Sequence[tuple[str, ...]]:
        """Names of the members that proposed each node of ``tree``, which is the slot's last proposal or what was left
        of it; the root's entry means nothing."""

    def observe(self, slot: Slot, tapped: Tapped) -> None:
        """The tapped hidden states of the slot's rows in the step's forward, if ``taps`` asks for any.

        Comes before ``accept``: for a chunk, a row per token from ``slot.num_cached`` on; for a tree, one per node.
        """

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        """What became of a proposal. ``tree`` is the part of it that was verified; the text has grown already."""

    def end(self, slot: Slot) -> None:
        """The slot's request ended, or was preempted."""


class BaseDrafter:
    """Does nothing where a drafter needs nothing done. ``propose`` gives roots: plain decoding."""

    name = "none"
    taps: tuple[int, ...] = ()
    invalid: int = 0
    depth_limit: int = MAX_NODES
    least_gain: float = 0.0
    least_value: float = 0.0
    least_node: float = 0.0
    seconds: float = 0.0
    grown: int = 0
    runners: Sequence[ModelRunner | HeadRunner] = ()

    @property
    def members(self) -> Sequence[Drafter]:
        return (self,)

    def prepare(self, slots: int) -> None:
        pass

    def reusable(self, request: Request, positions: int) -> int:
        return positions

    def begin(self, slot: Slot) -> None:
        pass

    def propose(self, slots: Sequence[Slot], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.root(slot.request.tokens[-1]) for slot in slots]

    def sources(self, slot: Slot, tree: DraftTree) -> Sequence[tuple[str, ...]]:
        return ((self.name,),) * len(tree)

    def observe(self, slot: Slot, tapped: Tapped) -> None:
        pass

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        pass

    def end(self, slot: Slot) -> None:
        pass


class NoDrafter(BaseDrafter):
    """Plain decoding: every tree is a root."""

"""Drafting with Medusa heads (Cai et al. 2024, arXiv 2401.10774): several tokens ahead from one hidden state.

    x_0 = norm_target(s_n[i])        x_j = x_{j-1} + silu(W_j x_{j-1} + b_j)        logits = U x_last

Head d (from 0), with its own W, b and U, guesses token i + 2 + d, that is the tree's layer d + 1: token i + 1 is the
root. The guesses of one head are the same behind every node of the layer before, so the tree is cut from their
cartesian product, best-first over the products of probabilities.
"""

from __future__ import annotations

import heapq
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec import kernels
from minispec.drafters.fixed_tree import TreeShape
from minispec.drafters.grow import RankingDrafter
from minispec.drafters.head_files import DraftVocabulary, HeadFiles, Shape
from minispec.errors import ConfigError, ModelError
from minispec.model.linear import Head, Linear
from minispec.model.llama import Llama, Tapped
from minispec.sampling import Noise, SamplingBatch
from minispec.scheduler import Slot
from minispec.tree import DraftTree
from minispec.verify import Acceptance

log = logging.getLogger(__name__)

# maps read elsewhere, and the base model's weights in folders that hold both
_NO_WEIGHTS = re.compile(r"^(token_map|d2t|t2d|layers\..*|norm\.weight|embed_tokens\.weight|lm_head\.weight)$")
_SHARED = "lm_head.weight"
Ranked = Sequence[Sequence[tuple[int, float]]]
"""Per layer of the tree: (token, log-probability), best first."""


class MedusaHeads:
    """The heads' weights.

    Attributes:
        num_heads: how many there are: the deepest tree they can draft.
        layer: the target's hidden state they read (``Taps.layers``).
        vocabulary: which of the target's ids their logits are for.
    """

    def __init__(self, files: HeadFiles, target: Llama, num_heads: int, num_blocks: int) -> None:
        """Build from the folder's tensors.

        Args:
            num_blocks: residual blocks per head.

        Raises:
            ModelError: tensors are missing or misshapen (listed), or ids do not map onto the target's.
        """
        self.num_heads = num_heads
        self.layer = target.config.num_layers
        self.device = target.device
        outputs = [f"{i}.{num_blocks}.weight" for i in range(num_heads)]
        # Without an output of their own all heads share one: the folder's, or the target's.
        own = any(name in files for name in outputs)
        _check(files, target.config.hidden_size, num_heads, num_blocks, outputs if own else [])
        self._norm, self._eps = target.norm, target.config.rms_norm_eps
        self._blocks = [[_linear(files, f"{i}.{j}.linear") for j in range(num_blocks)] for i in range(num_heads)]
        shared = _SHARED in files and files.shapes[_SHARED][1:] == (target.config.hidden_size,)
        self.vocabulary = DraftVocabulary.read(files, target, outputs[0] if own else _SHARED)
        if own:
            self._heads = [Head(self.vocabulary.own(files.take(name))) for name in outputs]
            return
        if shared:
            weight = self.vocabulary.own(files.take(_SHARED))
        else:
            log.info("%s has no output weights: the target's lm_head is used", files.folder)
            weight = self.vocabulary.borrowed(target.head.weight)
        self._heads = [Head(weight)]

    @staticmethod
    def load(folder: Path, data: Mapping[str, Any], target: Llama) -> MedusaHeads:
        """Load a head's folder for ``target``; ``data`` is its config.json, in the layout of the Medusa authors
        (``medusa_num_heads``, ``medusa_num_layers``) or of vLLM (``num_heads``, ``num_hidden_layers``).

        Raises:
            ModelError: with the folder's name; see ``__init__``.
        """
        size = data.get("hidden_size", target.config.hidden_size)
        if size != target.config.hidden_size:
            raise ModelError(
                f"{folder}: the heads read hidden states of size {size}, the target's have "
                f"{target.config.hidden_size}; choose the heads that were trained for this target"
            )
        authors = "medusa_num_heads" in data
        heads = data.get("medusa_num_heads" if authors else "num_heads")
        blocks = data.get("medusa_num_layers" if authors else "num_hidden_layers", 1)
        for key, value in (("number of heads", heads), ("number of layers", blocks)):
            if isinstance(value, bool) or not isinstance(value, int) or value < (key == "number of heads"):
                raise ModelError(f"{folder}: the {key} in config.json must be a whole number, not {value!r}")
        assert isinstance(heads, int)
        with torch.no_grad():
            files = HeadFiles.open(
                folder, lambda name: canonical(name, blocks), device=target.device, dtype=target.dtype
            )
            return MedusaHeads(files, target, heads, blocks)

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """Logits of the first ``depth`` heads.

        Args:
            hidden: [rows, hidden], the target's residual stream before its final norm.

        Returns:
            [depth, rows, ``vocabulary.size``] float32.
        """
        normed = kernels.rms_norm(hidden, self._norm, self._eps)[0]
        states = []
        for blocks in self._blocks[:depth]:
            x = normed
            for block in blocks:
                x = x + F.silu(block(x))
            states.append(x)
        if len(self._heads) == 1:  # one read of the weights serves all
            return self._heads[0](torch.cat(states)).view(depth, len(hidden), -1)
        return torch.stack([head(x) for head, x in zip(self._heads, states, strict=False)])


class MedusaDrafter(RankingDrafter):
    """Drafts with Medusa heads: one pass over all slots, whatever the tree's size.

    Args:
        name: as in ``--draft``.
        heads: the heads.
        noise: the target's noise source, shared.
        depth: layers to draft; None for as many as there are heads.
        children: children considered per node.

    Raises:
        ConfigError: ``depth`` is above the number of heads.
    """

    def __init__(
        self, name: str, heads: MedusaHeads, noise: Noise, *, depth: int | None = None, children: int = 10
    ) -> None:
        if depth is not None and not 1 <= depth <= heads.num_heads:
            raise ConfigError(
                f"depth {depth} is not possible with {name}: it has {heads.num_heads} Medusa heads, one per layer of "
                f"the tree; give a depth of 1 to {heads.num_heads}"
            )
        super().__init__(name, noise, children, heads.vocabulary.size)
        self.taps = (heads.layer,)
        self._heads = heads
        self._depth = depth or heads.num_heads
        # the hidden state of the last verified position, once there is one
        self._hidden: dict[Slot, Tensor | None] = {}
        self._tree: dict[Slot, Tapped] = {}

    def follow(self, shape: TreeShape) -> None:
        shape.require_depth(self._heads.num_heads, f"{self.name}, with one head per layer,")
        super().follow(shape)
        self._depth = shape.depth

    def begin(self, slot: Slot) -> None:
        self._hidden[slot] = None

    def end(self, slot: Slot) -> None:
        del self._hidden[slot]
        self._tree.pop(slot, None)

    def observe(self, slot: Slot, tapped: Tapped) -> None:
        if slot.decoding:
            self._tree[slot] = tapped
        else:
            self._hidden[slot] = tapped.features[-1].clone()  # a view would keep the whole step's

    def accept(self, slot: Slot, tree: DraftTree, acceptance: Acceptance) -> None:
        self._hidden[slot] = self._tree.pop(slot).features[acceptance.path[-1]].clone()

    @torch.inference_mode()
    def propose(self, slots: Sequence[Slot], max_nodes: Sequence[int]) -> list[DraftTree]:
        trees = [DraftTree.root(slot.request.tokens[-1]) for slot in slots]
        drafting = [
            (i, hidden)
            for i, (slot, count) in enumerate(zip(slots, max_nodes, strict=True))
            if min(count, slot.request.remaining) > 1 and (hidden := self._hidden[slot]) is not None
        ]
        if not drafting:
            return trees
        # a walk of depth d emits d + 1 tokens
        room = max(min(slots[i].request.remaining, max_nodes[i]) for i, _ in drafting) - 1
        depth = min(self._depth, self.depth_limit, room)
        if depth < 1:
            return trees
        logits = self._heads.logits(torch.stack([hidden for _, hidden in drafting]), depth)
        requests = [slots[i].request for i, _ in drafting]
        rows = [(request, len(request.tokens) + layer) for layer in range(depth) for request in requests]
        ranked = self._rank(rows, logits.flatten(0, 1))
        for row, (i, _) in enumerate(drafting):
            build = product_tree if self._shape is None else self._shape.over
            trees[i] = build(slots[i].request.tokens[-1], ranked[row :: len(drafting)], max_nodes[i])
        return trees

    def _best_children(self, logits: Tensor, sampling: SamplingBatch) -> tuple[Tensor, Tensor]:
        return self._heads.vocabulary.best_children(logits, sampling, self.noise, self._children)


def product_tree(root: int, layers: Ranked, max_nodes: int) -> DraftTree:
    """The ``max_nodes`` likeliest nodes of the tree in which every node of a layer has the same children.

    Args:
        root: its token.
        layers: the children, per layer.
        max_nodes: root included.
    """
    tokens, parents, values, depths = [root], [-1], [0.0], [0]
    # nodes not yet in the tree whose parent and better siblings are: (-value, order of pushing, parent, rank)
    heap: list[tuple[float, int, int, int]] = []
    pushed = 0

    def push(parent: int, rank: int) -> None:
        nonlocal pushed
        depth = depths[parent]
        if depth < len(layers) and rank < len(layers[depth]):
            heapq.heappush(heap, (-(values[parent] + layers[depth][rank][1]), pushed, parent, rank))
            pushed += 1

    push(0, 0)
    while heap and len(tokens) < max_nodes:
        cost, _, parent, rank = heapq.heappop(heap)
        tokens.append(layers[depths[parent]][rank][0])
        parents.append(parent)
        values.append(-cost)
        depths.append(depths[parent] + 1)
        push(parent, rank + 1)
        push(len(tokens) - 1, 0)
    return DraftTree(tuple(tokens), tuple(parents), tuple(values))


def canonical(name: str, num_blocks: int) -> str:
    """A tensor's name as the Medusa authors have it: ``HEAD.BLOCK.linear.weight``, the output behind the blocks."""
    name = re.sub(r"^(model\.|medusa_(lm_)?heads?\.)+", "", name)
    name = re.sub(r"^lm_heads\.(\d+)\.", rf"\g<1>.{num_blocks}.", name)
    return re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)


def _check(files: HeadFiles, hidden: int, num_heads: int, num_blocks: int, outputs: Sequence[str]) -> None:
    blocks = [f"{i}.{j}.linear" for i in range(num_heads) for j in range(num_blocks)]
    expected: dict[str, Shape] = {f"{name}.weight": (hidden, hidden) for name in blocks}
    optional: dict[str, Shape] = {f"{name}.bias": (hidden,) for name in blocks}
    rows = files.shapes[outputs[0]][0] if outputs and outputs[0] in files else None
    files.check(expected | dict.fromkeys(outputs, (rows, hidden)), optional, ignored=_NO_WEIGHTS)


def _linear(files: HeadFiles, name: str) -> Linear:
    return Linear(files.take(f"{name}.weight"), files.take(f"{name}.bias") if f"{name}.bias" in files else None)

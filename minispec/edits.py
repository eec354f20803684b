"""What requests change in the target's logits, kept from step to step: penalties, bias, tokens held back, grammars.

A request without any costs nothing. One with penalties or bias touches as many logits a row as it has such tokens; only
a grammar looks at the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minispec.kernels.edit_logits import LogitEdits
from minispec.request import Request
from minispec.tree import DraftTree
from minispec.upload import upload


class Editor:
    """Makes a step's LogitEdits. What it knows of a request follows from the request's tokens, which only grow."""

    def __init__(self) -> None:
        self._touched: WeakKeyDictionary[Request, _Touched] = WeakKeyDictionary()

    def build(self, trees: Sequence[tuple[Request, DraftTree]], device: torch.device | str) -> LogitEdits | None:
        """The edits of a step's rows, which are the nodes of ``trees`` one behind the other; None if there are none.

        Each node counts the tokens on its own path as output.
        """
        edited, first = [], 0
        for request, tree in trees:
            if edits_logits(request):
                edited.append((request, tree, first))
            first += len(tree)
        if not edited:
            return None
        # rows with a grammar come first, for ``LogitEdits.allowed``
        edited.sort(key=lambda item: item[0].constraint is None)
        rows = [row for _, tree, first in edited for row in range(first, first + len(tree))]
        slot = [i for i, (_, tree, _) in enumerate(edited) for _ in range(len(tree))]
        banned: list[tuple[int, int]] = []
        allowed: list[Tensor] = []
        start = 0
        for request, tree, _ in edited:
            held_back = [start + node for node in _held_back(request, tree)]
            if request.constraint is not None:
                allowed.append(_without(request.constraint.masks(tree), [i - start for i in held_back], request))
            else:
                banned += [(row, token) for row in held_back for token in request.end_ids]
            start += len(tree)
        tensors = [
            torch.tensor(rows, dtype=torch.int64),
            torch.tensor(slot, dtype=torch.int64),
            torch.tensor(_paths([tree for request, tree, _ in edited]), dtype=torch.int64).view(len(rows), -1),
            torch.tensor(banned, dtype=torch.int64).view(-1, 2),
            *self._tables(edited),
        ]
        names: tuple[str, ...] = ("rows", "slot", "path", "banned", *_TABLES)
        if allowed:
            names, tensors = (*names, "allowed"), [*tensors, torch.cat(allowed)]
        return LogitEdits(**dict(zip(names, upload(tensors, device), strict=True)))

    def _tables(self, edited: Sequence[tuple[Request, DraftTree, int]]) -> list[Tensor]:
        """Tables with one row per edited request, in the order of ``_TABLES``."""
        columns = []
        for request, tree, _ in edited:
            touched = self._touched.get(request)
            if touched is None:
                touched = self._touched[request] = _Touched(request)
            columns.append(touched.columns(tree))
        width = max(numbers.shape[1] for numbers, _ in columns)
        numbers = torch.zeros((3, len(columns), width), dtype=torch.int32)
        bias = torch.zeros((len(columns), width))
        for i, (own_numbers, own_bias) in enumerate(columns):
            size = own_numbers.shape[1]
            numbers[:, i, :size], bias[i, :size] = own_numbers, own_bias
            if 0 < size < width:
                numbers[:, i, size:], bias[i, size:] = own_numbers[:, :1], own_bias[:1]
        params = [request.params for request, _, _ in edited]
        return [
            numbers[0].long(),
            numbers[1],
            numbers[2] > 0,
            bias,
            torch.tensor([p.repetition_penalty for p in params], dtype=torch.float32),
            torch.tensor([p.frequency_penalty for p in params], dtype=torch.float32),
            torch.tensor([p.presence_penalty for p in params], dtype=torch.float32),
        ]


_TABLES = ("tokens", "counts", "prompt", "bias", "repetition", "frequency", "presence")


def edits_logits(request: Request) -> bool:
    """Whether the request's next tokens are drawn from other logits than the model's own."""
    params = request.params
    return (
        request.constraint is not None
        or params.penalised
        or bool(params.logit_bias)
        or (request.num_output < params.min_tokens and bool(request.end_ids))
    )


class _Touched:
    """The tokens of one request that penalties or bias touch, as columns that grow with the text."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._penalised = request.params.penalised
        self._place: dict[int, int] = {}  # token → column
        self._numbers = torch.zeros((3, 0), dtype=torch.int32)  # token, times in the output, whether in the prompt
        self._bias = torch.zeros(0)
        bias = request.params.logit_bias
        self._add(list(bias))
        self._bias[:] = torch.tensor(list(bias.values()), dtype=torch.float32)
        if request.params.repetition_penalty != 1:
            prompt = list(dict.fromkeys(request.prompt))
            self._add([token for token in prompt if token not in self._place])
            self._numbers[2, [self._place[token] for token in prompt]] = 1
        self._seen = len(request.prompt)  # tokens of the text that are counted

    def columns(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """(numbers [3, width] int32, bias [width] float32) for the text so far, with a column for every draft token."""
        if not self._penalised:
            return self._numbers, self._bias
        tokens = self._request.tokens[self._seen :]
        self._seen += len(tokens)
        self._add([token for token in dict.fromkeys(tokens) if token not in self._place])
        for token in tokens:
            self._numbers[1, self._place[token]] += 1
        size = len(self._place)
        drafted = [token for token in dict.fromkeys(tree.tokens[1:]) if token not in self._place]
        if not drafted:
            return self._numbers[:, :size], self._bias[:size]
        numbers = torch.zeros((3, size + len(drafted)), dtype=torch.int32)
        numbers[:, :size] = self._numbers[:, :size]
        numbers[0, size:] = torch.tensor(drafted)
        return numbers, torch.cat([self._bias[:size], torch.zeros(len(drafted))])

    def _add(self, tokens: Sequence[int]) -> None:
        """Columns for tokens that have none."""
        if not tokens:
            return
        size = len(self._place)
        self._place.update(zip(tokens, range(size, size + len(tokens)), strict=True))
        short = len(self._place) - self._numbers.shape[1]
        if short > 0:
            room = short if size == 0 else max(short, size)
            self._numbers = torch.cat([self._numbers, torch.zeros((3, room), dtype=torch.int32)], dim=1)
            self._bias = torch.cat([self._bias, torch.zeros(room)])
        self._numbers[0, size : size + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)


def _held_back(request: Request, tree: DraftTree) -> list[int]:
    """Nodes after which it is too early for a token that ends the request."""
    missing = request.params.min_tokens - request.num_output
    return [node for node, depth in enumerate(tree.depth) if depth < missing] if missing > 0 else []


def _without(masks: Tensor, nodes: Sequence[int], request: Request) -> Tensor:
    """``masks`` without the tokens that end the request in the rows ``nodes``, but where nothing else is left."""
    if not nodes or not request.end_ids:
        return masks
    own = masks[list(nodes)]
    for token in request.end_ids:
        others = ~(1 << token % 32) & 0xFFFFFFFF
        own[:, token // 32] &= others - (others >> 31 << 32)  # as int32
    masks = masks.clone()
    masks[list(nodes)] = own.where((own != 0).any(-1, keepdim=True), masks[list(nodes)])
    return masks


def _paths(trees: Sequence[DraftTree]) -> list[list[int]]:
    """Per node the draft tokens from below the root to it, padded with -1 to the deepest."""
    depth = max(max(tree.depth) for tree in trees)
    paths = []
    for tree in trees:
        own: list[list[int]] = [[]]
        for node in range(1, len(tree)):
            own.append([*own[tree.parents[node]], tree.tokens[node]])
        paths += [path + [-1] * (depth - len(path)) for path in own]
    return paths

"""From a step's logits to the target's tokens and their log-probabilities: which row belongs to whom.

The rows of a step are those of its prompt chunks and then the nodes of its trees. A chunk whose prompt is to be scored
has all its rows among them, one that ends its prompt the last, another none.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec import kernels
from minispec.edits import Editor
from minispec.request import LOGPROB_FLOOR, MAX_LOGPROBS, Request, TokenLogprobs
from minispec.sampling import Noise, SamplingBatch
from minispec.tree import DraftTree
from minispec.verify import Acceptance

if TYPE_CHECKING:
    from minispec.native.sampling import NativeSampling

_WIDTHS = 1, 5, MAX_LOGPROBS
"""Alternatives are looked up so many at a time: on a GPU there is a kernel for each number."""


class Sampler:
    """Draws the target's token after each sampled row of a step, and says how likely tokens were.

    Args:
        noise: keyed noise over the target's vocabulary.
    """

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._editor = Editor()

    def __call__(self, logits: Tensor, first: Sequence[Request], trees: Sequence[tuple[Request, DraftTree]]) -> Tensor:
        """Draw.

        Args:
            logits: [samples, vocab_size] float32, rows in the order of ``first`` and then of the trees' nodes; not
                changed.
            first: requests whose prompt ends in this step; each draws one token.
            trees: the decoding requests and what is verified for them; each node draws the token that follows it.

        Returns:
            [samples] int64.
        """
        nodes = _nodes(first, trees)
        if not nodes:
            return logits.new_empty(0, dtype=torch.int64)
        edits = self._editor.build(nodes, logits.device)
        return kernels.sample(logits, SamplingBatch.build(_rows(nodes), logits.device), self._noise, edits)

    def natively(
        self,
        native: NativeSampling,
        logits: Tensor,
        first: Sequence[Request],
        trees: Sequence[tuple[Request, DraftTree]],
    ) -> Tensor | array[int]:
        """The same by the compiled library, mostly without torch, whose first call behind a forward takes 50 µs; but
        NO_TOKEN where a row is not finite."""
        nodes = _nodes(first, trees)
        if not nodes:
            return array("q")
        if (edits := self._editor.build(nodes, self._noise.device)) is not None:
            return kernels.sample(logits, SamplingBatch.build(_rows(nodes)), self._noise, edits)
        greedy = all(request.params.greedy for request, _ in nodes)
        return native.draw(logits, None if greedy else SamplingBatch.build(_rows(nodes)), self._noise)

    def score_prompts(self, logits: Tensor, chunks: Sequence[tuple[Request, int, int]]) -> Tensor:
        """Fill ``Request.prompt_logprobs`` from the chunks' rows, and leave the rows that draw.

        Scoring the same positions again changes nothing, so a step may be tried twice.

        Args:
            logits: [rows, vocab_size] float32: all sampled rows of the step.
            chunks: of each prompt chunk the request, its position, and its tokens.

        Returns:
            [samples, vocab_size] float32, as ``__call__`` takes them.
        """
        if not any(request.wants_prompt_logprobs for request, _, _ in chunks):
            return logits
        drawing: list[int] = []
        row = 0
        for request, start, count in chunks:
            last = start + count == len(request.tokens)
            if request.wants_prompt_logprobs:
                self._score_prompt(request, logits[row : row + count], start)
                row += count
            else:
                row += last
            if last:
                drawing.append(row - 1)
        return logits[torch.tensor([*drawing, *range(row, len(logits))], dtype=torch.int64, device=logits.device)]

    def logprobs(
        self,
        logits: Tensor,
        first: Sequence[tuple[Request, int]],
        trees: Sequence[tuple[Request, DraftTree, Acceptance]],
    ) -> dict[Request, list[TokenLogprobs]]:
        """Log-probabilities of the tokens a step emits, for the requests that want them.

        Args:
            logits: as they were drawn from.
            first: requests and their first tokens.
            trees: requests, what was verified and what came of it.
        """
        rows: list[int] = []
        tokens: list[int] = []
        owners: list[Request] = []
        row = 0
        for request, token in first:
            if request.params.logprobs is not None:
                rows, tokens, owners = [*rows, row], [*tokens, token], [*owners, request]
            row += 1
        for request, tree, acceptance in trees:
            if request.params.logprobs is not None:
                rows += [row + node for node in acceptance.path]
                tokens += acceptance.tokens
                owners += [request] * len(acceptance.path)
            row += len(tree)
        result: dict[Request, list[TokenLogprobs]] = {}
        if rows:
            wanted = [request.params.logprobs or 0 for request in owners]
            picked = logits[torch.tensor(rows, device=logits.device)]
            for request, entry in zip(owners, _score(picked, tokens, wanted), strict=True):
                result.setdefault(request, []).append(entry)
        return result

    def _score_prompt(self, request: Request, logits: Tensor, start: int) -> None:
        """``logits``: [count, vocab_size], the rows of the positions from ``start`` on; each scores the next token."""
        scores = request.prompt_logprobs
        if not scores:
            scores.append(None)
        begin = len(scores) - 1
        assert start <= begin, f"positions {begin} to {start} of a prompt that is to be scored were not computed"
        tokens = request.prompt[begin + 1 : start + len(logits) + 1]
        own = logits[begin - start : begin - start + len(tokens)]
        if tokens:
            scores += _score(own, tokens, [request.params.prompt_logprobs or 0] * len(tokens))


def _nodes(first: Sequence[Request], trees: Sequence[tuple[Request, DraftTree]]) -> Sequence[tuple[Request, DraftTree]]:
    # to a first token the last of the prompt is what the root is to a tree
    return [*[(request, DraftTree.root(request.tokens[-1])) for request in first], *trees] if first else trees


def _rows(nodes: Sequence[tuple[Request, DraftTree]]) -> list[tuple[Request, int]]:
    """Request and position of what each node draws."""
    return [(request, len(request.tokens) + depth) for request, tree in nodes for depth in tree.depth]


def _score(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of one token per row and of its ``counts`` best; logits [rows, vocab_size]."""
    width = min(next(width for width in _WIDTHS if width >= max(counts)), logits.shape[1])
    top, values = kernels.top_logprobs(logits, width)
    # where logits are not finite no token was drawn, and the entry is of no use
    chosen = torch.tensor([max(token, 0) for token in tokens], device=logits.device)
    own = kernels.token_logprobs(logits, chosen, top, values)
    # side by side, as each fetch waits for the device; ids are exact in float64
    fetched = torch.cat([top.double(), values.double(), own[:, None].double()], dim=1).tolist()
    return [
        TokenLogprobs(
            token,
            _floored(row[-1]),
            tuple((int(row[i]), _floored(row[width + i])) for i in range(min(count, width))),
        )
        for token, count, row in zip(tokens, counts, fetched, strict=True)
    ]


def _floored(value: float) -> float:
    return value if value > LOGPROB_FLOOR else LOGPROB_FLOOR

"""Training-time test: the head's forward unrolled as drafting unrolls it, over whole conversations at once.

Step 1 runs every row on the target's hidden states. Step s runs rows that stand s - 1 tokens further on, on the g of
step s - 1 instead, as the s-th drafted token does. A row of step s sees the step-1 keys up to the position its chain
began at (its root), and one key of every step since, its own included (EAGLE-3: Li et al. 2025, arXiv 2503.01840,
section 3.2). Chains do not see one another, so any subset of the roots can be followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.kernels.rope import rope_ref
from minispec.train.head import TrainableHead


@dataclass(frozen=True)
class Batch:
    """Conversations behind one another: one row per token but the last, for which there are no hidden states.

    Attributes:
        starts: first row of each conversation, and the total.
        tokens: [rows] int64, the token one further on than the row's hidden states.
        features: [rows, taps * hidden].
        labels: [rows, K] int64, the likeliest of the head's logits for that token, by the target.
        weights: [rows, K] float32, their probabilities, which sum to 1; 0 where there are fewer, and for GIVEN tokens.
        best: [rows] int64, the likeliest; -1 where the target chose a token that the head has no logit for.
        classes: [rows] uint8 (``shards``), of that token.
        sound: [rows] bool: the hidden states are of the usual size.
    """

    starts: Sequence[int]
    tokens: Tensor
    features: Tensor
    labels: Tensor
    weights: Tensor
    best: Tensor
    classes: Tensor
    sound: Tensor

    @property
    def sequence(self) -> Tensor:
        """[rows]: which conversation each row is of."""
        sizes = torch.tensor(self.starts).diff()
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self.tokens.device)

    @property
    def positions(self) -> Tensor:
        """[rows]: position in its conversation."""
        rows = torch.arange(self.starts[-1], device=self.tokens.device)
        return rows - torch.tensor(self.starts, device=rows.device)[self.sequence]


class Unroll:
    """One batch through a head, step after step.

    Attributes:
        rows: [n] int64, the rows that the chains of the last step stand at.
        roots: [n] int64, the rows where they began.
        hidden: [n, hidden], g there.
    """

    def __init__(self, head: TrainableHead, batch: Batch) -> None:
        """Runs step 1."""
        self._head = head
        self._batch = batch
        self._sequence, self._positions = batch.sequence, batch.positions
        count, longest = len(batch.starts) - 1, int(torch.tensor(batch.starts).diff().max())
        self._place = self._sequence * longest + self._positions  # of a row in the padded layout
        self._size = (count, longest)
        self._chain: list[tuple[Tensor, Tensor]] = []  # k, v of each step since the first, by chain
        self.rows = torch.arange(batch.starts[-1], device=batch.tokens.device)
        self.roots = self.rows
        self.hidden = head.forward.forward(batch.tokens, head.fuse(batch.features), self._causal)

    def advance(self, keep: Tensor) -> None:
        """The next step, for the chains ``keep`` ([m] int64, indices of the last step's chains).

        Chains must have a row to go to: that of the token behind theirs, in the same conversation.
        """
        hidden = self.hidden[keep]
        self.rows, self.roots = self.rows[keep] + 1, self.roots[keep]
        self._chain = [(k[keep], v[keep]) for k, v in self._chain]
        self.hidden = self._head.forward.forward(self._batch.tokens[self.rows], hidden, self._follow)

    def next_rows(self) -> tuple[Tensor, Tensor]:
        """([n] int64, [n] bool): the row behind each chain's, whose label its g guesses, and whether there is one."""
        after = self.rows + 1
        inside = after < self._batch.starts[-1]
        after = after.clamp(max=self._batch.starts[-1] - 1)
        return after, inside & (self._sequence[after] == self._sequence[self.rows])

    def _rotated(self, rows: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._head.rope.cos_sin(self._positions[rows])
        return rope_ref(q, cos, sin), rope_ref(k, cos, sin)

    def _causal(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self._rotated(self.rows, q, k)
        count, longest = self._size
        padded = [_scatter(x, self._place, count * longest).view(count, longest, *x.shape[1:]) for x in (q, k, v)]
        query, self._keys, self._values = (x.transpose(1, 2) for x in padded)
        # padding lies behind all rows that matter, so the causal mask hides it
        out = F.scaled_dot_product_attention(query, self._keys, self._values, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(count * longest, *q.shape[1:])[self._place]

    def _follow(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self._rotated(self.rows, q, k)
        self._chain.append((k, v))
        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
        group = heads // kv_heads
        sequence = self._sequence[self.rows]
        count, longest = self._size
        # chains of a conversation side by side: [count, kv_heads, group * width, dim]
        order = torch.arange(len(self.rows), device=q.device)
        lengths = torch.bincount(sequence, minlength=count)
        width = int(lengths.max())
        place = sequence * width + order - (lengths.cumsum(0) - lengths)[sequence]
        scaled = q * dim**-0.5
        folded = _scatter(scaled, place, count * width).view(count, width, kv_heads, group, dim)
        folded = folded.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, group * width, dim)
        scores = (folded @ self._keys.transpose(-1, -2)).view(count, kv_heads, group, width, longest)
        scores = scores.permute(0, 3, 1, 2, 4).reshape(count * width, kv_heads, group, longest)[place]
        hidden = torch.arange(longest, device=q.device) > self._positions[self.roots][:, None]
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        own = torch.stack([(scaled.view(-1, kv_heads, group, dim) * k[:, :, None]).sum(-1) for k, _ in self._chain], -1)
        weights = torch.cat([scores, own], dim=-1).softmax(dim=-1)
        seen = _scatter(weights[..., :longest], place, count * width).view(count, width, kv_heads, group, longest)
        seen = seen.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, group * width, longest)
        out = (seen @ self._values).view(count, kv_heads, group, width, dim)
        out = out.permute(0, 3, 1, 2, 4).reshape(count * width, kv_heads, group, dim)[place]
        for step, (_, value) in enumerate(self._chain):
            out = out + weights[..., longest + step, None] * value[:, :, None]
        return out.reshape(-1, heads, dim)


def _scatter(x: Tensor, place: Tensor, size: int) -> Tensor:
    """x [n, …] at ``place`` of a tensor of ``size`` rows, zeros elsewhere; differentiable."""
    return x.new_zeros(size, *x.shape[1:]).index_copy(0, place, x)

"""How the target chooses a token: logit transforms and Gumbel noise keyed by (seed, position).

    token = argmax(log p + g[position])

Gumbel-max sampling draws exactly from p (Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030). The noise is a pure
function of the request's seed and the absolute position of the token to be drawn, so the same text comes out whatever
was drafted and whoever shares the batch; and a drafter that ranks by ``log q + g`` with the same noise guesses the
target's own draw (Daliri, Musco & Suresh 2024, arXiv 2408.07978). Temperature 0 means no noise: plain argmax.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.upload import upload

if TYPE_CHECKING:
    from minispec.request import Request

_ROUNDS = 7  # enough to pass BigCrush: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", table 2
_MASK = 0xFFFFFFFF


def philox(key: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-7 (Salmon et al. 2011): four 32-bit words per counter (c0, c1, 0, 0) and 64-bit key.

    Args:
        key, c0, c1: int64, broadcastable; counters in [0, 2**32).

    Returns:
        Four int64 tensors with values in [0, 2**32).
    """
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    key, c0, c1 = torch.broadcast_tensors(key, c0, c1)
    c2 = torch.zeros_like(c0)
    c3 = torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        # the 64-bit products wrap; the mask after the shift discards the sign's copies
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise: entry (i, token) depends on (seeds[i], positions[i], token) alone.

    Args:
        seeds: [n] int64.
        positions: [n] int64, absolute position of the token to be drawn.
        vocab_size: entries per row; a longer row begins with the shorter one.

    Returns:
        [n, vocab_size] float32.
    """
    blocks = torch.arange(-(-vocab_size // 4), device=seeds.device)
    words = torch.stack(philox(seeds[:, None], blocks, positions[:, None]), dim=-1)
    uniform = (words.view(len(seeds), -1)[:, :vocab_size].double() + 0.5) * 2.0**-32
    # -log(1 - u) rather than -log(u): small values, which decide the maximum, keep all 32 bits
    return -torch.log(-torch.log1p(-uniform)).float()


class Noise:
    """Keyed noise with the most recent positions kept, since drafting, verification and redrafting meet them again."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", max_bytes: int = 1 << 25) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._rows: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self._max_rows = max(64, max_bytes // (4 * vocab_size))

    def rows(self, keys: Sequence[tuple[int, int]]) -> Tensor:
        """Noise for (seed, position) pairs: [len(keys), vocab_size] float32."""
        missing = list(dict.fromkeys(key for key in keys if key not in self._rows))
        if missing:
            pairs = torch.tensor(missing, dtype=torch.int64, device=self.device)
            self._rows.update(zip(missing, gumbel(pairs[:, 0], pairs[:, 1], self.vocab_size), strict=True))
        for key in keys:
            self._rows.move_to_end(key)
        noise = torch.stack([self._rows[key] for key in keys])
        while len(self._rows) > self._max_rows:
            self._rows.popitem(last=False)
        return noise


@dataclass(frozen=True)
class SamplingBatch:
    """How each sampled row is drawn, in the order of ``StepBatch.sample_rows``.

    Attributes:
        temperature: [samples] float32; 0 is greedy.
        top_k: [samples] int64; 0 is off.
        top_p: [samples] float32 in [0, 1]; 1 is off, 0 keeps the best token only.
        min_p: [samples] float32 in [0, 1]; 0 is off.
        keys: (seed, position of the token to be drawn) per row.
        greedy: every row has temperature 0.
        truncated: some row uses top_k, top_p or min_p.
        key_tensor: [samples, 2] int64, ``keys`` on the device; None lets the kernels copy them.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: tuple[tuple[int, int], ...]
    greedy: bool
    truncated: bool
    key_tensor: Tensor | None = None

    @staticmethod
    def build(rows: Sequence[tuple[Request, int]], device: torch.device | str = "cpu") -> SamplingBatch:
        """From (request, position of the token to be drawn) per row."""
        params = [request.params for request, _ in rows]
        keys = tuple((request.seed, position) for request, position in rows)
        temperature, top_k, top_p, min_p, key_tensor = upload(
            [
                torch.tensor([0.0 if p.greedy else p.temperature for p in params]),
                torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int64),
                torch.tensor([p.top_p for p in params], dtype=torch.float32),
                torch.tensor([p.min_p for p in params], dtype=torch.float32),
                torch.tensor(keys, dtype=torch.int64).view(len(keys), 2),
            ],
            device,
        )
        return SamplingBatch(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            keys=keys,
            greedy=all(p.greedy for p in params),
            truncated=any(not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params),
            key_tensor=key_tensor,
        )

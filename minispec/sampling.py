"""How the target chooses a token: logit transforms and Gumbel noise keyed by (seed, position).

    token = argmax(log p + g[position])

Gumbel-max sampling draws exactly from p (Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030). The noise is a pure
function of the request's seed and the absolute position of the token to be drawn, so the same text comes out whatever
was drafted and whoever shares the batch; and a drafter that ranks by ``log q + g`` with the same noise guesses the
target's own draw (Daliri, Musco & Suresh 2024, arXiv 2408.07978). Temperature 0 means no noise: plain argmax.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minispec.upload import OnDemand

if TYPE_CHECKING:
    from minispec.native.sampling import NativeSampling
    from minispec.request import Request

_ROUNDS = 7  # enough to pass BigCrush: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", table 2
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_MASK = 0xFFFFFFFF
_ALL = 2**31 - 1  # a top-k that keeps any vocabulary; a request's may be too large for a tensor


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
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
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
    return _gumbel_of(words.view(len(seeds), -1)[:, :vocab_size])


def gumbel_at(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """``gumbel`` of some tokens only.

    Args:
        seeds, positions: [n] int64.
        tokens: [n, k] int64.

    Returns:
        [n, k] float32.
    """
    words = torch.stack(philox(seeds[:, None], tokens // 4, positions[:, None]), dim=-1)
    return _gumbel_of(words.gather(-1, (tokens % 4)[..., None])[..., 0])


def _gumbel_of(words: Tensor) -> Tensor:
    """Random 32-bit words, int64, to standard Gumbel noise, float32."""
    uniform = words.double().add_(0.5).mul_(2.0**-32)
    # -log(1 - u) rather than -log(u): small values, which decide the maximum, keep all 32 bits
    return uniform.neg_().log1p_().neg_().log_().neg_().float()


class Noise:
    """Keyed noise with the most recent positions kept, since drafting, verification and redrafting meet them again.

    Attributes:
        native: the compiled library, once it is in use on a CPU, for the noise and for what is drawn with it; values
            are the same, so it may be set while requests run.
        names: [vocab_size] int64, the tokens whose noise it is; None where they are the indices.
    """

    native: NativeSampling | None = None
    names: Tensor | None = None

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", max_bytes: int = 1 << 25) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._rows: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self._max_rows = max(64, max_bytes // (4 * vocab_size))
        self._generator: _RowGenerator | None = None

    def rows(self, keys: Sequence[tuple[int, int]]) -> Tensor:
        """Noise for (seed, position) pairs: [len(keys), vocab_size] float32."""
        return torch.stack(self.each(keys))

    def each(self, keys: Sequence[tuple[int, int]]) -> list[Tensor]:
        """``rows`` without a copy, [vocab_size] each; not to be changed."""
        missing = list(dict.fromkeys(key for key in keys if key not in self._rows))
        if missing:
            self._rows.update(zip(missing, self._compute(missing), strict=True))
        for key in keys:
            self._rows.move_to_end(key)
        noise = [self._rows[key] for key in keys]
        while len(self._rows) > self._max_rows:
            self._rows.popitem(last=False)
        return noise

    def at(self, keys: Sequence[tuple[int, int]], tokens: Tensor) -> Tensor:
        """Noise of some tokens only: [len(keys), k] float32 for tokens [len(keys), k] int64."""
        if self.native is not None:
            return self.native.gumbel_at(keys, tokens)
        pairs = torch.tensor(keys, dtype=torch.int64, device=tokens.device)
        return gumbel_at(pairs[:, 0], pairs[:, 1], tokens)

    def _compute(self, keys: Sequence[tuple[int, int]]) -> Iterable[Tensor]:
        if torch.device(self.device).type != "cpu":
            pairs = torch.tensor(keys, dtype=torch.int64, device=self.device)
            return gumbel(pairs[:, 0], pairs[:, 1], self.vocab_size)
        if self.native is not None:
            return self.native.gumbel(keys, self.vocab_size)
        if self._generator is None:
            self._generator = _RowGenerator(self.vocab_size)
        return [self._generator(*key) for key in keys]


class NoiseOf(Noise):
    """Noise of some of the vocabulary, under indices of its own.

    Args:
        noise: of all of it.
        ids: [n] int64, whose noise it is.
    """

    names: Tensor

    def __init__(self, noise: Noise, ids: Tensor) -> None:
        super().__init__(len(ids), noise.device)
        self._noise, self.names = noise, ids
        self.native = noise.native

    def _compute(self, keys: Sequence[tuple[int, int]]) -> Iterable[Tensor]:
        if self.native is not None:
            return self.native.gumbel_at(keys, self.names)
        return [self._noise.rows([key])[0].index_select(0, self.names) for key in keys]

    def at(self, keys: Sequence[tuple[int, int]], tokens: Tensor) -> Tensor:
        return self._noise.at(keys, self.names[tokens])


class _RowGenerator:
    """``gumbel`` of one row on a CPU, in buffers that stay in the cache; half the time of the general form.

    The first two rounds are shortened: they begin with one varying word of four.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        product = torch.arange(-(-vocab_size // 4)) * _MULTIPLIERS[0]
        self._high, self._low = (product >> 32) & _MASK, product & _MASK
        self._buffers = [torch.empty_like(product) for _ in range(5)]

    def __call__(self, seed: int, position: int) -> Tensor:
        """[vocab_size] float32."""
        m0, m1 = _MULTIPLIERS
        c0, c1, c2, c3, spare = self._buffers
        (k0, k1), *keys = _round_keys(seed)
        # after round 1 the words are (position ^ k0, 0, high ^ k1, low)
        torch.bitwise_xor(self._high, k1, out=c2)
        product = (position ^ k0) * m0
        k0, k1 = keys[0]
        torch.mul(c2, m1, out=c1)
        torch.bitwise_right_shift(c1, 32, out=c0)
        c0.bitwise_and_(_MASK).bitwise_xor_(k0)
        c1.bitwise_and_(_MASK)
        torch.bitwise_xor(self._low, ((product >> 32) ^ k1) & _MASK, out=c2)
        c3.fill_(product & _MASK)
        for k0, k1 in keys[1:]:
            # products wrap as in ``philox``, whose words these are; each is overwritten once it has been read
            torch.mul(c2, m1, out=spare)
            c0.mul_(m0)
            torch.bitwise_right_shift(spare, 32, out=c2)
            c2.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
            spare.bitwise_and_(_MASK)
            torch.bitwise_right_shift(c0, 32, out=c1)
            c1.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
            c0.bitwise_and_(_MASK)
            c0, c1, c2, c3, spare = c2, spare, c1, c0, c3
        noise = torch.stack([_gumbel_of(word) for word in (c0, c1, c2, c3)], dim=-1)
        return noise.view(-1)[: self._vocab_size]


def _round_keys(seed: int) -> list[tuple[int, int]]:
    return [((seed + i * 0x9E3779B9) & _MASK, ((seed >> 32) + i * 0xBB67AE85) & _MASK) for i in range(_ROUNDS)]


@dataclass(frozen=True, eq=False)
class SamplingBatch(OnDemand):
    """How each sampled row is drawn, in the order of ``StepBatch.sample_rows``.

    Attributes:
        keys: (seed, position of the token to be drawn) per row.
        arrays, device: see ``OnDemand``.
        greedy: every row has temperature 0.
        truncated: some row uses top_k, top_p or min_p.
        temperature: [samples] float32; 0 is greedy.
        top_k: [samples] int64; 0 is off.
        top_p: [samples] float32 in [0, 1]; 1 is off, 0 keeps the best token only.
        min_p: [samples] float32 in [0, 1]; 0 is off.
        key_tensor: [samples, 2] int64, ``keys``.
    """

    keys: tuple[tuple[int, int], ...]
    arrays: dict[str, array[int] | array[float]]
    device: torch.device | str
    greedy: bool
    truncated: bool
    temperature: Tensor = field(init=False)
    top_k: Tensor = field(init=False)
    top_p: Tensor = field(init=False)
    min_p: Tensor = field(init=False)
    key_tensor: Tensor = field(init=False)

    @staticmethod
    def of(
        *,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        keys: Sequence[tuple[int, int]],
        device: torch.device | str = "cpu",
    ) -> SamplingBatch:
        """From values per row."""
        arrays: dict[str, array[int] | array[float]] = {
            "temperature": array("f", temperature),
            "top_k": array("q", top_k),
            "top_p": array("f", top_p),
            "min_p": array("f", min_p),
            "key_tensor": array("q", itertools.chain.from_iterable(keys)),
        }
        greedy = not any(temperature)
        truncated = not greedy and any(
            t > 0 and (k > 0 or p < 1 or m > 0) for t, k, p, m in zip(temperature, top_k, top_p, min_p, strict=True)
        )
        return SamplingBatch(tuple(keys), arrays, device, greedy, truncated)

    @staticmethod
    def build(rows: Sequence[tuple[Request, int]], device: torch.device | str = "cpu") -> SamplingBatch:
        """From (request, position of the token to be drawn) per row."""
        params = [request.params for request, _ in rows]
        return SamplingBatch.of(
            temperature=[0.0 if p.greedy else p.temperature for p in params],
            top_k=[min(max(p.top_k, 0), _ALL) for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            keys=[(request.seed, position) for request, position in rows],
            device=device,
        )

    def select(self, rows: Tensor) -> SamplingBatch:
        """The part of it that some rows are, [n] int64 on the CPU."""
        at = rows.tolist()
        own: dict[str, Any] = {
            name: [values[i] for i in at] for name, values in self.arrays.items() if name in _SETTINGS
        }
        return SamplingBatch.of(keys=[self.keys[i] for i in at], device=self.device, **own)

    def shape(self, name: str) -> tuple[int, ...]:
        return (len(self.keys), 2) if name == "key_tensor" else super().shape(name)


_SETTINGS = ("temperature", "top_k", "top_p", "min_p")

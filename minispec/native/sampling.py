"""Keyed noise, draws and children by the compiled library: what ``minispec.sampling`` and the reference kernels compute
in torch, up to the rounding of sums, several times as fast."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence
from ctypes import byref, c_void_p
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.native.library import DrawsStruct, Team
from minispec.sampling import Noise, SamplingBatch
from minispec.upload import tensor_of

if TYPE_CHECKING:
    from minispec.drafters.grow import Best


class NativeSampling:
    """``Noise.native`` of a CPU.

    Args:
        team: the threads that run it.
    """

    def __init__(self, team: Team) -> None:
        self._team = team

    def gumbel(self, keys: Sequence[tuple[int, int]], vocab_size: int) -> Tensor:
        """``minispec.sampling.gumbel`` of (seed, position) pairs: [len(keys), vocab_size] float32."""
        pairs = torch.tensor(keys, dtype=torch.int64)
        noise = torch.empty((len(keys), vocab_size))
        self._team.library.gumbel(self._team.handle, pairs.data_ptr(), len(keys), vocab_size, noise.data_ptr())
        return noise

    def gumbel_at(self, keys: Sequence[tuple[int, int]], tokens: Tensor) -> Tensor:
        """``minispec.sampling.gumbel_at``: [len(keys), k] float32.

        Args:
            keys: (seed, position) pairs.
            tokens: [len(keys), k] int64; or [k], the same for all.
        """
        pairs, tokens = torch.tensor(keys, dtype=torch.int64), tokens.contiguous()
        k = tokens.shape[-1]
        noise = torch.empty((len(keys), k))
        stride = k if tokens.dim() == 2 else 0
        self._team.library.gumbel_at(
            self._team.handle, pairs.data_ptr(), tokens.data_ptr(), stride, len(keys), k, noise.data_ptr()
        )
        return noise

    def sample(self, logits: Tensor, sampling: SamplingBatch, noise: Noise) -> Tensor:
        """``kernels.sample`` without edits; arguments and result as there, but -1 for a row that is not finite."""
        return tensor_of(self.draw(logits.float().contiguous(), sampling, noise))

    def draw(self, logits: Tensor, sampling: SamplingBatch | None, noise: Noise) -> array[int]:
        """The same without another call into torch.

        Args:
            logits: [samples, vocab] float32, contiguous.
            sampling: how each row is drawn; None takes the likeliest.
        """
        rows, vocab = logits.shape
        tokens = array("q", bytes(8 * rows))
        draws = _Greedy(rows) if sampling is None else _Draws(sampling, noise.names, partial(_kept, noise))
        self._team.library.sample(
            self._team.handle, byref(draws.struct), logits.data_ptr(), rows, vocab, tokens.buffer_info()[0]
        )
        return tokens

    def top_children(self, logits: Tensor, sampling: SamplingBatch, noise: Noise, k: int) -> tuple[Tensor, Tensor]:
        """``kernels.top_children``; arguments and result as there; a row that is not finite has NaN for values."""
        logits = logits.float().contiguous()
        rows, vocab = logits.shape
        tokens = torch.empty((rows, k), dtype=torch.int64)
        values = torch.empty((rows, k))
        draws = _Draws(sampling, noise.names, partial(_kept, noise))
        self._team.library.children(
            self._team.handle, byref(draws.struct), logits.data_ptr(), rows, vocab, k, None, tokens.data_ptr(),
            values.data_ptr(),
        )  # fmt: skip
        return tokens, values

    def children(self, logits: Tensor, sampling: SamplingBatch, noise: Noise, k: int, ids: Tensor | None) -> Best:
        """The same as lists, hardly with a call into torch, of logits that belong to some of the vocabulary.

        Args:
            logits: [n, vocab] float32, contiguous.
            noise: of all of the vocabulary.
            ids: [vocab] int64, which tokens they are of; None where these are the indices.
        """
        rows, vocab = logits.shape
        tokens, values = array("q", bytes(8 * rows * k)), array("f", bytes(4 * rows * k))
        draws = _Draws(sampling, ids, partial(_kept, noise) if ids is None else partial(self._noise_at, ids, vocab))
        self._team.library.children(
            self._team.handle, byref(draws.struct), logits.data_ptr(), rows, vocab, k, draws.struct.names,
            tokens.buffer_info()[0], values.buffer_info()[0],
        )  # fmt: skip
        names, scores = tokens.tolist(), values.tolist()
        starts = range(0, rows * k, k)
        return [names[i : i + k] for i in starts], [scores[i : i + k] for i in starts]

    def _noise_at(self, ids: Tensor, count: int, keys: Sequence[tuple[int, int]]) -> _Noise:
        distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        pairs, noise = array("q", itertools.chain.from_iterable(distinct)), array("f", bytes(4 * count * len(distinct)))
        (given, _), (first, _) = pairs.buffer_info(), noise.buffer_info()
        self._team.library.gumbel_at(self._team.handle, given, ids.data_ptr(), 0, len(distinct), count, first)
        return noise, [first + 4 * count * distinct[key] for key in keys]


_Noise = tuple[object, list[int]]
"""What holds rows of noise, and where each lies."""


def _kept(noise: Noise, keys: Sequence[tuple[int, int]]) -> _Noise:
    rows = noise.each(keys)
    return rows, [row.data_ptr() for row in rows]


class _Greedy:
    """The likeliest token of some rows: nothing else is read of them."""

    def __init__(self, rows: int) -> None:
        self._held = array("f", bytes(4 * rows))
        self.struct = DrawsStruct(self._held.buffer_info()[0])


class _Draws:
    """A SamplingBatch and the noise of its rows, for a call; keeps what the struct points to.

    Args:
        sampling: how each row is drawn.
        names: [vocab] int64, the tokens whose noise it is; None where they are the indices.
        noise: of (seed, position) pairs, [vocab] float32 each.
    """

    def __init__(
        self,
        sampling: SamplingBatch,
        names: Tensor | None,
        noise: Callable[[Sequence[tuple[int, int]]], _Noise],
    ) -> None:
        arrays = sampling.arrays
        pointers = (c_void_p * len(sampling.keys))()
        held: object = None
        # limited rows want noise for their support only, which is computed there; greedy ones want none
        if not sampling.greedy:
            settings = zip(*[arrays[name] for name in ("temperature", "top_k", "top_p", "min_p")], strict=True)
            rows = [i for i, (t, k, p, m) in enumerate(settings) if t > 0 and k == 0 and p == 1 and m == 0]
            if rows:
                held, addresses = noise([sampling.keys[i] for i in rows])
                for i, address in zip(rows, addresses, strict=True):
                    pointers[i] = address
        self._held = sampling, names, held
        temperature, top_k, top_p, min_p, keys = [values.buffer_info()[0] for values in arrays.values()]
        self.struct = DrawsStruct(
            temperature, top_k, top_p, min_p, keys, None if names is None else names.data_ptr(),
            ctypes.cast(pointers, ctypes.POINTER(c_void_p)),
        )  # fmt: skip

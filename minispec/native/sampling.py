"""Keyed noise, draws and children by the compiled library: what ``minispec.sampling`` and the reference kernels compute
in torch, up to the rounding of sums, several times as fast."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_void_p

import torch
from torch import Tensor

from minispec.native.library import DrawsStruct, Team
from minispec.sampling import Noise, SamplingBatch


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
        """``kernels.sample`` without edits; arguments and result as there. Of a row that is not finite it is a token
        whose logit is not."""
        logits = logits.float().contiguous()
        rows, vocab = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        draws = _Draws(sampling, noise)
        self._team.library.sample(
            self._team.handle, byref(draws.struct), logits.data_ptr(), rows, vocab, tokens.data_ptr()
        )
        return tokens

    def top_children(self, logits: Tensor, sampling: SamplingBatch, noise: Noise, k: int) -> tuple[Tensor, Tensor]:
        """``kernels.top_children``; arguments and result as there; a row that is not finite has NaN for values."""
        logits = logits.float().contiguous()
        rows, vocab = logits.shape
        tokens = torch.empty((rows, k), dtype=torch.int64)
        values = torch.empty((rows, k))
        draws = _Draws(sampling, noise)
        self._team.library.children(
            self._team.handle, byref(draws.struct), logits.data_ptr(), rows, vocab, k, None, tokens.data_ptr(),
            values.data_ptr(),
        )  # fmt: skip
        return tokens, values


class _Draws:
    """A SamplingBatch and the noise of its rows, for a call; keeps what the struct points to."""

    def __init__(self, sampling: SamplingBatch, noise: Noise) -> None:
        self._held: list[Tensor] = []
        keys = sampling.key_tensor
        if keys is None:
            keys = torch.tensor(sampling.keys, dtype=torch.int64)
        pointers = (c_void_p * len(sampling.keys))()
        # limited rows want noise for their support only, which is computed there; greedy ones want none
        whole = sampling.temperature > 0
        if sampling.truncated:
            whole &= (sampling.top_k == 0) & (sampling.top_p == 1) & (sampling.min_p == 0)
        rows = whole.nonzero()[:, 0].tolist()
        if rows:
            self._held = noise.each([sampling.keys[i] for i in rows])
            for i, row in zip(rows, self._held, strict=True):
                pointers[i] = row.data_ptr()
        names = noise.names
        self._held += (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, keys)
        self.struct = DrawsStruct(
            sampling.temperature.data_ptr(), sampling.top_k.data_ptr(), sampling.top_p.data_ptr(),
            sampling.min_p.data_ptr(), keys.data_ptr(), None if names is None else names.data_ptr(),
            ctypes.cast(pointers, ctypes.POINTER(c_void_p)),
        )  # fmt: skip

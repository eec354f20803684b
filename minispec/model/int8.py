"""Linear layers with weights of 8 bits, in two kinds: for a GPU's kernel, and for a CPU's compiled step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec import kernels
from minispec.model.linear import Linear, Rows, steady_rows

GROUP = 32
"""Inputs that share a scale, in weights and in activations."""

_PIECE = 1 << 21  # weights widened at a time: 8 MB of float32


class Blocks(NamedTuple):
    """A weight in blocks of ``GROUP`` inputs.

    Attributes:
        values: [out, in] int8, -127 to 127.
        scales: [out, blocks of inputs] bfloat16.
    """

    values: Tensor
    scales: Tensor


def to_blocks(weight: Tensor) -> Blocks:
    """Round a weight [out, in] as llama.cpp's Q8_0 does: a scale for every output and ``GROUP`` inputs."""
    outputs, inputs = weight.shape
    blocks = Blocks(
        torch.empty((outputs, inputs), dtype=torch.int8),
        torch.empty((outputs, -(-inputs // GROUP)), dtype=torch.bfloat16),
    )
    for part in _pieces(outputs, inputs):
        groups = _grouped(weight[part].float())
        scales = (groups.abs().amax(-1) / 127).bfloat16()
        # a block of zeros has no scale; and where a scale was rounded down, its greatest weight is cut off
        divisor = torch.where(scales > 0, scales, 1.0).float()
        values = (groups / divisor[..., None]).round_().clamp_(-127, 127)
        blocks.values[part] = values.flatten(1)[:, :inputs].to(torch.int8)
        blocks.scales[part] = scales
    return blocks


def from_blocks(blocks: Blocks) -> Tensor:
    """The weight that they stand for, [out, in] float32, exactly."""
    inputs = blocks.values.shape[1]
    return (_grouped(blocks.values) * blocks.scales.float()[..., None]).flatten(1)[:, :inputs]


def round_rows(x: Tensor) -> Tensor:
    """Activations [rows, in] as the compiled step rounds them, float32: -127 to 127 times a scale for every row and
    ``GROUP`` inputs. A row depends on itself alone."""
    groups = _grouped(x.float())
    top = groups.abs().amax(-1, keepdim=True)
    factor = torch.where(top > 1e-30, top.new_tensor(127.0) / top, 0.0)  # a plain 127 / top is not a division in torch
    rounded = (groups * factor).round_().mul_(top / 127)
    return rounded.flatten(1)[:, : x.shape[1]]


class BlockInt8Linear(Linear):
    """A Linear with weights in blocks of 8 bits, and inputs rounded likewise: what the compiled step computes, here by
    widening the weight piece by piece at every call. That is slow: several times a bfloat16 layer.

    It serves until the compiled step has been built, and where there is none.

    Attributes:
        blocks: the weight.
    """

    def __init__(self, weight: Tensor | Blocks, bias: Tensor | None = None) -> None:
        """Args:
        weight: [out, in], rounded here; or what ``to_blocks`` made of it.
        bias: [out].
        """
        self.blocks = weight if isinstance(weight, Blocks) else to_blocks(weight)
        self.out_features, self.in_features = self.blocks.values.shape
        self.bias = bias
        self.packed = False

    def product(self, x: Tensor) -> Tensor:
        rounded = round_rows(x)
        out = torch.empty((x.shape[0], self.out_features), dtype=torch.float32)
        for part in _pieces(self.out_features, self.in_features):
            out[:, part] = rounded @ from_blocks(Blocks(self.blocks.values[part], self.blocks.scales[part])).T
        return (out if self.bias is None else out.add_(self.bias)).to(x.dtype)

    def steady(self) -> Rows:
        """See ``steady_rows``.

        Raises:
            ConfigError: as there.
        """
        first = next(_pieces(self.out_features, self.in_features))
        return steady_rows(first.stop, self.in_features, torch.float32)


class OutputInt8Linear(Linear):
    """A Linear with weights of 8 bits and a scale per output: ``kernels.linear_int8``, for a GPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Arguments as for Linear; the weight is rounded here and let go of."""
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = False
        self.weight, self.scale = kernels.quantize_int8(weight)

    def product(self, x: Tensor) -> Tensor:
        return kernels.linear_int8(x, self.weight, self.scale, self.bias)


def _pieces(outputs: int, inputs: int) -> Iterator[slice]:
    """Outputs of a weight, some at a time and all in one number: the last piece reaches back into the one before."""
    size = min(outputs, max(_PIECE // inputs, 1))
    for begin in range(0, outputs, size):
        end = min(begin + size, outputs)
        yield slice(end - size, end)


def _grouped(x: Tensor) -> Tensor:
    """[n, in] to [n, blocks, GROUP], with zeros behind the last input."""
    short = -x.shape[1] % GROUP
    return (F.pad(x, (0, short)) if short else x).unflatten(1, (-1, GROUP))

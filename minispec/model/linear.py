"""Linear layers of the forward pass. Here, and in the runner, is all that is known of devices.

On a CPU in bfloat16 the weights are packed once into oneDNN's blocked layout; on two cores that makes a layer of one to
eight rows 1.3 to 2 times faster than ``F.linear``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec.errors import ConfigError

PACK_ROWS = 16
"""Row count oneDNN lays the weights out for; measured to serve 1 to 64 rows."""

RESCORED = 8
"""Candidates per row whose logits are computed again in float32, where the head's own are rounded to 16 bits."""


@dataclass(frozen=True)
class Rows:
    """How many rows a product is given at a time.

    Attributes:
        least: fewer are padded with zeros.
        tile: more are cut into products of this many, the last one padded; None is all at once.
    """

    least: int = 1
    tile: int | None = None


_TILED = Rows(least=16, tile=16), Rows(least=32, tile=32)
_PACKED = Rows(), Rows(least=2), Rows(least=16), *_TILED
"""Ways to give rows to a product whose result for a row shall not depend on their number, cheapest first. Libraries
that choose by the number of rows anew, as MKL does, get a fixed one."""

_PROBED = (1, 2, 3, 5, 8, 12, 15, 16, 17, 31, 32, 33, 57, 64, 96, 128)

Product = Callable[[Tensor], Tensor]
"""[rows, in] to [rows, out]."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """True where oneDNN takes packed weights."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Linear:
    """``x @ weight.T + bias`` for x [rows, in], giving [rows, out] in x's dtype.

    Holds the only reference to its weight, so that packing frees the original.

    Attributes:
        rows: how many rows it computes at a time.
    """

    rows: Rows = Rows()

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Args:
        weight: [out, in], in the dtype and on the device of the forward.
        bias: [out].
        """
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = can_pack(weight.device, weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x) if self.rows == Rows() else by_rows(self.product, x, self.rows)

    def product(self, x: Tensor) -> Tensor:
        """All rows at once."""
        if self.packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        return F.linear(x, self.weight, self.bias)


def by_rows(product: Product, x: Tensor, rows: Rows) -> Tensor:
    """``product(x)``, made as ``rows`` says."""
    n = x.shape[0]
    padded = max(n, rows.least) if rows.tile is None else -(-n // rows.tile) * rows.tile
    whole = x if padded == n else F.pad(x, (0, 0, 0, padded - n))
    if rows.tile is None or padded == rows.tile:
        return product(whole)[:n]
    return torch.cat([product(part) for part in whole.split(rows.tile)])[:n]


def steady_rows(out_features: int, in_features: int, dtype: torch.dtype) -> Rows:
    """The cheapest way with which a row's result depends neither on the rows beside it nor on its place.

    Libraries choose kernels, and with them the order of sums, by the number of rows. On AVX-512 oneDNN's bfloat16
    products sum alike from two rows on; on AMX, and in float32, more is needed. It is tried with sums that cancel
    exactly, so that what is left is the rounding of their order, which plain random numbers would mostly hide below the
    precision of the result.

    Raises:
        ConfigError: none does.
    """
    generator = torch.Generator().manual_seed(0)
    half = in_features // 2
    order = torch.randperm(half, generator=generator)
    weight = torch.randn((out_features, half), generator=generator, dtype=dtype)
    x = torch.randn((max(_PROBED), half), generator=generator, dtype=dtype)
    rest = (0, in_features % 2)
    linear = Linear(F.pad(torch.cat([weight, -weight[:, order]], dim=1), rest))
    x = F.pad(torch.cat([x, x[:, order]], dim=1), rest)
    for rows in _PACKED if linear.packed else _TILED:
        whole = by_rows(linear.product, x, rows)
        counts = [n for n in _PROBED if rows.tile is None or n in (1, rows.tile, rows.tile + 1)]
        if torch.equal(by_rows(linear.product, x.flip(0), rows).flip(0), whole) and all(
            torch.equal(by_rows(linear.product, x[:n], rows), whole[:n]) for n in counts
        ):
            return rows
    raise ConfigError(
        "--deterministic cannot be had on this machine: in its matrix library a row's result depends on the rows "
        "beside it. Leave it out"
    )


class Head:
    """The output layer: hidden states to float32 logits with more than 16 bits of precision.

    bfloat16 logits near 25 are 0.125 apart, so ties would be common and the choice among them would turn on who shares
    the step. CUDA accumulates and returns float32. On a CPU, where the product comes rounded, the ``RESCORED`` best
    candidates of each row are computed again exactly.

    Attributes:
        weight: [vocab, hidden], as it was given.
        linear: makes the logits.
    """

    def __init__(self, weight: Tensor, linear: Linear | None = None) -> None:
        """Args:
        weight: [vocab, hidden]; kept as it is, for it may be the embedding too.
        linear: a layer with the same weight, rounded in its own way; None makes a plain one.
        """
        self.weight = weight
        self.linear = Linear(weight) if linear is None else linear

    @property
    def vocab_size(self) -> int:
        """Number of logits a row."""
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Args:
            x: [rows, hidden], normed.

        Returns:
            [rows, vocab] float32.
        """
        if x.dtype == torch.float32 or x.shape[0] == 0:
            return self.linear(x) if x.shape[0] else x.new_empty((0, self.vocab_size), dtype=torch.float32)
        if x.is_cuda:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return self._rescored(self.linear(x), x)

    def _rescored(self, rounded: Tensor, x: Tensor) -> Tensor:
        """Logits in float32, the best of each row exact."""
        best = rounded.topk(min(RESCORED, self.vocab_size), dim=-1, sorted=False).indices
        # not a matrix product, whose sums for one row are made otherwise than for several
        exact = (F.embedding(best, self.weight).float() * x.float()[:, None]).sum(-1)
        return rounded.float().scatter_(1, best, exact)

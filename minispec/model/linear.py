"""Linear layers of the forward pass. Here, and in the runner, is all that is known of devices.

On a CPU in bfloat16 the weights are packed once into oneDNN's blocked layout; on two cores that makes a layer of one to
eight rows 1.3 to 2 times faster than ``F.linear``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACK_ROWS = 16
"""Row count oneDNN lays the weights out for; measured to serve 1 to 64 rows."""

RESCORED = 8
"""Candidates per row whose logits are computed again in float32, where the head's own are rounded to 16 bits."""


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
    """

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
        if self.packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        return F.linear(x, self.weight, self.bias)


class Head:
    """The output layer: hidden states to float32 logits with more than 16 bits of precision.

    bfloat16 logits near 25 are 0.125 apart, so ties would be common and the choice among them would turn on who shares
    the step. CUDA accumulates and returns float32. On a CPU, where the product comes rounded, the ``RESCORED`` best
    candidates of each row are computed again exactly.
    """

    def __init__(self, weight: Tensor) -> None:
        """Args:
        weight: [vocab, hidden]; kept as it is, for it may be the embedding too.
        """
        self.weight = weight
        self._linear = Linear(weight)

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
            return self._linear(x) if x.shape[0] else x.new_empty((0, self.vocab_size), dtype=torch.float32)
        if x.is_cuda:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        rounded = self._linear(x)
        best = rounded.topk(min(RESCORED, self.vocab_size), dim=-1, sorted=False).indices
        exact = F.embedding(best, self.weight).float() @ x.float()[:, :, None]
        return rounded.float().scatter_(1, best, exact[..., 0])

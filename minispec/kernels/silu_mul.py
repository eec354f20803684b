"""The SwiGLU activation (Shazeer 2020, arXiv 2002.05202): ``silu(gate) * up``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        gate_up: [rows, 2 * dim], gate in the first half.

    Returns:
        [rows, dim].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up

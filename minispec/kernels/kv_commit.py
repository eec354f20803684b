"""The selective KV update: move accepted nodes' keys and values to consecutive positions, in all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_commit_ref(k: Tensor, v: Tensor, source: Sequence[int], target: Sequence[int]) -> None:
    """Torch reference, and the path of a CPU.

    Args:
        k, v: [layers, kv_heads, positions, head_dim], changed in place.
        source, target: kv_index of each node before and after; targets are distinct. A target may be another node's
            source, so everything is gathered before anything is written.
    """
    src, dst = torch.tensor(source, device=k.device), torch.tensor(target, device=k.device)
    k[:, :, dst] = k[:, :, src]
    v[:, :, dst] = v[:, :, src]

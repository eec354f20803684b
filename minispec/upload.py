"""Host data to the device in one copy that nobody waits for.

A copy from pageable memory makes CUDA wait for the stream, and each small copy costs a launch. So what a step needs is
packed into one pinned buffer. Torch's pinned allocator hands a buffer out again only once the copy from it is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGN = 16
"""Bytes. Triton compiles a second kernel for pointers that are not aligned to 16."""


def upload(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """``tensors``, which lie on the CPU, on ``device``. On CUDA in one asynchronous copy."""
    device = torch.device(device)
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    packing = Packing(tensors)
    return packing.views(packing.pack(tensors, pin=True).to(device, non_blocking=True))


class Packing:
    """Tensors of given shapes side by side in one buffer.

    Attributes:
        nbytes: size of the buffer.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._fields: list[tuple[int, int, torch.dtype, torch.Size]] = []
        end = 0
        for tensor in like:
            self._fields.append((end, tensor.nbytes, tensor.dtype, tensor.shape))
            end += -(-tensor.nbytes // _ALIGN) * _ALIGN
        self.nbytes = end

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The fields of a buffer, uint8 [nbytes]."""
        return [buffer[at : at + size].view(dtype).view(shape) for at, size, dtype, shape in self._fields]

    def pack(self, tensors: Sequence[Tensor], *, pin: bool) -> Tensor:
        """A buffer on the CPU, uint8 [nbytes]. A tensor may be smaller than its field; the rest is 0."""
        buffer = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=pin)
        for field, tensor in zip(self.views(buffer), tensors, strict=True):
            field[tuple(slice(n) for n in tensor.shape)].copy_(tensor)
        return buffer

"""Host data to the device in one copy that nobody waits for.

A copy from pageable memory makes CUDA wait for the stream, and each small copy costs a launch. So what a step needs is
packed into one pinned buffer. Torch's pinned allocator hands a buffer out again only once the copy from it is done.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_ALIGN = 16
"""Bytes. Triton compiles a second kernel for pointers that are not aligned to 16."""


_DTYPES = {"q": torch.int64, "i": torch.int32, "f": torch.float32, "b": torch.bool}


def tensor_of(values: array[int] | array[float]) -> Tensor:
    """A tensor on the CPU that shares the array's memory; of code ``b`` it is bool.

    For short lists an array is made in a fraction of the time that ``torch.tensor`` takes, and compiled code reads it
    without a tensor: right behind a forward, which has swept the caches, the first call into torch takes 50 µs.
    """
    dtype = _DTYPES[values.typecode]
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)


class OnDemand:
    """Arrays on the host, and tensors of the same names on a device, made when the first is asked for: on a CPU that
    one is, elsewhere all are, by one copy.

    Attributes:
        arrays: by name; of more than one dimension they are flat.
        device: where the tensors lie.
    """

    arrays: Mapping[str, array[int] | array[float]]
    device: torch.device | str

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return (len(self.arrays[name]),)

    def __getattr__(self, name: str) -> Tensor:
        if name not in self.__dict__.get("arrays", ()):
            raise AttributeError(f"a {type(self).__name__} has no {name}")
        names = (name,) if torch.device(self.device).type == "cpu" else tuple(self.arrays)
        tensors = upload([tensor_of(self.arrays[own]).view(self.shape(own)) for own in names], self.device)
        self.__dict__.update(zip(names, tensors, strict=True))
        made: Tensor = self.__dict__[name]
        return made


def upload(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """``tensors``, which lie on the CPU, on ``device``. On CUDA in one asynchronous copy."""
    device = torch.device(device)
    if device.type == "cpu":
        return list(tensors)
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

"""Triton, imported at the first launch of a kernel: a server on a CPU saves its 70 MB and 0.15 s.

``@jit`` stands for ``@triton.jit``. A kernel's file imports ``triton.language as tl`` for the type checker only; the
name is bound when the kernel is built.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """One recorded launch: what the compile tests compile."""

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Device:
    """What a launcher needs to know to choose its tiles.

    Attributes:
        processors: multiprocessors.
        hopper: an NVIDIA GPU of compute capability 9.0 or higher: tensor cores that read shared memory, and more of it.
    """

    processors: int
    hopper: bool


@dataclass
class _Recorder:
    device: Device
    launches: list[Launch]


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(device: Device) -> Iterator[list[Launch]]:
    """Collect launches instead of running them, so that launchers may be given tensors without storage."""
    recorder = _Recorder(device, [])
    token = _recorder.set(recorder)
    try:
        yield recorder.launches
    finally:
        _recorder.reset(token)


class Kernel:
    """A Triton kernel or device function that is built when first needed. ``kernel[grid](*args)`` launches it."""

    def __init__(self, fn: types.FunctionType) -> None:
        self.fn = fn

    @cached_property
    def jitted(self) -> Any:
        """The function as Triton has it; compiled per set of argument types at a launch."""
        import triton
        import triton.language as tl

        names = self.fn.__globals__
        used = {n: v.jitted for n in self.fn.__code__.co_names if isinstance(v := names.get(n), Kernel)}
        # a copy with its own globals, where `tl` and the device functions it calls are real
        fn = types.FunctionType(self.fn.__code__, {**names, "tl": tl, **used}, self.fn.__name__, self.fn.__defaults__)
        fn.__annotations__ = self.fn.__annotations__
        fn.__module__, fn.__qualname__ = self.fn.__module__, self.fn.__qualname__
        return triton.jit(fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        recorder = _recorder.get()
        if recorder is None:
            launch: Callable[..., None] = self.jitted[grid]
            return launch
        return lambda *args, **options: recorder.launches.append(Launch(self, grid, args, options))

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.fn.__name__} runs inside a kernel only")


def jit(fn: Callable[..., Any]) -> Kernel:
    """Mark a Triton kernel or a device function."""
    assert isinstance(fn, types.FunctionType)
    return Kernel(fn)


def cdiv(a: int, b: int) -> int:
    """Division rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


@cache
def _gpu(index: int | None) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.multi_processor_count, torch.version.hip is None and properties.major >= 9)


def device(tensor: Tensor) -> Device:
    """The device of a launch: the tensor's, or the one recorded for; the interpreter has a single processor."""
    recorder = _recorder.get()
    if recorder is not None:
        return recorder.device
    return _gpu(tensor.device.index) if tensor.is_cuda else Device(1, False)

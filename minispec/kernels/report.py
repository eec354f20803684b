"""Registers, shared memory and spills of every kernel, without a GPU: ``python -m minispec.kernels.report``.

Each case calls a launcher with tensors that have no storage while launches are recorded; what would have been launched
is compiled for every target with the same argument types, alignment hints and options as on a device.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minispec.kernels._triton import Device, Launch, recording

LIMITS = {"sm80": 163 << 10, "sm90": 227 << 10, "sm100": 227 << 10, "gfx942": 64 << 10}
"""Most shared memory one program may have, in bytes."""

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Compiled:
    """One kernel on one target.

    Attributes:
        registers: per thread; None where the tool chain does not say (AMD).
        shared: bytes of shared memory.
        spills: bytes of local memory and stack a thread spills to.
    """

    case: str
    kernel: str
    target: str
    registers: int
    shared: int
    spills: int

    @property
    def problem(self) -> str | None:
        """Why it may not ship."""
        if self.spills:
            return f"spills {self.spills} bytes"
        if self.shared > LIMITS[self.target]:
            return f"{self.shared} bytes of shared memory, {LIMITS[self.target]} available"
        return None


def record(case: Callable[[], object], target: str) -> list[Launch]:
    """The distinct launches of a case on a target."""
    with recording(Device(132, target in ("sm90", "sm100"))) as launches:
        case()
    unique = {(launch.kernel.fn.__name__, str(_signature(launch))): launch for launch in launches}
    return list(unique.values())


def _signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[Any]]]]:
    """Argument types, compile-time constants and alignment hints, chosen as Triton's launcher chooses them."""
    names = launch.kernel.jitted.arg_names
    given = dict(zip(names, launch.args, strict=False)) | launch.options
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    positional = len(launch.args)
    for i, name in enumerate(names):
        value = given[name]
        if i >= positional or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            hints[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                hints[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, hints


def compile_launch(case: str, launch: Launch, target: str) -> Compiled:
    """Compile one recorded launch down to the machine code of ``target``, a key of LIMITS."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, hints = _signature(launch)
    options = {k: v for k, v in launch.options.items() if k not in signature}
    source = ASTSource(launch.kernel.jitted, signature, constants, hints)
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[2:]), 32)
    compiled = triton.compile(source, target=gpu, options=options)
    if target.startswith("gfx"):
        registers, spills = _amd_resources(compiled.asm["amdgcn"])
    else:
        registers, spills = _nvidia_resources(compiled.asm["cubin"])
    return Compiled(case, launch.kernel.fn.__name__.strip("_"), target, registers, compiled.metadata.shared, spills)


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a cubin, as Triton's own cuobjdump reads them."""
    import triton.backends.nvidia

    tool = Path(next(iter(triton.backends.nvidia.__path__))) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _amd_resources(assembly: str) -> tuple[int, int]:
    """Vector registers and spilled bytes, from the kernel's metadata."""

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found.group(1)) if found else 0

    return field("vgpr_count"), field("private_segment_fixed_size")


def compile_all(cases: Iterable[tuple[str, Callable[[], object]]], targets: Iterable[str]) -> Iterator[Compiled]:
    """Compile every launch of every case for every target."""
    targets = list(targets)
    for name, case in cases:
        for target in targets:
            for launch in record(case, target):
                yield compile_launch(name, launch, target)


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status is 1 if a kernel spills or asks for too much shared memory."""
    from minispec.kernels.report_cases import cases

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=LIMITS, help="compile for this target only; may repeat")
    parser.add_argument("--quick", action="store_true", help="the cases of the fast test suite only")
    parser.add_argument("--kernel", default="", help="only cases whose name contains this")
    args = parser.parse_args(argv)
    chosen = [(name, case) for name, case in cases(quick=args.quick) if args.kernel in name]
    print(f"{'case':46} {'kernel':24} {'target':7} {'registers':>9} {'shared':>7} {'spills':>6}")
    problems = 0
    for row in compile_all(chosen, args.target or LIMITS):
        line = f"{row.case:46} {row.kernel:24} {row.target:7} {row.registers:9} {row.shared:7} {row.spills:6}"
        print(line if row.problem is None else f"{line}  {row.problem}", flush=True)
        problems += row.problem is not None
    print(f"{problems} problems" if problems else "no spills, all within the shared memory")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m minispec.bench.device``: check every kernel on this machine, time it, and time whole decode steps.

Needs torch, triton, safetensors and numpy, no model files. Checks come before times. On a CPU, or with ``--small``, the
same runs at a small size. Prints as it goes; ends with a table and one JSON line, also after an interruption. The exit
status is 0 if nothing failed.

The cases run in processes of their own, as an illegal access spoils CUDA for its process: a case that ends its process
or does not answer has failed, and the rest goes on in a new one.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Result = dict[str, Any]

SECTIONS = ("kernels", "steps")
_SHARE = 0.55  # of the time for the first section; the second gets what is left
_SILENCE = 90.0  # seconds a case may take, compilation included
_GRACE = 40.0  # seconds after its time until a section is stopped; it stops by itself between cases
_RESTARTS = 8
_MARK = "@@ "


class Report:
    """What is known so far, and how it is shown."""

    def __init__(self) -> None:
        self.machine: Result = {}
        self.results: list[Result] = []

    def add(self, result: Result) -> None:
        self.results.append(result)
        print(self._line(result), flush=True)

    @property
    def failed(self) -> list[str]:
        return [result["name"] for result in self.results if result["ok"] is False]

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a copy."""
        return float(self.machine.get("copy_bytes_per_s", 0.0))

    def finish(self, started: float) -> int:
        """Print the table, the aims and the JSON line; returns the exit status."""
        print(f"\n{json.dumps(self.machine, indent=1)}\n\n{_HEADER}")
        for result in self.results:
            print(self._line(result))
        aims = self.aims()
        for aim in aims:
            print(f"{'met   ' if aim['met'] else 'missed'}  {aim['aim']}: {aim['value']:.3g}")
        passed = sum(result["ok"] is True for result in self.results)
        skipped = sum(result["ok"] is None for result in self.results)
        print(f"{passed} passed, {len(self.failed)} failed, {skipped} skipped in {time.monotonic() - started:.0f} s")
        for name in self.failed:
            print(f"FAILED  {name}")
        whole = {"machine": self.machine, "failed": self.failed, "aims": aims, "results": self.results}
        print(json.dumps(whole), flush=True)
        return 1 if self.failed or not passed else 0

    def aims(self) -> list[Result]:
        """The figures to reach on a GPU, as far as they were measured."""
        if not self.machine.get("cuda"):
            return []
        done = {result["name"]: result for result in self.results if result.get("ms")}
        aims = []

        def aim(name: str, value: float, limit: float, *, least: bool) -> None:
            aims.append({"aim": name, "value": value, "met": value >= limit if least else value <= limit})

        one = done.get("step 1x1 nodes, 1024 keys, graphs")
        if one and self.bandwidth:
            speed = one["weight_bytes"] / (one["ms"] / 1e3) / self.bandwidth
            aim("weights read at a share of copy bandwidth, batch 1 (>= 0.85)", speed, 0.85, least=True)
        many = done.get("step 1x64 nodes, 1024 keys, graphs")
        if one and many:
            aim("64 nodes against one, batch 1 (<= 1.15)", many["ms"] / one["ms"], 1.15, least=False)
        for name, result in done.items():
            if name.startswith("tree_attention") and result.get("rival_ms"):
                speed = result["rival_ms"] / result["ms"]
                aim(f"{name}, speed against torch's (>= 0.8)", speed, 0.8, least=True)
            if name.startswith("step") and name.endswith("graphs"):
                aim(f"{name}, host against device (< 1)", result["host_ms"] / result["ms"], 1.0, least=False)
        return aims

    def _line(self, result: Result) -> str:
        status = {True: "ok", False: "FAILED", None: "-"}[result["ok"]]
        ms, parts = result.get("ms"), []
        if ms:
            speed = result.get("bytes", 0) / (ms / 1e3)
            if speed:
                parts.append(f"{speed / 1e9:8.1f} GB/s")
                parts.append(f"{speed / self.bandwidth:6.1%} of copy" if self.bandwidth else "")
            if result.get("flops"):
                parts.append(f"{result['flops'] / (ms / 1e3) / 1e12:6.1f} TFLOP/s")
            if result.get("rival_ms"):
                parts.append(f"{result['rival_ms'] / ms:5.2f} x {result['rival']}")
            if "host_ms" in result:
                parts.append(f"host {result['host_ms']:.3f} ms, whole step {result['step_ms']:.3f} ms")
        error = "" if result.get("error") is None else f"{result['error']:.2g}"
        shown = f"{ms:10.4f}" if ms else ""
        return f"{status:6}  {result['name']:52}  {error:>8}  {shown:>10}  {'  '.join(parts)}{result.get('note', '')}"


_HEADER = f"{'check':6}  {'case':52}  {'error/ok':>8}  {'ms':>10}"


def main(arguments: list[str] | None = None) -> int:
    """Parse arguments and run; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m minispec.bench.device", description=__doc__)
    parser.add_argument("--small", action="store_true", help="small shapes; always so on a CPU")
    parser.add_argument("--seconds", type=float, default=420.0, help="stop starting new cases after this long")
    parser.add_argument("--only", default="", help="run only the cases whose name contains this")
    parser.add_argument("--child", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="[]", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return run_child(options)
    started = time.monotonic()
    report = Report()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        print(_HEADER)
        for section in SECTIONS:
            share = _SHARE if section == SECTIONS[0] else 1.0
            run_section(section, report, started + options.seconds * share, options)
    except (KeyboardInterrupt, SystemExit) as stopped:
        report.finish(started)
        print(f"interrupted ({stopped!r})", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    return report.finish(started)


def run_section(section: str, report: Report, deadline: float, options: argparse.Namespace) -> None:
    """Run a section's cases in child processes, a new one after each that dies."""
    done: set[str] = set()
    for _ in range(_RESTARTS):
        left = deadline - time.monotonic()
        command = [
            sys.executable,
            "-m",
            "minispec.bench.device",
            "--child",
            section,
            "--skip",
            json.dumps(sorted(done)),
        ]
        command += [
            "--seconds",
            f"{max(left, 0.0):.1f}",
            "--only",
            options.only,
            *(["--small"] if options.small else []),
        ]
        ended, running, trouble = _follow(command, report, done, deadline + _GRACE)
        if ended:
            return
        name = running or f"{section}: start"
        late = time.monotonic() > deadline
        report.add({"section": section, "name": name, "ok": None if late else False, "note": trouble})
        if running is None or late:
            return
        done.add(running)


def _follow(command: list[str], report: Report, done: set[str], deadline: float) -> tuple[bool, str | None, str]:
    """Read what a child says until it ends: (whether it came to its end, the case it was in, what went wrong)."""
    lines: queue.Queue[str | None] = queue.Queue()
    # -m finds the package that this file is of, wherever it was started
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    assert child.stdout is not None

    def read(stream: Iterator[str]) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, args=(child.stdout,), daemon=True).start()
    running: str | None = None
    try:
        while True:
            try:
                line = lines.get(timeout=max(min(_SILENCE, deadline - time.monotonic()), 0.1))
            except queue.Empty:
                return False, running, f"no answer in {_SILENCE:.0f} s, or out of time"
            if line is None:
                return False, running, f"the process ended with status {child.wait()}"
            if not line.startswith(_MARK):
                print(line, end="", flush=True)
                continue
            message = json.loads(line.removeprefix(_MARK))
            if "machine" in message:
                report.machine |= message["machine"]
            elif "start" in message:
                running = message["start"]
            elif "end" in message:
                child.wait(timeout=30)
                return True, None, ""
            else:
                running = None
                done.add(message["name"])
                report.add(message)
    finally:
        child.kill()
        child.wait()


def run_child(options: argparse.Namespace) -> int:
    """Run the cases of one section, saying on stdout what happens."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        os.environ.setdefault("MINISPEC_KERNELS", "triton")
    import torch

    from minispec.bench.timing import Stopwatch

    deadline = time.monotonic() + options.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = options.small or device.type == "cpu"
    watch = Stopwatch(device)
    if options.child == SECTIONS[0]:
        _say({"machine": _machine(watch)})
    skip = set(json.loads(options.skip))
    for name, run in _cases(options.child, watch, small):
        if name in skip or options.only not in name:
            continue
        if time.monotonic() > deadline:
            _say({"section": options.child, "name": name, "ok": None, "note": "skipped: out of time"})
            continue
        _say({"start": name})
        try:
            with torch.inference_mode():
                result = run()
        except Exception as error:
            # what CUDA has reported once it reports again: a new process has to go on
            if device.type == "cuda" and _is_spoilt(torch):
                print(f"{name}: {error!r}", flush=True)
                return 70
            result = {"ok": False, "note": f"{type(error).__name__}: {str(error)[:300]}"}
        _say({"section": options.child, "name": name, **result})
    _say({"end": options.child})
    return 0


def _cases(section: str, watch: Any, small: bool) -> Iterator[tuple[str, Callable[[], Result]]]:
    import torch

    from minispec.bench import device_kernels, device_model

    if section == "steps":
        yield from device_model.forward_cases(watch.device, small=small)
        yield from device_model.text_cases(watch.device)
        yield from device_model.step_cases(watch.device, watch, small=small)
        return
    dtypes = [torch.bfloat16, torch.float16]
    if os.environ.get("TRITON_INTERPRET") == "1":
        dtypes = [torch.float32]  # Triton's interpreter multiplies 16-bit matrices wrongly
    shapes = device_kernels.SMALL if small else device_kernels.LLAMA_8B
    for name, make in device_kernels.cases(shapes, dtypes, watch.device):
        # fp16 takes the time that bf16 does
        yield name, lambda make=make, timed=" fp16" not in name: _check_and_time(make, watch, timed)  # type: ignore[misc]


def _check_and_time(make: Callable[[], Any], watch: Any, timed: bool) -> Result:
    problem = make()
    error = problem.deviation()
    result: Result = {"ok": error <= 1, "error": error, "bytes": problem.bytes, "flops": problem.flops}
    if not timed or error > 1:
        return result
    result["ms"] = watch.ms(problem.run)
    notes = []
    rivals = {}
    for name, rival in problem.rivals.items():
        try:
            rivals[name] = watch.ms(rival)
        except Exception as trouble:  # torch cannot do it here; that is no fault of the kernel
            notes.append(f"  {name}: {type(trouble).__name__}")
    if rivals:
        best = min(rivals, key=lambda name: rivals[name])
        result |= {"rival": best, "rival_ms": rivals[best]}
    return result | {"note": "".join(notes)}


def _machine(watch: Any) -> Result:
    import torch

    from minispec import kernels

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    known: Result = {
        "cuda": watch.cuda,
        "kernels": kernels.BACKEND,
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        "torch": torch.__version__,
        "triton": triton_version,
        "python": sys.version.split()[0],
        "copy_bytes_per_s": watch.copy_bandwidth(),
    }
    if watch.cuda:
        properties = torch.cuda.get_device_properties(watch.device)
        known |= {
            "device": properties.name,
            "processors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda_version": torch.version.cuda or torch.version.hip,
        }
    return known


def _is_spoilt(torch: Any) -> bool:
    """Whether CUDA no longer works in this process."""
    try:
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").add_(1).item()
    except Exception:
        return True
    return False


def _say(message: Result) -> None:
    print(_MARK + json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Every kernel compiles for every target, spills nothing and fits the shared memory. Needs no GPU."""

import os
import subprocess
import sys

import pytest

from minispec.kernels.report import LIMITS, Compiled, main


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the report in a process of its own: this one has Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-W", "ignore", "-m", "minispec.kernels.report", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("target", LIMITS)
def test_representative_kernels_compile_without_spills(target):
    result = report("--quick", "--target", target)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no spills" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", LIMITS)
def test_every_dtype_and_head_size_compiles_without_spills(target):
    result = report("--target", target)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("shared", "spills", "problem"),
    [
        (0, 0, None),
        (0, 8, "spills 8 bytes"),
        (1 << 20, 0, f"1048576 bytes of shared memory, {LIMITS['sm80']} available"),
    ],
)
def test_what_counts_as_a_problem(shared, spills, problem):
    assert Compiled("case", "kernel", "sm80", 32, shared, spills).problem == problem


def test_unknown_targets_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--target", "sm50"])
    assert "sm80" in capsys.readouterr().err

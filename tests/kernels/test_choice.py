"""Which implementation a process runs, and that a CPU server does not pay for Triton."""

import os
import subprocess
import sys

import pytest
import torch


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("MINISPEC_KERNELS", "TRITON_INTERPRET")}
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**kept, "PYTHONPATH": path, **environment},
    )


SHOW = """
import logging, sys
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
from minispec import kernels
print(kernels.BACKEND, kernels.tree_attention.__name__, "triton" in sys.modules)
"""


@pytest.mark.parametrize("wanted", ["torch", "triton"])
def test_the_environment_chooses(wanted):
    result = run(SHOW, MINISPEC_KERNELS=wanted)
    suffix = "ref" if wanted == "torch" else "triton"
    assert result.stdout.splitlines() == [
        f"kernels: {wanted} (MINISPEC_KERNELS={wanted})",
        f"{wanted} tree_attention_{suffix} False",  # Triton waits for the first launch
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is Triton here")
def test_auto_on_a_cpu_is_torch():
    assert run(SHOW).stdout.splitlines() == [
        "kernels: torch (CUDA is not available)",
        "torch tree_attention_ref False",
    ]


def test_a_wrong_choice_names_the_choices():
    result = run("import minispec.kernels", MINISPEC_KERNELS="cuda")
    assert "MINISPEC_KERNELS must be one of auto, triton, torch, not 'cuda'" in result.stderr

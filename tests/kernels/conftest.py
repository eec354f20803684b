"""Kernels run under Triton's interpreter, on the CPU, against their torch references.

The interpreter must be chosen before Triton is imported; nothing else in minispec imports it on a CPU.
"""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "Triton was imported too early"
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN (integers: their largest value): no kernel may forget an entry."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)

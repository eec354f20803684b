"""Every kernel that a captured step launches, with its sampling and verification, compiles for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

# Launches are recorded instead of run, so that this works on a CPU: what comes back is garbage.
CODE = """
import torch
from minispec import kernels
from minispec.batch import Span
from minispec.bench.device_kernels import binary_tree, spread_pages
from minispec.graphs import CapturedRunner
from minispec.kernels._triton import Device, recording
from minispec.kernels.report import _signature, compile_launch
from minispec.model.config import ModelConfig
from minispec.model.llama import Llama
from minispec.request import Request, SamplingParams
from minispec.sampling import Noise, SamplingBatch
from minispec.settle import settle_on_device

config = ModelConfig(vocab_size=2000, hidden_size=4096, intermediate_size=1024, num_layers=1, num_heads=32,
                     num_kv_heads=8, head_dim=128, max_position=9000, qk_norm=True)
model = Llama.random(config, device="cpu", dtype=torch.bfloat16)
runner = CapturedRunner(model, pages=2100, page_size=32, max_context=8192, capture=lambda launch: launch)
with recording(Device(132, True)) as launches:
    for batch, nodes, context in [(1, 1, 100), (1, 16, 100), (1, 64, 8000), (8, 1, 100), (8, 16, 100), (8, 32, 8000)]:
        tree = binary_tree(nodes, 2000)
        places = [(pages, context) for pages in spread_pages(batch, -(-(context + nodes) // 32))]
        spans = [Span.tree(tree, *place) for place in places]
        for mode in ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}):
            params = SamplingParams(**mode)
            rows = [(Request(id="", prompt=(0,), params=params, decoder=None, limit=1), 9)] * (batch * nodes)
            samples = kernels.sample(runner.forward(spans), SamplingBatch.build(rows), Noise(2000))
            try:
                settle_on_device(runner.kv, samples, [tree] * batch, places)
            except (ValueError, IndexError):
                pass  # nobody wrote the paths
distinct = {(launch.kernel.fn.__name__, str(_signature(launch))): launch for launch in launches}
compiled = [compile_launch("step", launch, "sm90") for launch in distinct.values()]
for one in compiled:
    assert one.problem is None, one
print(sorted({one.kernel for one in compiled}))
"""


def test_a_whole_step_compiles():
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**kept, "MINISPEC_KERNELS": "triton", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for kernel in (
        "tree_attention",
        "rope_kv_write",
        "rms_norm",
        "qk_norm",
        "silu_mul",
        "score",
        "verify",
        "kv_commit",
    ):
        assert f"{kernel}_kernel" in result.stdout

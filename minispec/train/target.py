"""The target of a training run: in the dtype that it is served in where steps of that are fast, and how they run.

On a CPU with bfloat16 instructions but no AMX, oneDNN multiplies large matrices twice as fast in float32 as in
bfloat16, and the compiled step (``minispec.compiled``) writes twice as fast as either. oneDNN computes training anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from minispec.compiled import Compilation
from minispec.graphs import runner_for
from minispec.model.config import ModelConfig
from minispec.model.llama import Llama
from minispec.native import build
from minispec.runner import Forward, ModelRunner, resolve_dtype


@dataclass(frozen=True)
class Numerics:
    """What decides how numbers are rounded in a run.

    Attributes:
        dtype: of the target.
        compiled: its steps are to run compiled.
        autocast: training multiplies matrices in bfloat16.
    """

    dtype: torch.dtype
    compiled: bool
    autocast: bool


def numerics(folder: Path, device: torch.device) -> Numerics:
    """What is fast here, for the model in ``folder``; reads no weights.

    Raises:
        ModelError: the folder holds no model that can be used.
    """
    if device.type != "cpu":
        return Numerics(resolve_dtype("auto", device), compiled=False, autocast=True)
    if torch.cpu.get_capabilities().get("amx_bf16"):
        # hundreds of rows a step: oneDNN's AMX tiles, which the compiled step does not have
        return Numerics(torch.bfloat16, compiled=False, autocast=True)
    buildable = build.obstacle() is None and (build.library_path().exists() or build.compiler() is not None)
    if buildable and ModelConfig.from_folder(folder).head_dim % 16 == 0:
        return Numerics(torch.bfloat16, compiled=True, autocast=False)
    return Numerics(torch.float32, compiled=False, autocast=False)


class Target:
    """A loaded target, and runners for it that share its weights.

    Attributes:
        model: the weights.
        compiled: its steps run compiled; may be False where that was asked for and failed, which is logged.
    """

    def __init__(self, model: Llama, forward: Forward | None = None) -> None:
        self.model = model
        self.compiled = forward is not None
        self._forward = forward

    @staticmethod
    def load(folder: Path, device: torch.device, how: Numerics, vocab_size: int) -> Target:
        """Load, and build or load the compiled step where ``how`` wants it, which takes seconds.

        Raises:
            ModelError: the model cannot be used.
        """
        model = Llama.load(folder, device=device, dtype=how.dtype, vocab_size=vocab_size)
        if not how.compiled:
            return Target(model)
        runner = ModelRunner(model, pages=1, page_size=1)
        Compilation([runner]).start(wait=True)
        return Target(model, runner.step if runner.compiled else None)

    def runner(self, *, pages: int, page_size: int, max_context: int) -> ModelRunner:
        """A runner with a cache of its own."""
        runner = runner_for(self.model, pages=pages, page_size=page_size, max_context=max_context)
        if self._forward is not None:
            runner.use(self._forward)
        return runner

"""ModelRunner: a model with its KV cache, and the choice of device and dtype."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from minispec.batch import Span, StepBatch
from minispec.config import DEVICES, DTYPES
from minispec.errors import ConfigError
from minispec.kv_cache import KVCache
from minispec.model.config import ModelConfig
from minispec.model.llama import Llama, Taps

log = logging.getLogger(__name__)


class Phase(StrEnum):
    """What has become of the compiled step; as ``CompileState.phase``."""

    OFF = "off"
    UNSUPPORTED = "unsupported"
    BUILDING = "building"
    CHECKING = "checking"
    READY = "ready"
    FAILED = "failed"
    SLOWER = "slower"


@dataclass
class CompileState:
    """Progress, for logs and metrics.

    Attributes:
        phase: see ``Phase``.
        reason: why it is not used, in the phases where it is not.
        seconds: what building and checking took, once it is over.
        eager_ms, compiled_ms: measured steps of each number of rows.
    """

    phase: Phase = Phase.OFF
    reason: str = ""
    seconds: float = 0.0
    eager_ms: dict[int, float] | None = None
    compiled_ms: dict[int, float] | None = None


class Forward(Protocol):
    """What ``Llama.forward`` does."""

    def __call__(
        self, batch: StepBatch, kv: KVCache, *, layers: int | None = None, taps: Taps | None = None
    ) -> Tensor: ...


class ModelRunner:
    """Runs steps of one model.

    Attributes:
        model: the weights.
        kv: its cache.
        device: where the model runs.
        vocab_size: number of logits a row; larger token ids are never produced.
        max_context: most tokens of one request, as far as that is known; the whole cache otherwise.
        compile_state: what has become of the compiled step.
    """

    def __init__(self, model: Llama, *, pages: int, page_size: int, max_context: int | None = None) -> None:
        config = model.config
        self.model = model
        self._forward: Forward = model.forward
        self.compile_state = CompileState()
        self.device = model.device
        self.vocab_size = model.vocab_size
        self.max_context = max_context or pages * page_size
        self.kv = KVCache(
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            pages=pages,
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
        )

    def forward(self, spans: Sequence[Span], *, layers: int | None = None, taps: Taps | None = None) -> Tensor:
        """Run the rows of ``spans`` in one pass and write their KV.

        Args:
            spans: the rows.
            layers, taps: as in ``Llama.forward``.

        Returns:
            [samples, vocab_size] float32 logits of the spans' sampled rows, in order. They are good until the next
            forward, which may write in the same place.
        """
        batch = StepBatch.build(spans, self.kv.page_size, self.device, self.model.config.sliding_window)
        return self._forward(batch, self.kv, layers=layers, taps=taps)

    def use(self, forward: Forward) -> None:
        """Compute steps with ``forward`` from the next one on. May be called from any thread."""
        self._forward = forward

    @property
    def step(self) -> Forward:
        """What computes steps, now; other runners of the same model can ``use`` it."""
        return self._forward

    @property
    def compiled(self) -> bool:
        """Whether steps run compiled, now."""
        return self.compile_state.phase is Phase.READY

    def prepare(self, slots: int, *, layers: int | None = None, taps: tuple[int, ...] = ()) -> None:
        """Do ahead what would delay the first steps of up to ``slots`` spans. Nothing here, see CapturedRunner."""


def resolve_device(name: str) -> torch.device:
    """The device for a setting: ``auto`` is CUDA where there is a GPU, else the CPU.

    Raises:
        ConfigError: CUDA is asked for and absent.
    """
    if name not in DEVICES:
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}, not {name!r}")
    cuda = torch.cuda.is_available()
    if name == "cuda" and not cuda:
        raise ConfigError(
            "device cuda was asked for, but torch finds no CUDA GPU. Use --device cpu, or install a CUDA build of "
            "torch and a driver (in a container: pass --gpus all)"
        )
    return torch.device("cuda" if cuda and name != "cpu" else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype for a setting: ``auto`` is bfloat16, or float32 on a CPU without bfloat16 instructions.

    Raises:
        ConfigError: not a dtype we run in.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {name!r}")
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cpu" and not _cpu_has_bfloat16():
        log.info("dtype auto: float32, as this CPU has no bfloat16 instructions (amx_bf16, avx512_bf16)")
        return torch.float32
    return torch.bfloat16


def kv_bytes_per_position(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token holds, over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def _cpu_has_bfloat16() -> bool:
    # Without these oneDNN emulates bfloat16, slower than float32.
    has = torch.cpu.get_capabilities()
    return bool(has.get("amx_bf16") or has.get("avx512_bf16"))

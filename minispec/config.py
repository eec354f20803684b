"""EngineConfig: every setting of the engine, checked once."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from minispec.errors import ConfigError
from minispec.tree import MAX_NODES

DEVICES = ("auto", "cuda", "cpu")
QUANTIZE = ("none", "int8")
DTYPES = ("auto", "bfloat16", "float16", "float32")
COMPILE = ("auto", "off")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        target: the served model: a pulled name, a folder, a Hugging Face id in the local cache.
        draft: ``auto``, ``none``, or what drafts, several joined by commas: ``ngram``, ``suffix``, ``layers:N`` (the
            target's own first N layers), a draft model or head named as a target is.
        tree: file with the shape of the trees that models and heads draft (``minispec.drafters.fixed_tree``); None lets
            them grow where they look best.
        device: ``auto`` is CUDA where there is a GPU.
        draft_device: where a draft model runs; ``auto`` is beside the target.
        dtype: of weights and KV; ``auto`` is bfloat16.
        max_slots: requests that run at once; others wait.
        max_context: most tokens of one request, prompt and output; None is the model's own limit, at most
            ``DEFAULT_MAX_CONTEXT``.
        kv_memory: GiB for the KV cache; None is what max_slots full contexts need, as far as memory goes.
        page_size: KV positions per page.
        prefix_cache: remember the KV of earlier texts, and do not compute again what a prompt has in common with one.
        tree_budget: ``auto``, or the number of nodes, roots included, that a step may verify over all slots.
        compile: on a CPU, ``auto`` builds the compiled step in the background and uses it once it is checked
            (``minispec.compiled``); ``off`` stays with eager torch.
        max_step_tokens: rows a step may hold, prefill chunks and trees together; None fits the device.
        deterministic: on a CPU, the same bits for a token whoever shares its step, drafted or not.
        quantize: ``int8`` rounds the target's weights to 8 bits while loading (on a CPU the inputs of its products
            too); ``none`` keeps them.
    """

    target: str
    draft: str = "auto"
    tree: str | None = None
    device: str = "auto"
    draft_device: str = "auto"
    dtype: str = "auto"
    max_slots: int = 8
    max_context: int | None = None
    kv_memory: float | None = None
    page_size: int = 32
    prefix_cache: bool = True
    tree_budget: int | str = "auto"
    max_step_tokens: int | None = None
    compile: str = "auto"
    deterministic: bool = False
    quantize: str = "none"

    def __post_init__(self) -> None:
        if not self.target:
            raise ConfigError("no target model given; name one, for example `--target smollm2-135m`")
        _require_choice("device", self.device, DEVICES)
        _require_choice("draft_device", self.draft_device, DEVICES)
        _require_choice("dtype", self.dtype, DTYPES)
        _require_choice("compile", self.compile, COMPILE)
        _require_choice("quantize", self.quantize, QUANTIZE)
        if not isinstance(self.deterministic, bool):
            raise ConfigError(f"deterministic must be True or False, not {self.deterministic!r}")
        _require_int("max_slots", self.max_slots, 1, 1024)
        if self.max_context is not None:
            _require_int("max_context", self.max_context, 2, None)
        if self.kv_memory is not None and not self.kv_memory > 0:
            raise ConfigError(f"kv_memory must be more than 0 GiB, {self.kv_memory} given")
        _require_int("page_size", self.page_size, 1, 4096)
        if not isinstance(self.prefix_cache, bool):
            raise ConfigError(f"prefix_cache must be True or False, not {self.prefix_cache!r}")
        if self.tree_budget != "auto":
            if isinstance(self.tree_budget, str):
                raise ConfigError(f"tree_budget must be `auto` or a whole number, not {self.tree_budget!r}")
            _require_int("tree_budget", self.tree_budget, 1, MAX_NODES * self.max_slots)
        if self.max_step_tokens is not None:
            _require_int("max_step_tokens", self.max_step_tokens, max(16, self.max_slots), 65536)


DEFAULT_MAX_CONTEXT = 32768
"""Context limit where the user gives none and the model allows more."""


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        close = difflib.get_close_matches(value, choices, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}.{hint}")


def _require_int(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be {bounds}, {value} given")

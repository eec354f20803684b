"""Rotary position embeddings (RoPE: Su et al. 2021, arXiv 2104.09864) and the ways checkpoints stretch them.

    inv_freq[i] = theta ** (-2i / head_dim)        angle[p, i] = p * inv_freq[i]

The scaled variants change ``inv_freq`` and, for YaRN, multiply cos and sin by a constant. All are computed as
transformers computes them, since that is what the weights were trained or tested with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minispec.errors import ModelError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """What config.json says of RoPE.

    Attributes:
        type: one of ``ROPE_TYPES``.
        theta: base of the frequencies.
        factor: how many times longer the context is than the one trained with; unused by ``default``.
        original_max_position: context length before stretching; for ``yarn`` and ``llama3``.
        low_freq_factor, high_freq_factor: for ``llama3``: bounds between stretched and kept frequencies.
        attention_factor: for ``yarn``: multiplies cos and sin; None derives it from the factor and the two mscales.
        mscale, mscale_all_dim: for ``yarn``: numerator and denominator of the derived attention factor.
        beta_fast, beta_slow: for ``yarn``: rotations within the original context that bound its ramp.
        truncate: for ``yarn``: round the ramp's bounds to whole indices.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @staticmethod
    def from_json(data: Mapping[str, Any], max_position: int) -> RopeConfig:
        """Read the keys of a config.json: ``rope_scaling`` and ``rope_theta``, or ``rope_parameters`` that holds both.

        Args:
            data: the whole of config.json.
            max_position: its ``max_position_embeddings``, which stands in for a missing original length.

        Raises:
            ModelError: an unknown type, or a value that its formula cannot take.
        """
        rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
        if not isinstance(rope, Mapping):
            raise ModelError(f"rope_scaling in config.json must be an object or null, not {rope!r}")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ROPE_TYPES:
            raise ModelError(
                f"RoPE of type {kind!r} in config.json is not supported; supported are {', '.join(ROPE_TYPES)}"
            )
        for where in (rope, data):
            if where.get("partial_rotary_factor") not in (None, 1, 1.0):
                raise ModelError("partial_rotary_factor in config.json is not supported: all of a head is rotated here")
        theta = _number("rope_theta", rope.get("rope_theta", data.get("rope_theta")), 10000.0)
        if kind == "default":
            return RopeConfig(theta=theta)
        original = data.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
        original = int(_number("original_max_position_embeddings", original, max_position))
        config = RopeConfig(
            type=kind,
            theta=theta,
            factor=_number("factor", rope.get("factor"), max_position / original if kind == "yarn" else None),
            original_max_position=original,
        )
        if kind == "llama3":
            low = _number("low_freq_factor", rope.get("low_freq_factor"), None)
            high = _number("high_freq_factor", rope.get("high_freq_factor"), None)
            if low >= high:
                raise ModelError(f"llama3 RoPE needs low_freq_factor below high_freq_factor, not {low:g} and {high:g}")
            return RopeConfig(**vars(config) | {"low_freq_factor": low, "high_freq_factor": high})
        if kind == "yarn":
            optional = {
                name: None if rope.get(name) is None else _number(name, rope[name], None, minimum=0.0)
                for name in ("attention_factor", "mscale", "mscale_all_dim")
            }
            return RopeConfig(
                **vars(config)
                | optional
                | {
                    "beta_fast": _number("beta_fast", rope.get("beta_fast") or None, 32.0),
                    "beta_slow": _number("beta_slow", rope.get("beta_slow") or None, 1.0),
                    "truncate": bool(rope.get("truncate", True)),
                }
            )
        return config


class Rope:
    """Cosines and sines of a model's rotations.

    Attributes:
        inv_freq: [head_dim / 2] float32.
        attention_scaling: multiplies cos and sin; 1 except for YaRN.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> None:
        inv_freq, self.attention_scaling = inverse_frequencies(config, head_dim)
        self.inv_freq = inv_freq.to(device)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at ``positions`` [rows]: two [rows, head_dim / 2] float32, attention scaling included."""
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return cos, sin


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """``inv_freq`` ([head_dim / 2] float32, on the CPU) and the attention scaling.

    - linear: all frequencies divided by the factor (kaiokendev 2023).
    - dynamic (NTK): plain within the original window; a context beyond it is refused where the limit is set, because
      its frequencies depend on the length and cached keys would drift in the middle of a request.
    - yarn (Peng et al. 2023, arXiv 2309.00071): high frequencies kept, low ones divided, a ramp between.
    - llama3 (Llama 3.1): as yarn, but bounded by wavelengths and without attention scaling.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / config.theta**exponents
    if config.type in ("default", "dynamic"):
        return plain, 1.0
    if config.type == "linear":
        return plain / config.factor, 1.0
    if config.type == "llama3":
        return _llama3(config, plain), 1.0
    return _yarn(config, head_dim, config.theta**exponents), _yarn_attention_scaling(config)


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    low, high, length = config.low_freq_factor, config.high_freq_factor, config.original_max_position
    wavelength = 2 * math.pi / plain
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / config.factor + smooth * plain
    scaled = torch.where(wavelength > length / low, plain / config.factor, plain)
    return torch.where((wavelength >= length / high) & (wavelength <= length / low), between, scaled)


def _yarn(config: RopeConfig, head_dim: int, powers: Tensor) -> Tensor:
    def bound(rotations: float) -> float:
        """The (real-valued) index whose frequency makes ``rotations`` turns within the original context."""
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = bound(config.beta_fast), bound(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as in transformers: no division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (config.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_attention_scaling(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def _number(name: str, value: Any, default: float | None, *, minimum: float | None = None) -> float:
    """``value`` as a positive number, or at least ``minimum`` where one is given; None takes the default."""
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"the RoPE settings in config.json lack {name}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{name} in config.json must be a number, not {value!r}")
    if value <= 0 if minimum is None else value < minimum:
        raise ModelError(f"{name} in config.json must be {'above 0' if minimum is None else 'at least 0'}, not {value}")
    return float(value)

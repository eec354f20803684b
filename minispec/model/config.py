"""ModelConfig: the shape of a Llama-family model, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minispec.errors import ConfigError, ModelError
from minispec.model.rope import RopeConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# What transformers assumes where config.json is silent.
_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family (Touvron et al. 2023, arXiv 2302.13971) and its relatives.

    Attributes:
        vocab_size: rows of the embedding, padding included.
        hidden_size, intermediate_size, num_layers: widths and depth.
        num_heads, num_kv_heads, head_dim: of attention; ``head_dim`` need not be ``hidden_size / num_heads``.
        rms_norm_eps: of every norm.
        rope: rotary embeddings.
        max_position: the most tokens the model's context holds.
        tie_word_embeddings: the head shares the embedding's weights.
        qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
        qk_norm: queries and keys are normed per head before rotation.
        sliding_window: a row sees this many positions, its own included; None sees all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    @staticmethod
    def from_folder(folder: Path | str) -> ModelConfig:
        """Read ``folder/config.json``.

        Raises:
            ModelError: the file is missing or broken, or describes a model that is not supported.
        """
        path = Path(folder) / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(
                f"{path} not found; a model folder needs config.json, *.safetensors and tokenizer.json. "
                "Fetch it again, for example with `minispec pull NAME`"
            ) from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}. Fetch the model again") from None
        if not isinstance(data, dict):
            raise ModelError(f"{path} must hold a JSON object, not {type(data).__name__}. Fetch the model again")
        try:
            return ModelConfig.from_json(data)
        except ModelError as error:
            raise ModelError(f"{path.parent}: {error}") from None

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ModelConfig:
        """Read the contents of a config.json; missing keys mean what they mean to transformers.

        Raises:
            ModelError: not a supported model; the message names the key or the architecture.
        """
        family = _family(data)
        if data.get("quantization_config"):
            method = data["quantization_config"]
            method = method.get("quant_method", "unknown") if isinstance(method, Mapping) else method
            raise ModelError(
                f"the weights are quantised (quantization_config, method {method}), which is not supported. "
                "Use the unquantised model, in bfloat16, float16 or float32"
            )
        if (act := data.get("hidden_act") or "silu") != "silu":
            raise ModelError(f"hidden_act {act!r} in config.json is not supported; only silu is")
        hidden = _integer(data, "hidden_size")
        heads = _integer(data, "num_attention_heads")
        kv_heads = _integer(data, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        # transformers' Qwen3 has 128 where the key is absent, but derives it where the key is null
        implied = 128 if family == "qwen3" and "head_dim" not in data else hidden // heads
        head_dim = _integer(data, "head_dim", implied)
        if head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd; rotary embeddings need an even one")
        max_position = _integer(data, "max_position_embeddings", _MAX_POSITION[family])
        rope = RopeConfig.from_json(data, max_position)
        attention_bias = bool(data.get("attention_bias")) and family in ("llama", "qwen3")
        return ModelConfig(
            vocab_size=_integer(data, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(data, "intermediate_size"),
            num_layers=_integer(data, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive(data, "rms_norm_eps", 1e-6),
            rope=rope,
            max_position=_context(rope, max_position),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=family == "llama" and bool(data.get("mlp_bias")),
            qk_norm=family == "qwen3",
            sliding_window=_sliding_window(data, family),
        )

    def require_context(self, tokens: int) -> None:
        """Refuse a context limit that the model cannot serve.

        Raises:
            ConfigError: ``tokens`` is above ``max_position``; both numbers are named.
        """
        if tokens <= self.max_position:
            return
        if self.rope.type == "dynamic":
            raise ConfigError(
                f"max_context {tokens} is beyond the model's original window of {self.max_position} tokens, where its "
                "dynamic RoPE scaling would change cached keys in the middle of a request. "
                f"Set max_context to at most {self.max_position}, or configure yarn scaling in config.json"
            )
        raise ConfigError(
            f"max_context {tokens} is above the model's limit of {self.max_position} tokens. "
            f"Set max_context to at most {self.max_position}"
        )


def _family(data: Mapping[str, Any]) -> str:
    names = data.get("architectures") or []
    if isinstance(names, list) and names:
        if names[0] in ARCHITECTURES:
            return ARCHITECTURES[names[0]]
        name = names[0]
    else:
        name = data.get("model_type")
        if name in ARCHITECTURES.values():
            return str(name)
    raise ModelError(f"architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _context(rope: RopeConfig, max_position: int) -> int:
    """The context limit. ``max_position_embeddings`` is it, multiplied by the factor already or not; only a YaRN folder
    that names its original length says how far it stretches, whether or not its own limit was raised."""
    if rope.type == "yarn" and rope.original_max_position < max_position:
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def _sliding_window(data: Mapping[str, Any], family: str) -> int | None:
    if family == "llama":
        return None
    if family == "mistral":
        window = data.get("sliding_window", 4096)
        return None if window is None else _integer(data, "sliding_window", window)
    if not data.get("use_sliding_window") or data.get("sliding_window", 4096) is None:
        return None
    layers = _integer(data, "num_hidden_layers")
    kinds = data.get("layer_types") or [
        "sliding_attention" if i >= data.get("max_window_layers", 28) else "full_attention" for i in range(layers)
    ]
    windowed = sum(kind == "sliding_attention" for kind in kinds)
    if windowed == 0:
        return None
    if windowed < layers:
        raise ModelError(
            f"{windowed} of {layers} layers use a sliding window; all or none is supported. "
            "Set use_sliding_window to false in config.json and keep the context below sliding_window"
        )
    return _integer(data, "sliding_window", 4096)


def _integer(data: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = data.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json lacks {key}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} in config.json must be a whole number above 0, not {value!r}")
    return value


def _positive(data: Mapping[str, Any], key: str, default: float) -> float:
    value = data.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{key} in config.json must be a number above 0, not {value!r}")
    return float(value)

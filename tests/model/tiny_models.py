"""Tiny random models made by transformers, which is the oracle: same folder in, same logits out."""

from typing import Any

import torch

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _rope(kind: str, **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "default": ("Llama", {}),
    "linear": ("Llama", _rope("linear", factor=2.0)),
    "dynamic": ("Llama", _rope("dynamic", factor=4.0)),
    "yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "yarn-mscale": (
        "Llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.5, mscale_all_dim=1),
    ),
    "llama3": (
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "mha": ("Llama", {"num_key_value_heads": 4}),
    "three-kv-heads": ("Llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "head-dim": ("Llama", {"head_dim": 32}),
    "attention-bias": ("Llama", {"attention_bias": True}),
    "mlp-bias": ("Llama", {"mlp_bias": True}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}


def build(family: str, **more: object) -> Any:
    """A random model whose every parameter, biases and norms too, matters."""
    import transformers  # here, for it imports Triton, which tests/kernels must import first

    config = getattr(transformers, f"{family}Config")(**TINY | more, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return model

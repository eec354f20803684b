"""Whole model folders, small enough to load in a test: random Llama weights and the tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from minispec.model.config import ModelConfig
from minispec.model.loader import expected_shapes
from tokenizers_fixture import BYTE_VOCAB_SIZE, EOS, byte_tokenizer_folder


def tiny_folder(
    path: Path,
    *,
    seed: int = 0,
    vocab: int = BYTE_VOCAB_SIZE,
    layers: int = 2,
    max_position: int = 128,
    generation: dict | None = None,
    extra_tokens: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
    **more: object,
) -> Path:
    """A model folder.

    Args:
        seed: of the weights; a wide spread, so that its text varies and repeats itself at times.
        vocab: rows of the embedding; more than the tokenizer knows is padding.
        generation: contents of generation_config.json, if any.
        extra_tokens: special tokens added behind the tokenizer's own.
        dtype: what the weights are stored in.
        more: entries of config.json.
    """
    byte_tokenizer_folder(path)
    if extra_tokens:
        data = json.loads((path / "tokenizer.json").read_text())
        like = data["added_tokens"][-1]
        data["added_tokens"] += [
            {**like, "id": BYTE_VOCAB_SIZE + i, "content": text} for i, text in enumerate(extra_tokens)
        ]
        (path / "tokenizer.json").write_text(json.dumps(data))
    data = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "eos_token_id": EOS,
        **more,
    }
    (path / "config.json").write_text(json.dumps(data))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape, generator=generator) * 0.3
        for name, shape in expected_shapes(ModelConfig.from_folder(path)).items()
    }
    save_file({name: weight.to(dtype) for name, weight in weights.items()}, path / "model.safetensors")
    return path

"""Folders of tiny random draft heads, in the layouts that are published, and the formulas they stand for."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from minispec.model.llama import Llama
from tiny_engine import tiny_model

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, DRAFT_VOCAB = 64, 96, 4, 2, 512, 100
EPS, THETA = 1e-5, 10000.0

LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "vocab_size": VOCAB,
}

# name → (config.json, prefix of the layer, prefix of all, what else is in the file); for a target of 2 layers
EAGLE_LAYOUTS = {
    "eagle3-authors": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB,
         "tie_word_embeddings": False, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}},
        "midlayer.", "", {"head", "d2t"},
    ),
    "eagle3-vllm": (
        {**LLAMA, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": VOCAB,
         "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        "layers.0.", "model.", {"head", "embedding"},
    ),
    "eagle3-borrowing": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 2]},
        "midlayer.", "", {"d2t", "fc.bias"},
    ),
    "speculators": (
        {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT_VOCAB,
         "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "target_hidden_size": None,
         "transformer_layer_config": LLAMA, "speculators_config": {"algorithm": "eagle3"}},
        "layers.0.", "", {"head", "d2t", "embedding", "input_norm"},
    ),
    "eagle1-sglang": ({**LLAMA, "architectures": ["LlamaForCausalLMEagle"]}, "layers.0.", "", {"fc.bias"}),
    "eagle1-authors": (
        {**LLAMA, "architectures": ["LlamaForCausalLM"], "bias": False}, "layers.0.", "", {"embedding"}
    ),
}  # fmt: skip


def eagle_folder(path: Path, layout: str, *, seed: int = 0, dtype=torch.float32, std: float = 0.15) -> Path:
    """Write a head; returns its folder."""
    config, layer, prefix, extras = EAGLE_LAYOUTS[layout]
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    def norm(size: int = HIDDEN) -> Tensor:
        return (1 + torch.randn(size, generator=generator) * 0.1).to(dtype)

    eagle3 = not layout.startswith("eagle1")
    size = HIDDEN // HEADS
    taps = len((config.get("eagle_config") or config).get("eagle_aux_hidden_state_layer_ids", [0, 0, 0]))
    fused = taps * HIDDEN if eagle3 else 2 * HIDDEN
    width = 2 * HIDDEN if eagle3 else HIDDEN
    weights = {
        "fc.weight": draw(HIDDEN, fused),
        f"{layer}self_attn.q_proj.weight": draw(HEADS * size, width),
        f"{layer}self_attn.k_proj.weight": draw(KV_HEADS * size, width),
        f"{layer}self_attn.v_proj.weight": draw(KV_HEADS * size, width),
        f"{layer}self_attn.o_proj.weight": draw(HIDDEN, HEADS * size),
        f"{layer}mlp.gate_proj.weight": draw(INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": draw(INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": draw(HIDDEN, INNER),
        f"{layer}post_attention_layernorm.weight": norm(),
    }
    if eagle3:
        weights |= {
            f"{layer}input_layernorm.weight": norm(),
            f"{layer}hidden_norm.weight": norm(),
            "norm.weight": norm(),
        }
    if "fc.bias" in extras:
        weights["fc.bias"] = draw(HIDDEN)
    if "input_norm" in extras:
        weights["input_norm.weight"] = norm(fused)
    if "embedding" in extras:
        weights["embed_tokens.weight"] = draw(VOCAB, HIDDEN)
    if "head" in extras:
        weights["lm_head.weight"] = draw(DRAFT_VOCAB if "d2t" in extras else VOCAB, HIDDEN) * 4
    weights = {name if name.startswith("lm_head") else prefix + name: weight for name, weight in weights.items()}
    if "d2t" in extras:
        ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
        weights["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return path


@cache
def head_target() -> Llama:
    """A target of 2 layers whose final norm does something."""
    target = Llama.random(tiny_model(0).config, device="cpu", dtype=torch.float32, seed=0, std=0.2)
    target.norm = 1 + 0.5 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    return target


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x [heads, rows, size]: pairs (i, i + size / 2) turned by position * theta^(-2i / size)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * THETA ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def eagle_formula(weights, layout: str, target, features: list[Tensor], tokens: list[int], path=(), first: int = 0):
    """The logits after each token of ``path``, and before the first: dense, a row at a time where rows depend on g.

    Args:
        weights: by name, without the prefixes of the layout.
        target: whose embedding, norm and head are borrowed.
        features: per tap [n, hidden]: the target's residual stream at positions first … first + n - 1.
        tokens: the n tokens one position further.
        path: drafted tokens behind them.
    """
    eagle3 = not layout.startswith("eagle1")
    w = weights
    embedding = w.get("embed_tokens.weight", target.embedding)
    if eagle3:
        h = torch.cat(features, dim=-1)
        if "input_norm.weight" in w:
            h = rms(h, w["input_norm.weight"])
        h = h @ w["fc.weight"].T + w.get("fc.bias", 0)
    else:
        [h] = features
        h = rms(h, target.norm)
    logits = []
    tokens = list(tokens)
    for token in (None, *path):
        if token is not None:
            h, tokens = torch.cat([h, g[-1:]]), [*tokens, token]  # noqa: F821
        e = embedding[tokens]
        if eagle3:
            normed = rms(h, w["hidden_norm.weight"])
            x = torch.cat([rms(e, w["input_layernorm.weight"]), normed], dim=-1)
            residual = normed if layout == "speculators" else h
        else:
            x = residual = torch.cat([e, h], dim=-1) @ w["fc.weight"].T + w.get("fc.bias", 0)
        n = len(tokens)
        positions = torch.arange(first, first + n)
        q, k, v = ((x @ w[f"self_attn.{p}_proj.weight"].T).view(n, -1, HIDDEN // HEADS).transpose(0, 1) for p in "qkv")
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (rotate(k, positions), v))
        scores = rotate(q, positions) @ k.transpose(1, 2) / (HIDDEN // HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
        residual = residual + attended @ w["self_attn.o_proj.weight"].T
        y = rms(residual, w["post_attention_layernorm.weight"])
        y = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        g = residual + y @ w["mlp.down_proj.weight"].T
        out = rms(g[-1], w["norm.weight"]) if eagle3 else g[-1]
        if "lm_head.weight" in w:
            logits.append(w["lm_head.weight"] @ out)
        else:
            head = target.head.weight
            logits.append((head[w["d2t"] + torch.arange(DRAFT_VOCAB)] if "d2t" in w else head) @ out)
    return logits


NUM_HEADS = 3

# name → (config.json, name of a block's linear layer, name of an output or None, has biases, what else is in the file)
MEDUSA_LAYOUTS = {
    "authors": (
        {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "some/model"},
        "{head}.{block}.linear", "{head}.{blocks}", True, set(),
    ),
    "named": (
        {"architectures": ["MedusaForCausalLM"], "medusa_num_heads": NUM_HEADS, "medusa_num_layers": 2},
        "medusa_lm_head.{head}.{block}.linear", "medusa_lm_head.{head}.{blocks}", True, set(),
    ),
    "with-base": (
        {"architectures": ["MedusaLlamaForCausalLM"], "medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1},
        "medusa_head.{head}.{block}.linear", "medusa_head.{head}.{blocks}", True, {"base"},
    ),
    "borrowing": (
        {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1},
        "{head}.{block}.linear", None, True, set(),
    ),
    "vllm": (
        {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": NUM_HEADS, "num_hidden_layers": 2,
         "hidden_size": HIDDEN, "vocab_size": VOCAB, "truncated_vocab_size": DRAFT_VOCAB},
        "blocks.{head}.layers.{block}", "lm_heads.{head}", False, {"token_map"},
    ),
    "vllm-shared": (
        {"model_type": "medusa", "num_heads": NUM_HEADS, "num_hidden_layers": 1, "original_lm_head": True},
        "blocks.{head}.layers.{block}", None, False, {"lm_head"},
    ),
}  # fmt: skip


def medusa_folder(path: Path, layout: str, *, seed: int = 0, dtype=torch.float32) -> Path:
    """Write heads; returns their folder."""
    config, linear, output, biased, extras = MEDUSA_LAYOUTS[layout]
    blocks = config.get("medusa_num_layers", config.get("num_hidden_layers"))
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.2).to(dtype)

    weights = {}
    for head in range(NUM_HEADS):
        for block in range(blocks):
            name = linear.format(head=head, block=block)
            weights[f"{name}.weight"] = draw(HIDDEN, HIDDEN)
            if biased:
                weights[f"{name}.bias"] = draw(HIDDEN)
        if output is not None:
            rows = DRAFT_VOCAB if "token_map" in extras else VOCAB
            weights[f"{output.format(head=head, blocks=blocks)}.weight"] = draw(rows, HIDDEN)
    if "token_map" in extras:
        weights["token_map"] = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB]
    if "lm_head" in extras:
        weights["lm_head.weight"] = draw(VOCAB, HIDDEN)
    if "base" in extras:
        weights |= {"lm_head.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN),
                    "model.layers.0.mlp.up_proj.weight": draw(INNER, HIDDEN)}  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "medusa_lm_head.safetensors")
    return path


def medusa_formula(weights, layout: str, target, feature: Tensor) -> list[Tensor]:
    """Logits per head over the target's ids, from the residual stream [hidden] before the target's final norm."""
    config, linear, output, _, _ = MEDUSA_LAYOUTS[layout]
    blocks = config.get("medusa_num_layers", config.get("num_hidden_layers"))
    result = []
    for head in range(NUM_HEADS):
        x = rms(feature, target.norm)
        for block in range(blocks):
            name = linear.format(head=head, block=block)
            x = x + F.silu(weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0))
        if output is not None:
            out = weights[f"{output.format(head=head, blocks=blocks)}.weight"]
        else:
            out = weights.get("lm_head.weight", target.head.weight)
        logits = out @ x
        if "token_map" in weights:
            logits = torch.full((VOCAB,), float("-inf")).index_copy(0, weights["token_map"], logits)
        result.append(logits)
    return result

"""Convert a GGUF file of architecture ``llama`` to the folder layout of Hugging Face transformers.

``convert(source, destination)`` writes into an existing, empty folder:

    config.json  generation_config.json  model.safetensors (bf16)  tokenizer.json  tokenizer_config.json

Quantised tensors are dequantised by the ``gguf`` package and rounded to bf16. The safetensors file is written row block
by row block, so peak memory is a few times ``_BLOCK_BYTES`` and independent of the size of the model.

Sources:
- GGUF keys and tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
- safetensors layout: https://github.com/huggingface/safetensors#format
- pre-tokenizers: the regular expressions of llama.cpp's ``src/llama-vocab.cpp``

Needs the ``pull`` extra (gguf, numpy); import it lazily.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import torch

from minispec.errors import ModelError
from minispec.gguf_tokenizer import write_tokenizer

OnProgress = Callable[[int, int], None]
"""Called with (bytes written, bytes in total) of model.safetensors."""

_BLOCK_BYTES = 64 << 20  # float32 bytes dequantised at a time

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# In transformers one flag gives all linears of a group a bias.
_BIAS_GROUPS = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
# Not weights: RoPE factors (mapped to the config) and a buffer of very old files.
_IGNORED_TENSORS = {"rope_freqs.weight"}
_IGNORED_SUFFIXES = (".attn_rot_embd.weight",)


class Metadata:
    """The key-value part of a GGUF file, with errors that name the key."""

    def __init__(self, reader: gguf.GGUFReader, path: Path) -> None:
        self._fields = reader.fields
        self.path = path

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, or ``default`` where the file does not carry it."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """The value of ``key``; ModelError where it is missing."""
        value = self.get(key)
        if value is None:
            raise ModelError(
                f"{self.path} has no key {key!r}; convert the model to GGUF again with a current llama.cpp."
            )
        return value


@dataclass(frozen=True)
class _Output:
    """One tensor of the safetensors file. ``source`` None means zeros; ``heads`` > 0 means rows to be unpermuted."""

    name: str
    shape: tuple[int, ...]
    source: gguf.ReaderTensor | None
    heads: int = 0

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


def convert(source: Path, destination: Path, on_progress: OnProgress | None = None) -> None:
    """Write the model of the GGUF file ``source`` to the folder ``destination`` (which must exist).

    Raises:
        ModelError: not a GGUF file, truncated, or of a kind that minispec cannot serve.
    """
    reader = _open(source)
    meta = Metadata(reader, source)
    architecture = meta.need("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"{source} is of architecture {architecture!r}; minispec converts GGUF files of architecture 'llama' only."
        )
    if int(meta.get("split.count", 1)) > 1:
        raise ModelError(
            f"{source} is one part of a split GGUF; merge the parts first with `llama-gguf-split --merge`."
        )
    if meta.get("llama.expert_count", 0):
        raise ModelError(f"{source} is a mixture of experts; minispec serves dense Llama models only.")

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(meta, tensors)
    outputs = list(_outputs(meta, tensors, config))
    # Cheap parts first: what is unsupported shows before minutes of dequantising.
    write_tokenizer(meta, destination, context_length=config["max_position_embeddings"])
    _write_json(destination / "config.json", config)
    ids: dict[str, Any] = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
    }
    _write_json(destination / "generation_config.json", ids)
    with open(destination / "model.safetensors", "wb") as file:
        _write_safetensors(file, outputs, on_progress)


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except FileNotFoundError:
        raise ModelError(f"There is no file {path}.") from None
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error}") from error
    # The reader slices a memory map without checking bounds, so a short file surfaces as any of these.
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError) as error:
        raise ModelError(f"{path} is not a GGUF file or is truncated ({error}); fetch it again.") from error


# --- configuration ---------------------------------------------------------------------------------------------------


def _config(meta: Metadata, tensors: dict[str, gguf.ReaderTensor]) -> dict[str, Any]:
    """The config.json of transformers' LlamaConfig."""
    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in tensors:
            raise ModelError(f"{meta.path} has no tensor {name!r}: the file is incomplete.")
    hidden = int(meta.need("llama.embedding_length"))
    heads = int(_scalar(meta, "llama.attention.head_count"))
    kv_heads = int(_scalar(meta, "llama.attention.head_count_kv", heads))
    head_dim = int(meta.get("llama.attention.key_length", hidden // heads))
    value_dim = int(meta.get("llama.attention.value_length", head_dim))
    rope_dim = int(meta.get("llama.rope.dimension_count", head_dim))
    if value_dim != head_dim:
        raise ModelError(f"{meta.path}: value heads of {value_dim} beside key heads of {head_dim} are not supported.")
    if rope_dim != head_dim:
        raise ModelError(f"{meta.path}: RoPE over {rope_dim} of {head_dim} dimensions of a head is not supported.")
    rope_theta = float(meta.get("llama.rope.freq_base", 10000.0))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": int(_scalar(meta, "llama.feed_forward_length")),
        "num_hidden_layers": int(meta.need("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(meta.need("llama.context_length")),
        # GGUF holds float32: 1e-5 comes back as 9.9999997e-06.
        "rms_norm_eps": float(f"{meta.need('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(meta, tensors.get("rope_freqs.weight"), rope_theta, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    for flag, group in _BIAS_GROUPS.items():
        config[flag] = any(name.endswith(".bias") and name.split(".")[-2] in group for name in tensors)
    eos = meta.get("tokenizer.ggml.eos_token_id")
    end_of_turn = meta.get("tokenizer.ggml.eot_token_id", eos)
    stops = [int(token) for token in dict.fromkeys((eos, end_of_turn)) if token is not None]
    if stops:
        config["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    for key, gguf_key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        token = meta.get(f"tokenizer.ggml.{gguf_key}_token_id")
        if token is not None:
            config[key] = int(token)
    return config


def _scalar(meta: Metadata, key: str, default: int | None = None) -> int:
    """``key`` as one number: files may give one per layer, which is fine as long as they agree."""
    value = meta.get(key, default)
    if value is None:
        value = meta.need(key)
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise ModelError(f"{meta.path}: {key} differs between layers ({sorted(values)}), which is not supported.")
    return int(values.pop())


def _rope_scaling(
    meta: Metadata, factors: gguf.ReaderTensor | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """``rope_scaling`` of config.json, or None."""
    if factors is not None:
        return _llama3_scaling(meta, np.array(factors.data, dtype=np.float32).reshape(-1), theta, head_dim)
    kind = meta.get("llama.rope.scaling.type", "none")
    linear = meta.get("llama.rope.scale_linear")  # the key of the first files, before there was a type
    factor = float(meta.get("llama.rope.scaling.factor", linear or 1.0))
    if kind == "none" and linear is not None:
        kind = "linear"
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        original = meta.get("llama.rope.scaling.original_context_length")
        if original is not None:
            scaling["original_max_position_embeddings"] = int(original)
        return scaling
    raise ModelError(f"{meta.path}: RoPE scaling of type {kind!r} is not supported (none, linear, yarn or llama3 are).")


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """By what each inverse frequency is divided in Llama 3.1 and later: float32 [head_dim // 2].

    With wavelength w = 2 pi theta^(2i / head_dim), original context C = 8192, low = 1 and high = 4: 1 where
    w < C / high, ``factor`` where w > C / low, and 1 / ((1 - s) / factor + s) between, where
    s = (C / w - low) / (high - low). As in transformers' ``_compute_llama3_parameters``.
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _llama3_scaling(meta: Metadata, factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """llama.cpp stores only the resulting factors: take Llama 3's formula where it reproduces them, else refuse."""
    factor = float(factors.max())
    if factor == 1.0:
        return None
    expected = llama3_factors(theta, head_dim, factor)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"{meta.path}: its RoPE factors (rope_freqs.weight) are not those of Llama 3; not supported.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


# --- tensors ---------------------------------------------------------------------------------------------------------


def _outputs(meta: Metadata, tensors: dict[str, gguf.ReaderTensor], config: dict[str, Any]) -> Iterator[_Output]:
    """Every tensor of the Llama model in file order, checked to be complete and of the right shape."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads, vocab = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (vocab, hidden),
        "output_norm": (hidden,),
        "output": (vocab, hidden),
        "attn_norm": (hidden,),
        "attn_q": (heads * head_dim, hidden),
        "attn_k": (kv_heads * head_dim, hidden),
        "attn_v": (kv_heads * head_dim, hidden),
        "attn_output": (hidden, heads * head_dim),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    permuted = {"attn_q": heads, "attn_k": kv_heads}
    left = {name for name in tensors if name not in _IGNORED_TENSORS and not name.endswith(_IGNORED_SUFFIXES)}

    def output(source_name: str, name: str, kind: str, *, bias: bool = False) -> _Output:
        shape = shapes[kind][:1] if bias else shapes[kind]
        tensor = tensors.get(source_name)
        if tensor is None and not bias:
            raise ModelError(f"{meta.path} has no tensor {source_name!r}: the file is incomplete.")
        if tensor is not None:
            found = tuple(int(size) for size in reversed(tensor.shape))
            if found != shape:
                raise ModelError(f"{meta.path}: tensor {source_name!r} has shape {found}, expected {shape}.")
            left.discard(source_name)
        return _Output(name, shape, tensor, permuted.get(kind, 0))

    for kind, name in _GLOBAL_NAMES.items():
        if kind != "output" or not config["tie_word_embeddings"]:
            yield output(f"{kind}.weight", f"{name}.weight", kind)
    biased = {kind for flag, group in _BIAS_GROUPS.items() if config[flag] for kind in group}
    for layer in range(config["num_hidden_layers"]):
        for kind, name in _LAYER_NAMES.items():
            yield output(f"blk.{layer}.{kind}.weight", f"model.layers.{layer}.{name}.weight", kind)
            if kind in biased:
                yield output(f"blk.{layer}.{kind}.bias", f"model.layers.{layer}.{name}.bias", kind, bias=True)
    if left:
        raise ModelError(f"{meta.path} has tensors that a Llama model has no place for: {', '.join(sorted(left)[:5])}.")


def rope_row_order(rows: int, heads: int) -> np.ndarray:
    """Row numbers that bring llama.cpp's Q or K back to the order of transformers: int64 [rows].

    llama.cpp rotates neighbouring pairs (2i, 2i+1), transformers the halves (i, i + head_dim / 2); so the conversion to
    GGUF interleaves the halves of each head (``LlamaModel.permute`` in convert_hf_to_gguf.py), and this undoes it.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _blocks(output: _Output) -> Iterator[np.ndarray]:
    """The tensor as bf16 bit patterns, int16, block by block of whole rows."""
    if output.source is None:
        yield np.zeros(output.shape, dtype=np.int16)
        return
    data, rows = output.source.data, output.shape[0]
    # A quantised row is a whole number of blocks, so rows can be picked and reordered before they are dequantised.
    order = rope_row_order(rows, output.heads) if output.heads else np.arange(rows)
    step = max(1, _BLOCK_BYTES // (4 * math.prod(output.shape[1:])))
    for start in range(0, rows, step):
        try:
            values = gguf.quants.dequantize(data[order[start : start + step]], output.source.tensor_type)
        except NotImplementedError as error:
            kind = output.source.tensor_type.name
            raise ModelError(
                f"Tensor {output.source.name!r} is of type {kind}, which cannot be dequantised."
            ) from error
        yield torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()


def _write_safetensors(file: BinaryIO, outputs: list[_Output], on_progress: OnProgress | None) -> None:
    """Stream the tensors in safetensors format: u64 header length, JSON header, the data without gaps.

    The library's own ``save_file`` wants all tensors in memory at once: twice the file for a tied 8B model.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for output in outputs:
        end = total + output.nbytes
        header[output.name] = {"dtype": "BF16", "shape": list(output.shape), "data_offsets": [total, end]}
        total = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data aligned to 8 bytes, as the format asks for
    file.write(len(text).to_bytes(8, "little") + text)
    done = 0
    for output in outputs:
        for block in _blocks(output):
            file.write(block.tobytes())
            done += block.nbytes
            if on_progress is not None:
                on_progress(done, total)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

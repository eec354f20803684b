"""Read safetensors checkpoints: validated from their headers alone, then memory-mapped a few tensors at a time.

Pickles are never opened: unpickling runs code.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minispec.errors import ModelError
from minispec.model.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt")
_DTYPES = ("BF16", "F16", "F32")
# Buffers that old transformers versions saved; they are computed from the config.
_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$|\.self_attn\.masked_bias$")
_MAX_HEADER = 100_000_000  # the format's own limit
_AGAIN = "Fetch the model again"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a model folder.

    Attributes:
        entries: by tensor name, over all shards.
    """

    def __init__(self, entries: dict[str, Entry]) -> None:
        self.entries = entries

    @staticmethod
    def open(folder: Path | str) -> Checkpoint:
        """Read the headers of all shards. Cheap: no weights are touched.

        Raises:
            ModelError: no safetensors, a shard missing, or a file cut short or too long; the remedy is in the message.
        """
        entries: dict[str, Entry] = {}
        for file in _files(Path(folder)):
            for name, info in _header(file).items():
                entries[name] = Entry(file, info["dtype"], tuple(info["shape"]))
        return Checkpoint(entries)

    def take(self, *names: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The named tensors, joined along their first dimension, as an own copy on ``device`` in ``dtype``.

        The file is mapped only while it is copied from, so that its pages never add up beside the loaded weights.

        Raises:
            ModelError: the file cannot be read.
        """
        parts = []
        for name in names:
            file = self.entries[name].file
            try:
                with safe_open(file, framework="pt", device="cpu") as mapped:
                    part = mapped.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read: {error}. {_AGAIN}") from None
            parts.append(part if len(names) > 1 and part.dtype == dtype else part.to(device, dtype, copy=True))
        return torch.cat([p.to(device) for p in parts]) if len(parts) > 1 else parts[0]


def check_folder(folder: Path | str, config: ModelConfig) -> Checkpoint:
    """Check that the folder's weights are all there, whole, and of the shapes that ``config`` asks for.

    Reads headers only, so it can be done before a server listens.

    Raises:
        ModelError: see ``Checkpoint.open``; also missing, unexpected, misshapen or quantised tensors, which are listed.
    """
    checkpoint = Checkpoint.open(folder)
    expected = expected_shapes(config)
    entries = checkpoint.entries
    if config.tie_word_embeddings:
        expected.pop(HEAD)
    if HEAD not in expected and HEAD in entries:
        # A head of its own, whatever the flag says: `Llama` uses it if it differs. Its vocabulary may be another one.
        if entries[HEAD].shape[1:] != (config.hidden_size,):
            expected[HEAD] = (config.vocab_size, config.hidden_size)
        else:
            expected[HEAD] = entries[HEAD].shape
    if missing := [name for name in expected if name not in entries]:
        raise ModelError(f"{folder}: the weights lack {_list(missing)}. {_AGAIN}")
    wrong = [
        f"{name} is {list(entries[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if entries[name].shape != shape
    ]
    if wrong:
        raise ModelError(f"{folder}: the weights do not fit config.json: {_list(wrong)}. {_AGAIN}")
    if unexpected := [name for name in entries if name not in expected and not _HARMLESS.search(name)]:
        raise ModelError(
            f"{folder}: the weights hold {_list(unexpected)}, which config.json does not account for; "
            "leaving them out would change the model's output. Check that config.json belongs to these weights"
        )
    if odd := [f"{name} ({entries[name].dtype})" for name in expected if entries[name].dtype not in _DTYPES]:
        raise ModelError(
            f"{folder}: only {', '.join(_DTYPES)} weights are supported, but there are {_list(odd)}. "
            "Use the unquantised model"
        )
    return checkpoint


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a model whose embeddings are not tied."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, bias) in linear.items():
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes | {HEAD: (config.vocab_size, hidden)}


def _files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read: {error!r}. {_AGAIN}") from None
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelError(f"{folder}: {_INDEX} lists {_list(missing)}, not found in the folder. {_AGAIN}")
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ModelError(f"{folder}: {len(found)} safetensors files but no {_INDEX} that says which to use. {_AGAIN}")
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise ModelError(
            f"{folder}: only pickled weights ({_list(pickles)}), which are never opened, as that can run code. Use a "
            "folder with safetensors, or convert it where you trust it: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(NEW_FOLDER) in transformers"
        )
    raise ModelError(f"{folder}: no weights (*.safetensors) in the folder. {_AGAIN}")


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file (8 bytes of length, JSON, data), checked against the file's size."""
    actual = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if actual < 8 or length > min(actual - 8, _MAX_HEADER):
            expected = "at least 8" if actual < 8 else f"more than {8 + length}"
            raise ModelError(
                f"{file} is not a whole safetensors file: {expected} bytes expected, {actual} found. {_AGAIN}"
            )
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            expected_size = 8 + length + max((info["data_offsets"][1] for info in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelError(f"{file} has a broken header: {error!r}. {_AGAIN}") from None
    if expected_size != actual:
        what = "cut short" if actual < expected_size else "too long"
        raise ModelError(f"{file} is {what}: {expected_size} bytes expected, {actual} found. {_AGAIN}")
    return header


def _list(items: Iterable[str], shown: int = 8) -> str:
    """The first few of a list and how many more there are."""
    items = list(items)
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more

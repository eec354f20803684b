"""Heads that come with minispec, and which model each is for.

A shipped head's config.json names the fingerprint of the target that it was trained with. They lie in ``weights/`` of a
source checkout, or of ``MINISPEC_WEIGHTS``; an installed package has them under ``share/minispec/heads`` of its prefix.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from minispec import hub
from minispec.errors import ModelError
from minispec.model.config import ModelConfig
from minispec.model.loader import EMBEDDING, Checkpoint

KEY = "minispec_target"
"""In a head's config.json: {"name": …, "fingerprint": …} of its target."""
_ROWS = 8


def fingerprint(folder: Path) -> str:
    """Of a model's shape and some of its weights, rounded to bfloat16, so that copies in other dtypes have it too.

    A few rows of the embedding and of the last layer, and the final norm: fine-tuning moves at least one of them. Reads
    some kilobytes.

    Raises:
        ModelError: the folder cannot be read.
    """
    config = ModelConfig.from_folder(folder)
    entries = Checkpoint.open(folder).entries
    digest = hashlib.sha256(
        repr((config.vocab_size, config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads)).encode()
    )
    last = f"model.layers.{config.num_layers - 1}."
    for name in (EMBEDDING, f"{last}self_attn.o_proj.weight", f"{last}mlp.down_proj.weight", "model.norm.weight"):
        if name not in entries:
            raise ModelError(f"{folder}: the weights lack {name}. Fetch the model again")
        try:
            with safe_open(entries[name].file, framework="pt") as file:
                rows = file.get_slice(name)[:_ROWS]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{entries[name].file} cannot be read: {error}. Fetch the model again") from None
        digest.update(rows.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def find(target: Path) -> Path | None:
    """The folder of a shipped head for the model in ``target``, or None."""
    heads = [(folder, wanted) for folder, wanted in _heads()]
    if not heads:
        return None
    own = fingerprint(target)
    return next((folder for folder, wanted in heads if wanted == own), None)


def resolve(name: str) -> Path:
    """The folder of a model or a head, as ``hub.resolve``, or of the shipped head of that name.

    Raises:
        ModelError: there is none.
    """
    try:
        return hub.resolve(name)
    except ModelError:
        if (head := next((folder for folder, _ in _heads() if folder.name == name), None)) is None:
            raise
        return head


def _heads() -> Iterator[tuple[Path, str]]:
    for place in (hub.default_weights_dir(), Path(sys.prefix) / "share" / "minispec" / "heads"):
        for path in sorted(place.glob("*/config.json")):
            try:
                own = json.loads(path.read_text(encoding="utf-8"))[KEY]["fingerprint"]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # a model, or somebody else's head
            yield path.parent, own

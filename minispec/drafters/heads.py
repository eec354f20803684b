"""Draft heads: which kind a folder holds, and the drafter for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minispec.drafters.eagle import EagleDrafter
from minispec.drafters.eagle_head import canonical, load_eagle_head
from minispec.drafters.grow import RankingDrafter
from minispec.drafters.medusa import MedusaDrafter, MedusaHeads
from minispec.errors import ModelError
from minispec.model.llama import Llama
from minispec.model.loader import Checkpoint
from minispec.sampling import Noise

EAGLE, EAGLE3, MEDUSA = "EAGLE", "EAGLE-3", "Medusa"


def head_kind(folder: Path) -> str | None:
    """``EAGLE``, ``EAGLE3`` or ``MEDUSA``, or None where the folder holds no head but, say, a model.

    Reads config.json. The EAGLE authors' own folders call themselves plain Llama models there; those are told by the
    names of their tensors.

    Raises:
        ModelError: a head of a kind that is not supported.
    """
    data = head_config(folder)
    if data is None:
        return None
    kind = data.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            raise ModelError(f"{folder}: a speculator of type {kind!r} is not supported; eagle3 is")
        return EAGLE3
    architectures = data.get("architectures")
    name = str(
        architectures[0] if isinstance(architectures, list) and architectures else data.get("model_type")
    ).lower()
    if "eagle3" in name:
        return EAGLE3
    if "eagle" in name:
        return EAGLE
    if "medusa" in name or "medusa_num_heads" in data:
        return MEDUSA
    try:
        names = {canonical(name) for name in Checkpoint.open(folder).entries}
    except ModelError:
        return EAGLE3 if "draft_vocab_size" in data else None
    if "fc.weight" not in names:
        return None
    return EAGLE3 if "layers.0.hidden_norm.weight" in names else EAGLE


def load_head(
    name: str, folder: Path, target: Llama, noise: Noise, *, pages: int, page_size: int, prefix_cache: bool = True
) -> RankingDrafter | None:
    """A drafter from a head's folder, or None where it holds no head.

    Args:
        name: as in ``--draft``.
        noise: the target's noise source.
        pages, page_size: of a cache for the head, as many as the target has.
        prefix_cache: whether that cache remembers prefixes.

    Raises:
        ModelError: the head is broken, or not one for this target.
    """
    kind = head_kind(folder)
    if kind is None:
        return None
    data = head_config(folder)
    assert data is not None
    if kind == MEDUSA:
        return MedusaDrafter(name, MedusaHeads.load(folder, data, target), noise)
    head = load_eagle_head(folder, data, 3 if kind == EAGLE3 else 1, target)
    return EagleDrafter(name, head, noise, pages=pages, page_size=page_size, prefix_cache=prefix_cache)


def head_config(folder: Path) -> Mapping[str, Any] | None:
    """A folder's config.json, or None where it cannot be read."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever reads the folder next says so better
    return data if isinstance(data, dict) else None

"""From ``--draft`` to a Drafter: what the names mean, what can be wrong with them, and what is loaded for them."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from minispec.drafters import shipped
from minispec.drafters.base import Drafter, NoDrafter
from minispec.drafters.draft_model import DraftModelDrafter
from minispec.drafters.fixed_tree import TreeShape
from minispec.drafters.grow import RankingDrafter
from minispec.drafters.heads import head_kind, load_head
from minispec.drafters.layer_skip import LayerSkipDrafter, check_layers
from minispec.drafters.ngram import NgramDrafter
from minispec.drafters.suffix import SuffixDrafter
from minispec.drafters.translate import TranslatingDrafter, relate
from minispec.drafters.union import UnionDrafter
from minispec.errors import ConfigError, ModelError
from minispec.graphs import runner_for
from minispec.kv_cache import PagePool
from minispec.model.config import ModelConfig
from minispec.model.llama import Llama
from minispec.model.loader import check_folder
from minispec.runner import ModelRunner, kv_bytes_per_position
from minispec.sampling import Noise
from minispec.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

AUTO = "ngram"
"""What ``--draft auto`` means, beside the head that is shipped for the target, if there is one."""
BUILT_IN = ("auto", "none", "ngram", "suffix")
"""Names that need no files; besides them ``layers:N``, and models and heads by name or folder."""
LAYERS = "layers:"


def parse(draft: str) -> tuple[str, ...]:
    """The members of a ``--draft`` setting, in order; none for plain decoding.

    Raises:
        ConfigError: a member is empty, comes twice or is no member; or ``layers:N`` has no number.
    """
    if draft == "none":
        return ()
    # a folder may have a comma in its name
    names = [draft] if Path(draft).expanduser().is_dir() else [name.strip() for name in draft.split(",")]
    if not all(names):
        raise ConfigError(f"--draft {draft!r} has an empty name between commas; give names like suffix,layers:10")
    if len(names) > 1 and (alone := next((name for name in names if name in ("auto", "none")), None)):
        raise ConfigError(f"--draft {draft} joins {alone!r} with others; it stands alone")
    names = [AUTO if name == "auto" else name for name in names]
    # one spelling: layers:08 is layers:8
    names = [f"{LAYERS}{_layers(name)}" if name.startswith(LAYERS) else name for name in names]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"--draft {draft} names {twice!r} twice; once is enough")
    for name in names:
        if name == "layers" or name.startswith("layers="):
            raise ConfigError(f"--draft {name}: write layers:N, with how many of the target's first layers draft")
    return tuple(names)


def settled(draft: str, target_folder: Path) -> str:
    """The setting with ``auto`` replaced by what it means for this target."""
    head = shipped.find(target_folder) if draft == "auto" else None
    return draft if head is None else f"{head.name},{AUTO}"


def model_names(draft: str) -> tuple[str, ...]:
    """The members that are models or heads, which may have to be pulled."""
    return tuple(name for name in parse(draft) if name not in BUILT_IN and not name.startswith(LAYERS))


def check(draft: str, target_folder: Path, max_context: int, tree: str | None = None) -> None:
    """Everything that can be wrong with the ``--draft`` and ``--tree`` settings, without reading weights.

    Raises:
        ConfigError, ModelError: with the remedy.
    """
    draft = settled(draft, target_folder)
    if tree is not None:
        TreeShape.from_file(Path(tree))
        if all(name in BUILT_IN for name in parse(draft)):
            raise ConfigError(
                f"--tree gives a shape to drafts of models, but --draft {draft} looks text up and draws no ranks; "
                "leave --tree out, or draft with layers:N, a model or a head"
            )
    model = ModelConfig.from_folder(target_folder)
    for name in parse(draft):
        if name.startswith(LAYERS):
            check_layers(_layers(name), model.num_layers)
    for name in model_names(draft):
        folder = _folder(name)
        if head_kind(folder) is None:
            _check_model(name, folder, target_folder, max_context)


Make = Callable[[ModelRunner, Noise, int, bool], RankingDrafter]


@dataclass(frozen=True)
class Draft:
    """What a ``--draft`` setting loads, before the size of the caches is known.

    Attributes:
        kv_bytes: what a position of the drafters' own caches takes, over all of them.
        make: from the target's runner, its noise, the number of pages that target and drafters get each, and whether
            these remember prefixes.
    """

    kv_bytes: int
    make: Callable[[ModelRunner, Noise, int, bool], Drafter]


def has_models(draft: str) -> bool:
    """Whether a ``--draft`` setting names a model, which may run on a device of its own; heads run with the target."""
    return any(head_kind(_folder(name)) is None for name in model_names(draft))


def load(
    draft: str, target: Llama, target_folder: Path, tree: str | None = None, device: torch.device | None = None
) -> Draft:
    """Load the models that a ``--draft`` setting names; ``check`` has been passed.

    Args:
        target: its dtype and device are the draft's.
        target_folder: with its tokenizer.
        tree: file with the shape of the trees that models and heads draft; None leaves it to what looks best.
        device: where draft models run; None is beside the target.

    Raises:
        ModelError: a draft is broken or not for this target.
    """
    shape = None if tree is None else TreeShape.from_file(Path(tree))
    names = parse(settled(draft, target_folder))
    members = [_load_member(name, target, target_folder, shape, device or target.device) for name in names]

    def make(runner: ModelRunner, noise: Noise, pages: int, prefix_cache: bool) -> Drafter:
        drafters = [member.make(runner, noise, pages, prefix_cache) for member in members]
        return UnionDrafter(drafters) if len(drafters) > 1 else drafters[0] if drafters else NoDrafter()

    return Draft(sum(member.kv_bytes for member in members), make)


def _load_member(name: str, target: Llama, target_folder: Path, shape: TreeShape | None, device: torch.device) -> Draft:
    if name == "ngram":
        return Draft(0, lambda *_: NgramDrafter())
    if name == "suffix":
        return Draft(0, lambda *_: SuffixDrafter())
    if name.startswith(LAYERS):
        kv_bytes, make = _layer_skip(name, target)
    elif head_kind(folder := _folder(name)) is not None:
        kv_bytes, make = _load_head(name, folder, target)
    else:
        kv_bytes, make = _load_model(name, folder, target, target_folder, device)

    def shaped(runner: ModelRunner, noise: Noise, pages: int, prefix_cache: bool) -> Drafter:
        drafter = make(runner, noise, pages, prefix_cache)
        if shape is not None:
            drafter.follow(shape)
        return drafter

    return Draft(kv_bytes, shaped)


def _layer_skip(name: str, target: Llama) -> tuple[int, Make]:
    layers, num_layers = _layers(name), target.config.num_layers
    return 0, lambda runner, noise, *_: LayerSkipDrafter(runner, num_layers, layers, noise)


def _load_head(name: str, folder: Path, target: Llama) -> tuple[int, Make]:
    def make(runner: ModelRunner, noise: Noise, pages: int, prefix_cache: bool) -> RankingDrafter:
        size = runner.kv.page_size
        drafter = load_head(name, folder, target, noise, pages=pages, page_size=size, prefix_cache=prefix_cache)
        assert drafter is not None
        return drafter

    # a head has one layer at most, about as large as one of the target's
    return kv_bytes_per_position(target.config, target.dtype) // target.config.num_layers, make


def _load_model(name: str, folder: Path, target: Llama, target_folder: Path, device: torch.device) -> tuple[int, Make]:
    own, target_own = Tokenizer.from_folder(folder), Tokenizer.from_folder(target_folder)
    translation = relate(target_own, own, name)
    if translation is not None:
        logger.warning(
            "the draft %s has another tokenizer than the target: it drafts over the %d strings that both know, "
            "%.1f%% of the target's tokens weighted by frequency",
            name,
            len(translation.pairs),
            100 * translation.overlap,
        )
    elif own.vocab_size != target_own.vocab_size:
        logger.warning("the draft knows %d tokens, the target %d", own.vocab_size, target_own.vocab_size)
    # under the same ids, none that the target lacks, be it in its tokenizer or in its head
    size = own.vocab_size if translation else min(target.vocab_size, own.vocab_size)
    model = Llama.load(folder, device=device, dtype=target.dtype, vocab_size=size)

    def make(runner: ModelRunner, noise: Noise, pages: int, prefix_cache: bool) -> RankingDrafter:
        drafting = runner_for(model, pages=pages, page_size=runner.kv.page_size, max_context=runner.max_context)
        if device != target.device:
            # the noise is a function of its keys, so that there may be two sources of it
            noise = Noise(noise.vocab_size, device)
        pool = PagePool(pages, runner.kv.page_size if prefix_cache else None)
        if translation is not None:
            return TranslatingDrafter(name, drafting, pool, noise, translation)
        return DraftModelDrafter(name, drafting, pool, noise)

    # pages are counted against the target's memory
    own_bytes = kv_bytes_per_position(model.config, model.dtype) if device == target.device else 0
    return own_bytes, make


def _check_model(name: str, folder: Path, target_folder: Path, max_context: int) -> None:
    config = ModelConfig.from_folder(folder)
    check_folder(folder, config)
    relate(Tokenizer.from_folder(target_folder), Tokenizer.from_folder(folder), name)
    if config.max_position < max_context:
        raise ConfigError(
            f"the draft {name} has a context limit of {config.max_position} tokens, the target is "
            f"served with {max_context}; give --max-context {config.max_position} or another draft"
        )


def _folder(name: str) -> Path:
    try:
        return shipped.resolve(name)
    except ModelError as error:
        if close := difflib.get_close_matches(name, BUILT_IN, n=1):
            raise ModelError(f"{error} Or did you mean --draft {close[0]}?") from error
        raise


def _layers(name: str) -> int:
    number = name.removeprefix(LAYERS)
    if not number.isdecimal():
        raise ConfigError(f"--draft {name}: {number!r} is no whole number of layers; write layers:N")
    return int(number)

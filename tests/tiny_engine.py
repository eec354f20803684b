"""Engines over tiny random models with real numerics, in float32."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch

from minispec.drafters.base import Drafter, NoDrafter
from minispec.drafters.draft_model import DraftModelDrafter
from minispec.drafters.heads import load_head
from minispec.drafters.layer_skip import LayerSkipDrafter
from minispec.drafters.ngram import NgramDrafter
from minispec.drafters.suffix import SuffixDrafter
from minispec.drafters.union import UnionDrafter
from minispec.engine import Engine
from minispec.kv_cache import PagePool
from minispec.model.config import ModelConfig
from minispec.model.llama import Llama
from minispec.runner import ModelRunner
from minispec.sampling import Noise
from scripted import ScriptedDrafter

VOCAB = 512


@cache
def tiny_model(seed: int, vocab: int = VOCAB, layers: int = 2) -> Llama:
    """A random model; a larger spread than usual makes it sure of its tokens, so that it repeats itself at times."""
    config = ModelConfig.from_json(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
        }
    )
    return Llama.random(config, device="cpu", dtype=torch.float32, seed=seed, std=0.2)


def always_wrong(text):
    """Ids the target has no reason to choose, in a tree with branches."""
    guess = (text[-1] * 7 + 13) % VOCAB
    return [guess, (guess + 1) % VOCAB, (guess + 2) % VOCAB, (guess + 3) % VOCAB], [0, 0, 1, 3]


DRAFTERS = (
    "none",
    "ngram",
    "suffix",
    "layers",
    "itself",
    "other",
    "small",
    "eagle1",
    "eagle3",
    "medusa",
    "wrong",
    "suffix+ngram",
    "ngram+itself",
    "layers+suffix+other",
    "medusa+eagle3+ngram",
    "eagle1+layers+small+wrong",
)


MODELS = {"itself": {"seed": 0}, "other": {"seed": 1}, "small": {"seed": 2, "vocab": 100}}
HEADS = {"eagle1": "eagle1-authors", "eagle3": "eagle3-authors", "medusa": "authors"}
_FOLDER = tempfile.TemporaryDirectory(prefix="minispec-heads-")


@cache
def head_folder(name: str) -> Path:
    """A random head for tiny_model(0)."""
    import tiny_heads  # which builds on this module

    build = tiny_heads.medusa_folder if name == "medusa" else tiny_heads.eagle_folder
    return build(Path(_FOLDER.name) / name, HEADS[name])


def tiny_engine(
    draft: str = "none",
    *,
    pages: int = 64,
    page_size: int = 16,
    max_context: int = 400,
    depth: int = 4,
    width: int = 4,
    prefix_cache: bool = True,
    **settings,
) -> Engine:
    """An engine over tiny_model(0), with a drafter by name, or several joined by ``+``.

    ``itself`` drafts with the target's own weights, ``layers`` with its first layer, ``small`` has fewer ids.
    """
    runner = poisoned_runner(tiny_model(0), pages, page_size)
    noise = Noise(VOCAB)
    shape = {"depth": depth, "width": width, "children": width}

    def pool() -> PagePool:
        return PagePool(pages, page_size if prefix_cache else None)

    def drafter(name: str) -> Drafter:
        if name in MODELS:
            model = tiny_model(**MODELS[name])
            return DraftModelDrafter(name, poisoned_runner(model, pages, page_size), pool(), noise, **shape)
        if name == "layers":
            return LayerSkipDrafter(runner, num_layers=2, layers=1, noise=noise, **shape)
        if name in HEADS:
            head = load_head(
                name,
                head_folder(name),
                tiny_model(0),
                noise,
                pages=pages,
                page_size=page_size,
                prefix_cache=prefix_cache,
            )
            assert head is not None
            return head
        return {
            "none": NoDrafter,
            "ngram": NgramDrafter,
            "suffix": SuffixDrafter,
            "wrong": lambda: ScriptedDrafter(always_wrong),
        }[name]()

    members = [drafter(name) for name in draft.split("+")]
    whole = members[0] if len(members) == 1 else UnionDrafter(members)
    return Engine(runner, pool(), whole, noise, max_context=max_context, **settings)


def poisoned_runner(model: Llama, pages: int, page_size: int) -> ModelRunner:
    """A runner whose cache spoils whatever reads it before it is written."""
    runner = ModelRunner(model, pages=pages, page_size=page_size)
    runner.kv.k.fill_(float("nan"))
    runner.kv.v.fill_(float("nan"))
    return runner

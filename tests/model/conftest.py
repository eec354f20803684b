"""``tiny``: models saved by transformers, with their logits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny_models import VARIANTS, build

Oracle = Callable[[list[int]], Tensor]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Oracle]]:
    """``tiny(variant)``: the folder of a saved model, and a function from tokens to its logits [len, vocab]."""
    made: dict[str, tuple[Path, Oracle]] = {}

    def get(variant: str) -> tuple[Path, Oracle]:
        if variant not in made:
            family, more = VARIANTS[variant]
            model = build(family, **more)
            folder = tmp_path_factory.mktemp(variant)
            model.save_pretrained(folder)

            def oracle(tokens: list[int]) -> Tensor:
                with torch.inference_mode():
                    return model(torch.tensor([tokens])).logits[0]

            made[variant] = folder, oracle
        return made[variant]

    return get

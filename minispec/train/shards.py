"""Training text on disk: shards of conversations with the target's hidden states, written whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minispec.errors import ModelError
from minispec.train.files import write

GIVEN, WRITTEN, ANSWER = 0, 1, 2
"""Whose a token is: the template's or the prompt's; the target's, within a user turn; the target's answer."""


@dataclass(frozen=True)
class Sample:
    """One conversation.

    Attributes:
        tokens: [length] int64.
        classes: [length] uint8: GIVEN, WRITTEN or ANSWER.
        features: [length - 1, taps * hidden] bfloat16, the tapped hidden states of every token but the last.
    """

    tokens: Tensor
    classes: Tensor
    features: Tensor

    @property
    def wanted(self) -> Tensor:
        """[length - 1] bool: the rows of features behind which stands a token that the target wrote."""
        return self.classes[1:] != GIVEN


@dataclass(frozen=True)
class Shard:
    """Conversations that were generated together.

    Attributes:
        samples: in the order of their openings.
    """

    samples: Sequence[Sample]

    @property
    def tokens(self) -> int:
        """Tokens that the target wrote: the number that ``--tokens`` counts."""
        return sum(int((sample.classes != GIVEN).sum()) for sample in self.samples)

    def save(self, path: Path, tag: str) -> None:
        """Write ``path`` in one move.

        Args:
            tag: says what the shard was made with; ``load`` wants the same.

        Raises:
            ConfigError: it cannot be written.
        """
        tensors = {
            "tokens": torch.cat([sample.tokens for sample in self.samples]).int(),
            "classes": torch.cat([sample.classes for sample in self.samples]),
            "features": torch.cat([sample.features for sample in self.samples]),
            "lengths": torch.tensor([len(sample.tokens) for sample in self.samples]),
        }
        write(path, lambda hidden: save_file(tensors, hidden, {"tag": tag, "tokens": str(self.tokens)}))

    @staticmethod
    def load(path: Path, tag: str) -> Shard:
        """Read what ``save`` wrote.

        Raises:
            ModelError: the file is broken, or was made with another target, seed or settings.
        """
        if header(path)[0] != tag:
            raise ModelError(
                f"{path} was generated with another target, seed or settings than now asked for; "
                "choose another --out, or delete the folder it is in"
            )
        try:
            with safe_open(path, framework="pt") as file:
                tokens, classes, features, lengths = map(file.get_tensor, ("tokens", "classes", "features", "lengths"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}. Delete it; it will be generated again") from None
        sizes = lengths.tolist()
        parts = zip(
            tokens.long().split(sizes), classes.split(sizes), features.split([n - 1 for n in sizes]), strict=True
        )
        return Shard([Sample(*part) for part in parts])


def header(path: Path) -> tuple[str, int]:
    """(tag, tokens) of a shard's file, without reading the rest of it.

    Raises:
        ModelError: the file is broken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            data = file.metadata() or {}
        return data["tag"], int(data["tokens"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Delete it; it will be generated again") from None

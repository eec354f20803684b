"""Where a training run keeps what it needs to go on: ``OUT/training``."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minispec.errors import ConfigError, ModelError
from minispec.train.files import write
from minispec.train.shards import Sample, Shard, header


@dataclass(frozen=True)
class Recipe:
    """What a run was asked for; resuming wants the same.

    Attributes:
        target: fingerprint of the target.
        seed, minutes, tokens, vocabulary: as in ``TrainOptions``.
        prompts: SHA-256 of the prompts file, or None.
        dtype: of the target.
        compiled: whether its steps were to run compiled.
        start: SHA-256 of the weights of the head that training begins with, or None.
    """

    target: str
    seed: int
    minutes: float | None
    tokens: int | None
    vocabulary: int
    prompts: str | None
    dtype: str
    compiled: bool
    start: str | None = None  # runs begun before there was such a thing do not say

    @property
    def tag(self) -> str:
        """What a shard depends on."""
        return json.dumps([self.target, self.seed, self.prompts, self.dtype, self.compiled])


class RunFolder:
    """The files of one run.

    Attributes:
        out: what the user named; the head and the report go there.
        recipe: what was asked for.
        notes: decided on the way, and kept: ``seconds`` used so far, ``generated`` once all text is there, how many
            ``shards`` it is in, ``steps``, ``threads``.
    """

    def __init__(self, out: Path, recipe: Recipe, notes: dict[str, Any]) -> None:
        self.out = out
        self.recipe = recipe
        self.notes = notes

    @staticmethod
    def open(out: Path, recipe: Recipe, *, resume: bool) -> RunFolder:
        """Begin a run, or find the one to go on with.

        Raises:
            ConfigError: the folder cannot be written, holds a run and ``resume`` is not given, holds none and it is, or
                holds another one.
        """
        file = out / "training" / "run.json"
        if not resume and (file.exists() or (out / "model.safetensors").exists()):
            remedy = "give --resume to go on with it, or another --out" if file.exists() else "give another --out"
            raise ConfigError(f"--out {out} holds a head already; {remedy}")
        if not resume:
            try:
                (out / "training").mkdir(parents=True, exist_ok=True)
                run = RunFolder(out, recipe, {"seconds": 0.0})
                run.save()
            except OSError as error:
                raise ConfigError(f"--out {out} cannot be written: {error.strerror}; give another folder") from None
            return run
        if not file.exists():
            raise ConfigError(f"--resume: there is no training run in {out}; leave --resume out to begin one")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            known, notes = Recipe(**data["recipe"]), dict(data["notes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--resume: {file} cannot be read: {error!r}; begin again in another --out") from None
        if not os.access(out, os.W_OK):
            raise ConfigError(f"--out {out} cannot be written; check its permissions")
        if differing := [key for key, value in asdict(known).items() if value != getattr(recipe, key)]:
            key = differing[0]
            name = "--from" if key == "start" else key
            raise ConfigError(
                f"--resume: the run in {out} has another {name} ({getattr(known, key)!r}, now "
                f"{getattr(recipe, key)!r}); give the options it was begun with, or another --out"
            )
        return RunFolder(out, recipe, notes)

    def note(self, **values: Any) -> None:
        """Write decisions down."""
        self.notes |= values
        self.save()

    def save(self) -> None:
        data = json.dumps({"recipe": asdict(self.recipe), "notes": self.notes}, indent=2) + "\n"
        write(self.out / "training" / "run.json", lambda path: path.write_text(data, encoding="utf-8"))

    @property
    def shards(self) -> list[Path]:
        """The files there are, in order."""
        return sorted((self.out / "training").glob("shard-*.safetensors"))

    @property
    def missing(self) -> Iterator[int]:
        """The numbers of those there are not, in order and without end: mostly those that come next, but broken ones
        may have been deleted."""
        return (number for number in itertools.count() if not self._shard(number).exists())

    @property
    def tokens(self) -> int:
        """Tokens in them that the target wrote."""
        return sum(header(path)[1] for path in self.shards)

    def add(self, number: int, samples: Sequence[Sample]) -> None:
        """Write a shard."""
        Shard(samples).save(self._shard(number), self.recipe.tag)

    def samples(self) -> list[Sample]:
        """All conversations.

        Raises:
            ModelError: a shard is broken, or not of this run.
        """
        return [sample for path in self.shards for sample in Shard.load(path, self.recipe.tag).samples]

    def _shard(self, number: int) -> Path:
        return self.out / "training" / f"shard-{number:05d}.safetensors"

    @property
    def _checkpoint(self) -> Path:
        return self.out / "training" / "checkpoint.pt"

    def checkpoint(self, state: Mapping[str, Any]) -> None:
        """Keep the state of training."""
        write(self._checkpoint, lambda path: torch.save(dict(state), path))

    def last_checkpoint(self) -> dict[str, Any] | None:
        """The state kept last, or None.

        Raises:
            ModelError: the file is broken.
        """
        if not self._checkpoint.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever it meets
            raise ModelError(
                f"{self._checkpoint} cannot be read: {error}. Delete it; training begins again on the same text"
            ) from None
        return state

"""What draft heads of all kinds share: the tensors of their folder, and the ids that their logits are for."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minispec import kernels
from minispec.errors import ModelError
from minispec.model.llama import Llama
from minispec.model.loader import Checkpoint
from minispec.sampling import Noise, NoiseOf, SamplingBatch

log = logging.getLogger(__name__)

_WEIGHTS = ("BF16", "F16", "F32")
_INTEGERS = ("I64", "I32")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHOWN = 8

Shape = tuple[int | None, ...]
"""Sizes of a tensor; None is any."""


class HeadFiles:
    """The tensors of a head's folder, by names without the prefixes under which they are published.

    Attributes:
        folder: where they lie.
        shapes: by name.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        rename: Callable[[str], str],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.folder = folder
        self._checkpoint = checkpoint
        self._names = {rename(name): name for name in checkpoint.entries}
        self._device, self._dtype = device, dtype
        self.shapes = {name: checkpoint.entries[full].shape for name, full in self._names.items()}

    @staticmethod
    def open(folder: Path, rename: Callable[[str], str], *, device: torch.device, dtype: torch.dtype) -> HeadFiles:
        """Read the headers.

        Args:
            rename: from a published name to the one used here.
            device, dtype: what tensors will come on and in, mostly the target's.

        Raises:
            ModelError: no safetensors (pickles are never opened: that can run code), or broken ones.
        """
        if not any(folder.glob("*.safetensors")):
            pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
            if pickles:
                raise ModelError(
                    f"{folder}: only pickled weights ({', '.join(pickles)}), which are never opened, as that can run "
                    "code. Use a folder with safetensors, or convert it where you trust it: "
                    f"safetensors.torch.save_file(torch.load({pickles[0]!r}, weights_only=True), 'model.safetensors')"
                )
        return HeadFiles(folder, Checkpoint.open(folder), rename, device=device, dtype=dtype)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def take(self, *names: str) -> Tensor:
        """The named weights, joined along their first dimension, in the dtype that was asked for."""
        return self._checkpoint.take(*(self._names[name] for name in names), device=self._device, dtype=self._dtype)

    @property
    def sha256(self) -> str:
        """Of the files that hold the tensors, behind one another; mostly that is one."""
        digest = hashlib.sha256()
        for file in sorted({entry.file for entry in self._checkpoint.entries.values()}):
            with open(file, "rb") as opened:
                while block := opened.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    def integers(self, name: str) -> Tensor:
        """A tensor of whole numbers, int64 on the CPU.

        Raises:
            ModelError: it holds something else.
        """
        full = self._names[name]
        if (kind := self._checkpoint.entries[full].dtype) not in _INTEGERS:
            raise ModelError(f"{self.folder}: {name} must hold whole numbers ({', '.join(_INTEGERS)}), not {kind}")
        return self._checkpoint.take(full, device=torch.device("cpu"), dtype=torch.int64)

    def check(
        self,
        expected: Mapping[str, Shape],
        optional: Mapping[str, Shape],
        *,
        ignored: re.Pattern[str],
    ) -> None:
        """Check names, shapes and dtypes. Weights that are not accounted for are named in a warning: leaving them out
        changes how good the drafts are, never the text.

        Args:
            expected: must be there.
            optional: may be there.
            ignored: names that hold no weights of the head.

        Raises:
            ModelError: missing, misshapen or quantised tensors, which are listed.
        """
        if missing := [name for name in expected if name not in self]:
            raise ModelError(f"{self.folder}: the weights lack {_list(missing)}. Fetch the head again")
        known = {name: shape for name, shape in {**optional, **expected}.items() if name in self}
        wrong = [
            f"{name} is {list(self.shapes[name])} instead of {['any' if n is None else n for n in shape]}"
            for name, shape in known.items()
            if not _fits(self.shapes[name], shape)
        ]
        if wrong:
            raise ModelError(
                f"{self.folder}: the weights do not fit config.json and the target: {_list(wrong)}. "
                "Check that the head was trained for this target"
            )
        dtypes = {name: self._checkpoint.entries[self._names[name]].dtype for name in known}
        if odd := [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in _WEIGHTS]:
            raise ModelError(
                f"{self.folder}: only {', '.join(_WEIGHTS)} weights are supported, but there are {_list(odd)}. "
                "Use the unquantised head"
            )
        if unused := [name for name in self._names if name not in known and not ignored.search(name)]:
            log.warning("%s: not used, as this kind of head has no place for it: %s", self.folder, _list(unused))


@dataclass(frozen=True)
class DraftVocabulary:
    """Which of the target's tokens a head gives logits for.

    Attributes:
        target_size: the target's number of ids.
        ids: [logits] int64 on the target's device, the target's id of each logit; None where they are the same.
        kept: [logits] int64, the rows of the folder's own head that they are; None keeps the first ``target_size``.
    """

    target_size: int
    ids: Tensor | None = None
    kept: Tensor | None = None

    @staticmethod
    def read(files: HeadFiles, target: Llama, head: str = "lm_head.weight") -> DraftVocabulary:
        """From ``d2t`` (the target's id of logit i is i + d2t[i]) or ``token_map`` (is token_map[i]), if there is one.

        Args:
            head: name of the output weights, whose number of rows the map must have.

        Raises:
            ModelError: a reduced vocabulary without a map, or a map that is too short, out of range or ambiguous.
        """
        rows = files.shapes[head][0] if head in files else None
        whole = target.config.vocab_size
        if rows is not None and rows > whole:
            raise ModelError(
                f"{files.folder}: {head} has {rows} rows, more than the target's vocabulary of {whole}; "
                "choose the head that was trained for this target"
            )
        name = next((name for name in ("d2t", "token_map") if name in files), None)
        if name is None:
            if rows is not None and rows < target.vocab_size:
                raise ModelError(
                    f"{files.folder}: {head} has {rows} rows, the target's vocabulary {target.vocab_size}, and there "
                    "is no d2t that says which ids they are. Fetch the head again, with all its files"
                )
            return DraftVocabulary(target.vocab_size)
        ids = files.integers(name)
        if ids.dim() != 1 or (rows is not None and len(ids) != rows):
            raise ModelError(f"{files.folder}: {name} is {list(ids.shape)}, but {head} has {rows} rows")
        if name == "d2t":
            ids = ids + torch.arange(len(ids))
        outside = ((ids < 0) | (ids >= whole)).nonzero().flatten()
        if len(outside):
            raise ModelError(
                f"{files.folder}: {name} maps {len(outside)} ids outside the target's vocabulary of {whole}, the first "
                f"{int(outside[0])} to {int(ids[outside[0]])}"
            )
        if (twice := len(ids) - len(ids.unique())) > 0:
            raise ModelError(f"{files.folder}: {name} maps {twice} ids to a token that another id stands for")
        # padding of the target's vocabulary is never produced
        kept = (ids < target.vocab_size).nonzero().flatten()
        ids = ids[kept]
        if torch.equal(ids, torch.arange(target.vocab_size)):
            return DraftVocabulary(target.vocab_size, None, kept.to(target.device))
        return DraftVocabulary(target.vocab_size, ids.to(target.device), kept.to(target.device))

    @property
    def size(self) -> int:
        """Number of logits."""
        return self.target_size if self.ids is None else len(self.ids)

    def own(self, weight: Tensor) -> Tensor:
        """The folder's output weights [rows, hidden], narrowed to the logits wanted."""
        return weight[: self.target_size] if self.kept is None else weight[self.kept]

    def borrowed(self, weight: Tensor) -> Tensor:
        """Output weights of the target, or its embedding: [the target's ids, hidden], narrowed to the logits wanted."""
        return weight[: self.target_size] if self.ids is None else weight[self.ids]

    def targets(self, indices: Tensor) -> Tensor:
        """Indices of logits to the target's ids."""
        return indices if self.ids is None else self.ids[indices]

    def best_children(self, logits: Tensor, sampling: SamplingBatch, noise: Noise, k: int) -> tuple[Tensor, Tensor]:
        """``kernels.top_children`` with the target's ids: [rows, ``size``] → (tokens, values), [rows, k] each."""
        if self.ids is None:
            return kernels.top_children(logits, sampling, noise, k)
        if sampling.greedy:
            tokens, values = kernels.top_children(logits, sampling, noise, k)
            return self.targets(tokens), values
        # The noise belongs to the target's ids.
        if kernels.BACKEND == "torch":
            tokens, values = kernels.top_children(logits, sampling, NoiseOf(noise, self.ids), k)
            return self.targets(tokens), values
        # Where it is computed inside the kernel it cannot be gathered, so the logits go where it is; what the head
        # cannot say has no weight.
        wide = logits.new_full((len(logits), self.target_size), float("-inf"))
        wide[:, self.ids] = logits
        return kernels.top_children(wide, sampling, noise, k)


def _fits(actual: tuple[int, ...], shape: Shape) -> bool:
    return len(actual) == len(shape) and all(want in (None, is_) for want, is_ in zip(shape, actual, strict=True))


def _list(items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more

"""The head that training goes on with (``train-draft --from``): an EAGLE-3 checkpoint, of this target or a like one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minispec.drafters import shipped
from minispec.drafters.eagle_head import EagleConfig, canonical, check_weights, read_layer
from minispec.drafters.head_files import HeadFiles
from minispec.drafters.heads import EAGLE3, head_config, head_kind
from minispec.errors import ModelError
from minispec.model.config import ModelConfig

_REMEDY = "give another head, or leave --from out to train one from nothing"


@dataclass(frozen=True)
class Origin:
    """A head to begin with. It may have been trained for another target, of the same sizes.

    Attributes:
        config: its shape.
        parameters: as ``TrainableHead`` has them, in float32 on the CPU; but ``fc`` reads features as tapped.
        sha256: of its weights.
        target: fingerprint of the target that it was trained for, if it says so.
        seed: of the text that it was trained on, if it says so.
    """

    config: EagleConfig
    parameters: Mapping[str, Tensor]
    sha256: str
    target: str | None
    seed: int | None

    @staticmethod
    def load(name: str, target: ModelConfig, taps: tuple[int, ...]) -> Origin:
        """Read a head. Its output layer, vocabulary and embedding are left where they are: training uses the target's.

        Args:
            name: a folder, or a head in the weights directory, or a shipped one.
            target: of the run.
            taps: the target's hidden states that the run records.

        Raises:
            ModelError: there is none of that name, it is broken, of other sizes than the target, or has parts that
                training does not know; says which.
        """
        try:
            folder = shipped.resolve(name)
        except ModelError as error:
            raise ModelError(f"--from {name}: {error}") from None
        kind = head_kind(folder)
        if kind != EAGLE3:
            found = "no draft head" if kind is None else f"a head of kind {kind}"
            raise ModelError(f"--from {name}: {found} is there, and training goes on with EAGLE-3; {_REMEDY}")
        data = head_config(folder)
        assert data is not None
        try:
            config = EagleConfig.from_json(data, 3, target)
        except ModelError as error:
            raise ModelError(f"--from {name}: {error}") from None
        if config.layer.hidden_size != target.hidden_size:
            raise ModelError(
                f"--from {name}: the head is of size {config.layer.hidden_size}, the target of {target.hidden_size}; "
                f"{_REMEDY}"
            )
        files = HeadFiles.open(folder, canonical, device=torch.device("cpu"), dtype=torch.float32)
        if odd := list(_beyond(config, files, taps)):
            raise ModelError(f"--from {name}: the head has {', '.join(odd)}, which cannot be trained here; {_REMEDY}")
        check_weights(config, files, target)
        layer = read_layer(config, files, 0)
        assert layer.input_norm is not None and layer.hidden_norm is not None
        parameters = {
            "fc": files.take("fc.weight"),
            "input_norm": layer.input_norm,
            "hidden_norm": layer.hidden_norm,
            "qkv": layer.qkv.weight,
            "o": layer.o.weight,
            "post_norm": layer.post_norm,
            "gate_up": layer.gate_up.weight,
            "down": layer.down.weight,
            "norm": files.take("norm.weight"),
        }
        if odd := [name for name, tensor in parameters.items() if not bool(tensor.isfinite().all())]:
            raise ModelError(
                f"--from {name}: its weights hold numbers that are not finite ({', '.join(odd)}), which no training "
                f"mends; {_REMEDY}"
            )
        return Origin(
            config,
            parameters,
            files.sha256,
            target=_note(data, shipped.KEY, "fingerprint"),
            seed=_note(data, "minispec_training", "seed"),
        )


def _beyond(config: EagleConfig, files: HeadFiles, taps: tuple[int, ...]) -> Iterator[str]:
    """What the head has and a trainable one has not."""
    if config.layer.num_layers > 1:
        yield f"{config.layer.num_layers} layers instead of one"
    if config.taps != taps:
        yield f"the target's layers {_numbers(config.taps)} tapped instead of {_numbers(taps)}"
    if config.norm_before_residual:
        yield "its norm before the residual (norm_before_residual)"
    if (rope := config.layer.rope.type) != "default":
        yield f"RoPE of type {rope}"
    if biases := [name for name in files.shapes if name.endswith(".bias")]:
        yield f"biases ({', '.join(biases)})"
    if any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in files.shapes):
        yield "norms of queries and keys"
    if "input_norm.weight" in files:
        yield "a norm before fc (input_norm.weight)"


def _numbers(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))


def _note(data: Mapping[str, Any], key: str, entry: str) -> Any:
    notes = data.get(key)
    return notes.get(entry) if isinstance(notes, Mapping) else None

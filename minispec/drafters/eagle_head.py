"""EAGLE heads: a decoder layer that continues the target's own hidden states. Configuration, weights, forward pass.

At position i a head reads the embedding of token i + 1 beside the target's hidden state at i, and guesses token i + 2:

    EAGLE-1, EAGLE-2    h = norm_target(s_n[i])                x = fc [E(t), h]             g = layer(x)
                        logits = head_target g
    EAGLE-3             h = fc [s_a[i], s_b[i], s_c[i]]        x = [norm E(t), norm h]      g = h + layer(x)
                        logits = head norm g

where t is token i + 1 and s_l[i] the target's residual stream after l layers. Where the target has not been, behind
drafted tokens, the head's own g stands in for h (Li et al.: EAGLE 2024, arXiv 2401.15077; EAGLE-2 2024, arXiv
2406.16858, the same head under a dynamic tree; EAGLE-3 2025, arXiv 2503.01840).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec import kernels
from minispec.drafters.head_files import DraftVocabulary, HeadFiles, Shape
from minispec.errors import ModelError
from minispec.model.config import ModelConfig
from minispec.model.linear import Head, Linear
from minispec.model.llama import Llama
from minispec.model.rope import Rope

log = logging.getLogger(__name__)

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)``: rotate, remember k and v, and attend. q [rows, heads, head_dim], k and v
[rows, kv_heads, head_dim], not rotated yet; gives [rows, heads, head_dim]."""

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# what a head does without: maps read elsewhere, buffers, and copies of the target's weights kept for training
_NO_WEIGHTS = re.compile(r"^(d2t|t2d|verifier_.*|.*rotary_emb\.inv_freq)$")


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """The shape of a head.

    Attributes:
        version: 1 (EAGLE-1 and EAGLE-2) or 3.
        layer: shape of its decoder layers; ``num_layers`` of them.
        taps: the target's hidden states it reads (``Taps.layers``), ascending.
        norm_before_residual: EAGLE-3: g = norm h + layer(x).
        first_norm: EAGLE-1: x is normed before the first layer; published heads mostly are not.
        last_norm: g is normed before the head.
    """

    version: int
    layer: ModelConfig
    taps: tuple[int, ...]
    norm_before_residual: bool = False
    first_norm: bool = False
    last_norm: bool = True

    @staticmethod
    def from_json(data: Mapping[str, Any], version: int, target: ModelConfig) -> EagleConfig:
        """Read a head's config.json, in the layouts of the EAGLE authors, SGLang, vLLM and "speculators".

        ``eagle_config.eagle_aux_hidden_state_layer_ids`` name the layers whose outputs are read; the same key at the
        top, as speculators and vLLM have it, those whose inputs are. Without either: 2, half and all but 3.

        Raises:
            ModelError: not a head that is supported, or not one for this target; with both numbers.
        """
        layer = data.get("transformer_layer_config") or data.get("model") or data
        if not isinstance(layer, Mapping):
            raise ModelError(f"transformer_layer_config in config.json must be an object, not {layer!r}")
        family = "qwen3" if layer.get("model_type") == "qwen3" else "llama"
        shape = ModelConfig.from_json(
            {"vocab_size": target.vocab_size, **layer, "architectures": None, "model_type": family}
        )
        if shape.vocab_size != target.vocab_size:
            raise ModelError(
                f"the head is made for a vocabulary of {shape.vocab_size}, the target's is {target.vocab_size}; "
                "choose the head that was trained for this target"
            )
        reads = data.get("target_hidden_size") or shape.hidden_size
        if reads != target.hidden_size:
            raise ModelError(
                f"the head reads hidden states of size {reads}, the target's have {target.hidden_size}; "
                "choose the head that was trained for this target"
            )
        eagle = data.get("eagle_config") or {}
        if not isinstance(eagle, Mapping):
            raise ModelError(f"eagle_config in config.json must be an object, not {eagle!r}")
        if version == 1:
            return EagleConfig(
                version=1,
                layer=shape,
                taps=(target.num_layers,),
                first_norm=bool(eagle.get("use_input_layernorm_in_first_layer")),
                last_norm=bool(eagle.get("use_last_layernorm")),
            )
        if eagle.get("use_aux_hidden_state") is False:
            raise ModelError(
                "an EAGLE-3 head without auxiliary hidden states (use_aux_hidden_state: false) is not supported"
            )
        return EagleConfig(
            version=3,
            layer=shape,
            taps=_taps(data, eagle, target.num_layers),
            norm_before_residual=bool(data.get("norm_before_residual")),
        )


@dataclass(frozen=True)
class HeadLayer:
    """One decoder layer's weights; q/k/v and gate/up are fused along their outputs. ``hidden_norm`` is EAGLE-3's."""

    input_norm: Tensor | None
    hidden_norm: Tensor | None
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class HeadWeights:
    """All weights of a head but the output layer's. Plain tensors that want gradients do as well: nothing is kept.

    Attributes:
        fc: to h of the formula.
        fc_norm: EAGLE-3: norm of what ``fc`` reads; few heads have one.
        layers: the decoder layers.
        norm: before the head; None leaves it out.
        embedding: [vocabulary, hidden], often the target's own.
    """

    fc: Linear
    fc_norm: Tensor | None
    layers: Sequence[HeadLayer]
    norm: Tensor | None
    embedding: Tensor


class Operations(Protocol):
    """What the forward needs besides linear layers and attention, see ``minispec.kernels``."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(normed x + residual, x + residual)."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * dim] to [rows, dim]."""


class EagleForward:
    """The forward pass, for inference and for training: nothing here keeps state, attention is an argument.

    Attributes:
        config: the head's shape.
        weights: its weights.
        operations: ``kernels``, or what can be differentiated.
    """

    def __init__(self, config: EagleConfig, weights: HeadWeights, operations: Operations) -> None:
        shape = config.layer
        self.config = config
        self.weights = weights
        self.operations = operations
        self._widths = [n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]

    def forward(self, tokens: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        """Run the decoder layers.

        Args:
            tokens: [rows] int64, the token one position further than ``hidden``.
            hidden: [rows, hidden]: ``fuse``'s h, or the g of an earlier forward.
            attend: attention with its memory of earlier rows.

        Returns:
            [rows, hidden]: g of the formula.
        """
        shape, eps, rows = self.config.layer, self.config.layer.rms_norm_eps, tokens.shape[0]
        embedded = F.embedding(tokens, self.weights.embedding)
        first = self.weights.layers[0]
        if self.config.version == 1:
            residual = self.weights.fc(torch.cat([embedded, hidden], dim=-1))
            x = residual if first.input_norm is None else self.operations.rms_norm(residual, first.input_norm, eps)[0]
        else:
            assert first.input_norm is not None and first.hidden_norm is not None
            normed = self.operations.rms_norm(hidden, first.hidden_norm, eps)[0]
            residual = normed if self.config.norm_before_residual else hidden
            x = torch.cat([self.operations.rms_norm(embedded, first.input_norm, eps)[0], normed], dim=-1)
        for i, layer in enumerate(self.weights.layers):
            if i > 0:
                assert layer.input_norm is not None
                x, residual = self.operations.rms_norm(x, layer.input_norm, eps, residual)
            q, k, v = (part.view(rows, -1, shape.head_dim) for part in layer.qkv(x).split(self._widths, dim=-1))
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = (
                    self.operations.rms_norm(q, layer.q_norm, eps)[0],
                    self.operations.rms_norm(k, layer.k_norm, eps)[0],
                )
            attended = attend(i, q, k, v).reshape(rows, -1)
            x, residual = self.operations.rms_norm(layer.o(attended), layer.post_norm, eps, residual)
            x = layer.down(self.operations.silu_mul(layer.gate_up(x)))
        return x + residual

    def normed(self, hidden: Tensor) -> Tensor:
        """[rows, hidden], the g of ``forward``, to what the output layer reads."""
        if self.weights.norm is None:
            return hidden
        return self.operations.rms_norm(hidden, self.weights.norm, self.config.layer.rms_norm_eps)[0]


class EagleHead(EagleForward):
    """A head beside its target.

    Attributes:
        device, dtype: the target's; weights are converted.
        vocabulary: which of the target's ids its logits are for.
        rope: of its attention.
        output: its output layer.
    """

    def __init__(self, config: EagleConfig, files: HeadFiles, target: Llama) -> None:
        """Build from the folder's tensors.

        Raises:
            ModelError: tensors are missing or misshapen (listed), or ids do not map onto the target's.
        """
        shape = config.layer
        self.device, self.dtype = target.device, target.dtype
        self.rope = Rope(shape.rope, shape.head_dim, target.device)
        check_weights(config, files, target.config)
        take = files.take
        own = take(EMBEDDING) if EMBEDDING in files else None
        if own is None:
            log.info("%s has no embedding: the target's is used", files.folder)
        weights = HeadWeights(
            fc=Linear(take("fc.weight"), take("fc.bias") if "fc.bias" in files else None),
            fc_norm=take("input_norm.weight") if "input_norm.weight" in files else None,
            layers=[read_layer(config, files, i) for i in range(shape.num_layers)],
            norm=take("norm.weight") if config.last_norm else None,
            embedding=target.embedding if own is None or torch.equal(own, target.embedding) else own,
        )
        super().__init__(config, weights, kernels)
        self._target_norm, self._target_eps = target.norm, target.config.rms_norm_eps
        self.vocabulary = DraftVocabulary.read(files, target)
        self.output = Head(self._head_weight(files, target))

    def fuse(self, features: Tensor) -> Tensor:
        """What the head reads of the target.

        Args:
            features: [rows, taps * target's hidden], the tapped hidden states side by side.

        Returns:
            [rows, hidden]: h of the formula.
        """
        if self.config.version == 1:
            return kernels.rms_norm(features, self._target_norm, self._target_eps)[0]
        if self.weights.fc_norm is not None:
            features = kernels.rms_norm(features, self.weights.fc_norm, self.config.layer.rms_norm_eps)[0]
        return self.weights.fc(features)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden], the g of ``forward``, to float32 logits [rows, ``vocabulary.size``]."""
        return self.output(self.normed(hidden))

    def _head_weight(self, files: HeadFiles, target: Llama) -> Tensor:
        """[logits, hidden]: the folder's own, else its embedding where the config ties the two, else the target's."""
        if HEAD in files:
            return self.vocabulary.own(files.take(HEAD))
        tied = self.config.layer.tie_word_embeddings and EMBEDDING in files
        log.info("%s has no lm_head: %s is used", files.folder, "its embedding" if tied else "the target's")
        return self.vocabulary.borrowed(self.weights.embedding if tied else target.head.weight)


def _taps(data: Mapping[str, Any], eagle: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    outputs = eagle.get(key)
    taps = outputs or data.get(key) or [2, layers // 2, layers - 3]
    if not isinstance(taps, list):
        raise ModelError(f"{key} in config.json must be a list of layers, not {taps!r}")
    if outputs:
        taps = [i + 1 if isinstance(i, int) else i for i in taps]
    if not all(isinstance(i, int) and 0 <= i <= layers for i in taps) or len(set(taps)) < len(taps):
        raise ModelError(
            f"the head taps the target after layers {taps}; they must differ and lie within 0 to {layers}. "
            f"Set {key} in config.json to the layers it was trained with"
        )
    # the published implementations collect them on the way through the layers, so in this order, whatever the list's
    return tuple(sorted(taps))


def check_weights(config: EagleConfig, files: HeadFiles, target: ModelConfig) -> None:
    """Names and shapes of all weights that the head cannot borrow.

    Raises:
        ModelError: tensors are missing or misshapen; they are listed.
    """
    shape, hidden = config.layer, config.layer.hidden_size
    q, kv, inner = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.intermediate_size
    fused = 2 * hidden if config.version == 1 else len(config.taps) * target.hidden_size
    expected: dict[str, Shape] = {"fc.weight": (hidden, fused)}
    optional: dict[str, Shape] = {"fc.bias": (hidden,), EMBEDDING: (shape.vocab_size, hidden), HEAD: (None, hidden)}
    if config.version == 3:
        expected["layers.0.hidden_norm.weight"] = (hidden,)
        optional["input_norm.weight"] = (fused,)
    if config.last_norm:
        expected["norm.weight"] = (hidden,)
    if hidden != target.hidden_size:  # nothing of the target's fits
        expected[EMBEDDING] = optional.pop(EMBEDDING)
    for i in range(shape.num_layers):
        prefix = f"layers.{i}."
        width = 2 * hidden if config.version == 3 and i == 0 else hidden
        linear = {name: (rows, width) for name, rows in zip(_PARTS, (q, kv, kv), strict=True)} | {
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        expected |= {f"{prefix}{name}.weight": size for name, size in linear.items()}
        optional |= {f"{prefix}{name}.bias": size[:1] for name, size in linear.items()}
        optional |= {f"{prefix}self_attn.{part}_norm.weight": (shape.head_dim,) for part in "qk"}
        expected[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        if config.version == 3 or i > 0 or config.first_norm:
            expected[f"{prefix}input_layernorm.weight"] = (hidden,)
    files.check(expected, optional, ignored=_NO_WEIGHTS)
    if HEAD not in files and hidden != target.hidden_size and not shape.tie_word_embeddings:
        raise ModelError(
            f"{files.folder}: the weights lack {HEAD}, and the target's is for another hidden size "
            f"({target.hidden_size}, not {hidden})"
        )


def read_layer(config: EagleConfig, files: HeadFiles, index: int) -> HeadLayer:
    """The weights of a decoder layer, once ``check_weights`` has passed them."""
    prefix = f"layers.{index}."

    def vector(name: str) -> Tensor | None:
        return files.take(f"{prefix}{name}.weight") if f"{prefix}{name}.weight" in files else None

    def linear(*names: str) -> Linear:
        def join(kind: str) -> Iterable[str]:
            return (f"{prefix}{name}.{kind}" for name in names)

        biased = all(name in files for name in join("bias"))
        return Linear(files.take(*join("weight")), files.take(*join("bias")) if biased else None)

    normed = config.version == 3 or index > 0 or config.first_norm
    return HeadLayer(
        input_norm=vector("input_layernorm") if normed else None,
        hidden_norm=vector("hidden_norm") if config.version == 3 and index == 0 else None,
        qkv=linear(*_PARTS),
        q_norm=vector("self_attn.q_norm"),
        k_norm=vector("self_attn.k_norm"),
        o=linear("self_attn.o_proj"),
        post_norm=files.take(f"{prefix}post_attention_layernorm.weight"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


def load_eagle_head(folder: Path, data: Mapping[str, Any], version: int, target: Llama) -> EagleHead:
    """Load a head's folder for ``target``.

    Args:
        data: its config.json.
        version: 1 or 3, see ``EagleConfig``.

    Raises:
        ModelError: with the folder's name; see ``EagleConfig.from_json`` and ``EagleHead``.
    """
    try:
        config = EagleConfig.from_json(data, version, target.config)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    with torch.no_grad():
        files = HeadFiles.open(folder, canonical, device=target.device, dtype=target.dtype)
        return EagleHead(config, files, target)


def canonical(name: str) -> str:
    """A tensor's name without what differs between publishers."""
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))

"""The forward pass of Llama-family models over ragged rows: all spans of a step behind one another, no padding."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec import kernels
from minispec.batch import StepBatch
from minispec.kv_cache import KVCache
from minispec.model import fixed_attention
from minispec.model.config import ModelConfig
from minispec.model.linear import Head, Linear
from minispec.model.linears import Linears
from minispec.model.loader import EMBEDDING, HEAD, check_folder, expected_shapes
from minispec.model.rope import Rope
from minispec.upload import tensor_of, upload

log = logging.getLogger(__name__)

Take = Callable[..., Tensor]
"""``take(*names)``: the named tensors joined along their first dimension, in the model's dtype and on its device."""


class Taps:
    """Hidden states wanted of a forward, for drafters that read the target's mind.

    Args:
        layers: for each, the residual stream after that many layers: 0 is the embedding, ``num_layers`` what the final
            norm reads. Ascending.

    Attributes:
        layers: see above.
        memory: the hidden states row by row, bfloat16, where a forward on the host gives them so: compiled
            code reads them there, and tensors are made when they are asked for (``upload.tensor_of`` says why).
        shape: of ``memory``: (rows, layers that ran, hidden).
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.memory: array[int] | None = None
        self.shape = (0, 0, 0)
        self._hidden: list[Tensor] = []
        self._features: Tensor | None = None

    def see(self, layer: int, stream: Tensor) -> None:
        """Called by the forward with the stream after ``layer`` layers, [rows, hidden]."""
        if layer in self.layers:
            self._hidden.append(stream)

    @property
    def hidden(self) -> list[Tensor]:
        """Per tapped layer that ran [rows, hidden] in the model's dtype."""
        if self.memory and not self._hidden:
            self._hidden = list(torch.frombuffer(self.memory, dtype=torch.bfloat16).view(self.shape).unbind(1))
        return self._hidden

    @property
    def features(self) -> Tensor:
        """[rows, len(layers) * hidden], the tapped layers side by side."""
        if self._features is None and self.memory:
            self._features = torch.frombuffer(self.memory, dtype=torch.bfloat16).view(self.shape[0], -1)
        elif self._features is None:
            self._features = torch.cat(self.hidden, dim=-1)
            self._hidden = list(self._features.chunk(len(self.layers), dim=-1))  # the others need not be kept
        return self._features

    def of(self, layers: tuple[int, ...]) -> Taps:
        """Some of the tapped layers."""
        own = Taps(layers)
        own._hidden = [hidden for layer, hidden in zip(self.layers, self.hidden, strict=True) if layer in layers]
        return own


class Tapped(NamedTuple):
    """Some rows of a step's tapped hidden states, at least one."""

    taps: Taps
    rows: Sequence[int]

    @property
    def features(self) -> Tensor:
        """[rows, taps * hidden]."""
        return features_of([self])


def features_of(parts: Sequence[Tapped]) -> Tensor:
    """The rows of all parts, [rows, taps * hidden]; a view where that is possible."""
    steps: list[tuple[Taps, list[int]]] = []
    for taps, rows in parts:
        if not steps or steps[-1][0] is not taps:
            steps.append((taps, []))
        steps[-1][1].extend(rows)
    pieces = []
    for taps, rows in steps:
        whole, first, end = taps.features, rows[0], rows[0] + len(rows)
        if rows == list(range(first, end)):
            pieces.append(whole[first:end])
        else:
            [index] = upload([tensor_of(array("q", rows))], whole.device)
            pieces.append(whole.index_select(0, index))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass(frozen=True)
class Layer:
    """One decoder layer's weights; q/k/v and gate/up are fused along their outputs."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """A decoder for inference.

    Attributes:
        config: its shape.
        device, dtype: of weights, activations and KV.
        vocab_size: number of logits, see ``load``.
        embedding: [config.vocab_size, hidden].
        layers, norm, head: the rest, in order.
    """

    def __init__(
        self,
        config: ModelConfig,
        take: Take,
        *,
        own_head: bool,
        device: torch.device,
        dtype: torch.dtype,
        vocab_size: int,
        deterministic: bool = False,
        quantize: str = "none",
    ) -> None:
        """Build from ``take``; most callers want ``load`` or ``random``. ``own_head``: there are weights for a head."""
        self.config = config
        self.device, self.dtype = device, dtype
        self.rope = Rope(config.rope, config.head_dim, device)
        self.scale = config.head_dim**-0.5
        self._deterministic = deterministic
        if deterministic:
            fixed_attention.check(config.num_kv_heads, config.head_dim, config.num_heads // config.num_kv_heads)
        self._widths = [h * config.head_dim for h in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.embedding = take(EMBEDDING)
        linears = Linears(deterministic=deterministic, quantize=quantize)
        self.layers = [_layer(config, take, linears, f"model.layers.{i}.") for i in range(config.num_layers)]
        self.norm = take("model.norm.weight")
        head = take(HEAD) if own_head else self.embedding
        if own_head and config.tie_word_embeddings:
            if torch.equal(head, self.embedding):
                head = self.embedding
            else:  # as transformers 5 does
                log.warning("tie_word_embeddings is set, but the weights hold another head; using that head")
        head = head[:vocab_size]
        self.head = Head(head, linears(head))
        self.vocab_size = self.head.vocab_size

    @staticmethod
    def load(
        folder: Path | str,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        vocab_size: int | None = None,
        deterministic: bool = False,
        quantize: str = "none",
    ) -> Llama:
        """Load a folder in the Hugging Face layout.

        Args:
            folder: with config.json and safetensors.
            device, dtype: of weights, activations and KV.
            vocab_size: ids the tokenizer knows. Vocabularies are often padded; the head is narrowed to this many
                ids, so that padding is never produced. None, or more than the head has, keeps all.
            deterministic: on a CPU, a token's result shall not depend on who shares its step (``fixed_attention``).
            quantize: ``int8`` rounds the weights of linear layers to 8 bits, one by one as they are read.

        Raises:
            ConfigError: ``deterministic`` cannot be had on this machine.
            ModelError: the folder cannot be used, see ``ModelConfig.from_folder`` and ``check_folder``.
        """
        config = ModelConfig.from_folder(folder)
        checkpoint = check_folder(folder, config)
        device = torch.device(device)

        def take(*names: str) -> Tensor:
            return checkpoint.take(*names, device=device, dtype=dtype)

        with torch.no_grad():
            return Llama(
                config,
                take,
                own_head=HEAD in checkpoint.entries,
                device=device,
                dtype=dtype,
                vocab_size=config.vocab_size if vocab_size is None else vocab_size,
                deterministic=deterministic,
                quantize=quantize,
            )

    @staticmethod
    def random(
        config: ModelConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        seed: int = 0,
        std: float = 0.02,
        deterministic: bool = False,
        quantize: str = "none",
    ) -> Llama:
        """A model with random weights (normal with deviation ``std``; norms are 1), for benchmarks and tests."""
        device = torch.device(device)
        shapes = expected_shapes(config)
        generator = torch.Generator(device=device).manual_seed(seed)

        def take(*names: str) -> Tensor:
            shape = (sum(shapes[name][0] for name in names), *shapes[names[0]][1:])
            if names[0].endswith("norm.weight"):
                return torch.ones(shape, device=device, dtype=dtype)
            return torch.empty(shape, device=device, dtype=dtype).normal_(std=std, generator=generator)

        with torch.no_grad():
            return Llama(
                config,
                take,
                own_head=not config.tie_word_embeddings,
                device=device,
                dtype=dtype,
                vocab_size=config.vocab_size,
                deterministic=deterministic,
                quantize=quantize,
            )

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: KVCache, *, layers: int | None = None, taps: Taps | None = None) -> Tensor:
        """Run one step and write its KV.

        Args:
            batch: the rows.
            kv: cache of this model; written at ``batch.kv_index`` of every layer that runs.
            layers: run only the first ``layers``, then the final norm and the head (self-drafting by layer skip).
            taps: filled with hidden states on the way.

        Returns:
            [samples, vocab_size] float32: logits of ``batch.sample_rows``, in that order.
        """
        config, eps, scale = self.config, self.config.rms_norm_eps, self.scale
        attend = fixed_attention.fixed_attention if self._deterministic else kernels.tree_attention
        rows = batch.tokens.shape[0]
        cos, sin = self.rope.cos_sin(batch.positions)
        x, residual = F.embedding(batch.tokens, self.embedding), None
        depth = len(self.layers) if layers is None else layers
        for i, layer in enumerate(self.layers[:depth]):
            k_cache, v_cache = kv.k[i], kv.v[i]
            y, residual = kernels.rms_norm(x, layer.input_norm, eps, residual)
            if taps is not None:
                taps.see(i, residual)
            q, k, v = (part.view(rows, -1, config.head_dim) for part in layer.qkv(y).split(self._widths, dim=-1))
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = kernels.qk_norm(q, k, layer.q_norm, layer.k_norm, eps)
            q = kernels.rope_kv_write(q, k, v, cos, sin, k_cache, v_cache, batch)
            attended = attend(q, k_cache, v_cache, batch, scale)
            y, residual = kernels.rms_norm(layer.o(attended.view(rows, -1)), layer.post_norm, eps, residual)
            x = layer.down(kernels.silu_mul(layer.gate_up(y)))
        if taps is not None and depth in taps.layers:
            taps.see(depth, x if residual is None else x + residual)
        if batch.sample_rows.shape[0] != rows:
            x = x[batch.sample_rows]
            residual = None if residual is None else residual[batch.sample_rows]
        return self.head(kernels.rms_norm(x, self.norm, eps, residual)[0])


def _layer(config: ModelConfig, take: Take, linears: Linears, prefix: str) -> Layer:
    def linear(bias: bool, *names: str) -> Linear:
        return linears(
            take(*(f"{prefix}{name}.weight" for name in names)),
            take(*(f"{prefix}{name}.bias" for name in names)) if bias else None,
        )

    return Layer(
        input_norm=take(f"{prefix}input_layernorm.weight"),
        qkv=linear(config.qkv_bias, *(f"self_attn.{part}_proj" for part in "qkv")),
        q_norm=take(f"{prefix}self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=take(f"{prefix}self_attn.k_norm.weight") if config.qk_norm else None,
        o=linear(config.o_bias, "self_attn.o_proj"),
        post_norm=take(f"{prefix}post_attention_layernorm.weight"),
        gate_up=linear(config.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=linear(config.mlp_bias, "mlp.down_proj"),
    )

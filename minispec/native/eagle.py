"""An EAGLE head's weights in the compiled step's layout, and its forward."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from ctypes import byref
from operator import itemgetter

import torch
from torch import Tensor

from minispec.batch import StepBatch
from minispec.drafters.eagle_head import EagleHead, HeadLayer, HeadWeights
from minispec.drafters.grow import Best
from minispec.kv_cache import KVCache
from minispec.model.int8 import BlockInt8Linear
from minispec.model.linear import Head, Linear
from minispec.model.llama import Tapped, features_of
from minispec.native.library import (
    BatchStruct,
    EagleStepStruct,
    EagleStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    StepStruct,
    Team,
)
from minispec.native.model import Arena, PackedLinear, dense, packed_linear, pointer, struct_of
from minispec.native.scratch import Scratch


def unsupported(head: EagleHead) -> str | None:
    """Why the compiled step cannot run ``head``; None if it can."""
    if head.device.type != "cpu":
        return f"the head runs on {head.device.type}"
    if head.dtype != torch.bfloat16:
        return f"it computes in bfloat16, the head in {str(head.dtype).removeprefix('torch.')}"
    if type(head.output) is not Head:
        return "the head's weights are in another layout already"
    if (size := head.config.layer.head_dim) % 16:
        return f"it needs attention heads of a multiple of 16, the draft head's have {size}"
    return None


class PackedOutput(Head):
    """A draft head's output layer: logits are the float32 sums, and there is no plain copy of the weight. Nothing
    depends on a draft's logits but how often it is right."""

    def __init__(self, linear: PackedLinear) -> None:
        self.linear: PackedLinear = linear

    @property
    def vocab_size(self) -> int:
        return self.linear.out_features

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear.apply(x, torch.float32)


def pack(team: Team, packer: Team, head: EagleHead) -> None:
    """Replace the head's weights by packed ones of 8 bits, which the eager forward reads too.

    A proposal is a chain of small forwards, each of which waits for its weights: with half the bytes it takes a third
    less time, and hardly a token of it changes.

    Args:
        team: for later calls.
        packer: lays the weights out, now; no other thread may be calling it.
    """
    weights, output = head.weights, head.output
    linears = [weights.fc, *(x for layer in weights.layers for x in (layer.qkv, layer.o, layer.gate_up, layer.down))]
    gate_ups = [layer.gate_up for layer in weights.layers]
    rounded = {linear: BlockInt8Linear(dense(linear, packer), linear.bias) for linear in (*linears, output.linear)}
    arena = Arena([(rounded[linear], linear in gate_ups) for linear in rounded], packer)

    def packed(linear: Linear, *, paired: bool = False) -> PackedLinear:
        return packed_linear(team, packer, rounded[linear], paired=paired, arena=arena)

    head.weights = HeadWeights(
        fc=packed(weights.fc),
        fc_norm=weights.fc_norm,
        layers=[
            HeadLayer(
                input_norm=layer.input_norm,
                hidden_norm=layer.hidden_norm,
                qkv=packed(layer.qkv),
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                o=packed(layer.o),
                post_norm=layer.post_norm,
                gate_up=packed(layer.gate_up, paired=True),
                down=packed(layer.down),
            )
            for layer in weights.layers
        ],
        norm=weights.norm,
        embedding=weights.embedding,
    )
    head.output = PackedOutput(packed(output.linear))


class CompiledHead:
    """``HeadForward`` in one call, for a head whose weights are packed. For one thread at a time.

    Attributes:
        team: the threads that run it.
    """

    def __init__(self, team: Team, head: EagleHead) -> None:
        config, shape = head.config, head.config.layer
        self.team = team
        self._head = head
        self._weights, self._output, self._rope = head.weights, head.output, head.rope  # what the structs point to
        self._ids, self._ids_at = head.vocabulary.ids, pointer(head.vocabulary.ids)
        self._size, self._vocab, self._layers = shape.hidden_size, head.vocabulary.size, shape.num_layers
        self._features = Scratch(head.weights.fc.in_features, torch.bfloat16)
        self._fused, self._picked = Scratch(self._size, torch.bfloat16), Scratch(self._size, torch.bfloat16)
        self._g = [Scratch(self._size, torch.bfloat16) for _ in range(2)]  # one is read while the other is written
        self._logits = Scratch(self._vocab, torch.float32)
        # what the last calls have written: the tensor, its address and its rows, which torch takes 50 µs to tell
        self._written: list[tuple[Tensor, int, int]] = []
        layers = (LayerStruct * shape.num_layers)()
        for struct, layer in zip(layers, self._weights.layers, strict=True):
            struct.input_norm, struct.post_norm = pointer(layer.input_norm), pointer(layer.post_norm)
            struct.q_norm, struct.k_norm = pointer(layer.q_norm), pointer(layer.k_norm)
            struct.qkv, struct.o = struct_of(layer.qkv), struct_of(layer.o)
            struct.gate_up, struct.down = struct_of(layer.gate_up), struct_of(layer.down)
        model = ModelStruct(
            shape.num_layers, shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads,
            shape.head_dim, self._vocab, 0, shape.rms_norm_eps, shape.head_dim**-0.5, layers,
            pointer(self._weights.embedding), pointer(self._weights.norm), struct_of(self._output.linear), None,
            pointer(self._rope.inv_freq), self._rope.attention_scaling,
        )  # fmt: skip
        first = config.version == 1
        self._struct = EagleStruct(
            model,
            struct_of(self._weights.fc) if first else LinearStruct(),
            pointer(self._weights.layers[0].hidden_norm),
            config.version,
            config.norm_before_residual,
        )

    def fuse(self, tapped: Sequence[Tapped]) -> Tensor:
        """As in ``HeadForward``; lies where the next call writes its own."""
        fc = self._weights.fc
        if self._struct.version == 1 or self._weights.fc_norm is not None or not all(t.taps.memory for t in tapped):
            return self._head.fuse(features_of(tapped))
        assert isinstance(fc, PackedLinear)
        gather = self.team.library.gather
        count = sum([len(rows) for _, rows in tapped])
        _, features = self._features(count)
        at = features
        for taps, group in itertools.groupby(tapped, key=itemgetter(0)):
            own = array("q", [row for _, rows in group for row in rows])
            assert taps.memory is not None
            width = 2 * fc.in_features  # bytes
            gather(at, taps.memory.buffer_info()[0], width, own.buffer_info()[0], len(own))
            at += width * len(own)
        fused, address = self._fused(count)
        self.team.library.linear(
            self.team.handle, byref(fc.struct), features, fc.in_features, count, address, self._size, False
        )
        self._written = [(fused, address, count)]
        return fused

    def __call__(
        self, batch: StepBatch, gaps: Sequence[int], hidden: Tensor, rows: Sequence[int] | None, kv: KVCache
    ) -> tuple[Tensor, Tensor]:
        """Arguments and result as in ``HeadForward``; g lies where the call after the next writes its own."""
        place, _ = self._where(hidden)
        if rows is not None:
            index, width = array("q", rows), 2 * self._size
            _, own = self._picked(len(index))
            self.team.library.gather(own, place, width, index.buffer_info()[0], len(index))
            place = own
        positions = batch.positions_after(gaps)
        self._g.reverse()
        count = batch.samples
        (g, g_at), (logits, logits_at) = self._g[0](count), self._logits(count)
        step = StepStruct(BatchStruct.of(batch), self._layers, 0, None, None, *kv.place, logits_at)
        head_step = EagleStepStruct(step, positions.buffer_info()[0], place, g_at)
        self.team.library.eagle(self.team.handle, byref(self._struct), byref(head_step))
        self._written = [(g, g_at, count), (logits, logits_at, count)]
        return g, logits

    def best(self, logits: Tensor, k: int) -> Best:
        """As in ``HeadForward``; equal tokens come in the order of their indices."""
        place, rows = self._where(logits)
        tokens, values = array("q", bytes(8 * rows * k)), array("f", bytes(4 * rows * k))
        self.team.library.best(
            self.team.handle, place, rows, self._vocab, k, self._ids_at, tokens.buffer_info()[0],
            values.buffer_info()[0],
        )  # fmt: skip
        ids, scores = tokens.tolist(), values.tolist()
        starts = range(0, rows * k, k)
        return [ids[i : i + k] for i in starts], [scores[i : i + k] for i in starts]

    def _where(self, tensor: Tensor) -> tuple[int, int]:
        """Address and rows."""
        for own, address, rows in self._written:
            if own is tensor:
                return address, rows
        return tensor.data_ptr(), len(tensor)

"""A Llama's weights in the compiled step's layout, and its forward."""

from __future__ import annotations

import contextlib
import ctypes
import math
from array import array
from collections.abc import Iterable
from ctypes import byref, c_size_t, c_void_p

import torch
from torch import Tensor

from minispec.batch import StepBatch
from minispec.kv_cache import KVCache
from minispec.model.int8 import GROUP, BlockInt8Linear, Blocks
from minispec.model.linear import Head, Linear
from minispec.model.llama import Layer, Llama, Taps
from minispec.native.library import BatchStruct, LayerStruct, LinearStruct, ModelStruct, StepStruct, Team
from minispec.native.scratch import Scratch

_HUGE = 2 << 20  # bytes of a huge page
_MADV_HUGEPAGE = 14


def unsupported(model: Llama) -> str | None:
    """Why the compiled step cannot run ``model``; None if it can."""
    config = model.config
    if model.device.type != "cpu":
        return f"the model runs on {model.device.type}"
    if model.dtype != torch.bfloat16:
        return f"it computes in bfloat16, the model in {str(model.dtype).removeprefix('torch.')}"
    if config.head_dim % 16:
        return f"it needs heads of a multiple of 16, the model's have {config.head_dim}"
    linears = [linear for layer in model.layers for linear in _linears(layer)]
    if type(model.head) is not Head or any(type(linear) not in (Linear, BlockInt8Linear) for linear in linears):
        return "the model's weights are in another layout already"
    return None


class Arena:
    """One block of memory for a model's packed weights, on huge pages where the system has them: a product reads a
    weight once from end to end, and with 4 KiB pages waits for translations (a tenth of a step on two cores).
    """

    def __init__(self, linears: Iterable[tuple[Linear, bool]], team: Team) -> None:
        """``linears``: what it is for, and which are gate and up (``PackedLinear.paired``)."""
        sizes = [_packed_size(team, x.out_features, x.in_features, paired, _bits(x)) for x, paired in linears]
        block = torch.empty(sum(_aligned(size) for size in sizes) + _HUGE, dtype=torch.uint8)
        self._block, self._at = block[-block.data_ptr() % _HUGE :], 0
        with contextlib.suppress(AttributeError, OSError):  # a wish: systems may lack it, or refuse
            ctypes.CDLL(None).madvise(c_void_p(self._block.data_ptr()), c_size_t(self._block.nbytes), _MADV_HUGEPAGE)

    def take(self, size: int) -> Tensor:
        """The next ``size`` bytes, uint8."""
        begin = self._at
        self._at += _aligned(size)
        return self._block[begin : begin + size]


def arena_for(model: Llama, team: Team) -> Arena:
    """An arena for all weights of a model."""
    linears = [(linear, linear is layer.gate_up) for layer in model.layers for linear in _linears(layer)]
    return Arena([*linears, (model.head.linear, False)], team)


class PackedLinear(Linear):
    """A Linear in the compiled step's layout: the eager forward and draft heads call it, the step reads it in place.

    Weights are whole numbers there (native/weights.h): of bfloat16 ones, those of at least 1/128 of their output's
    greatest are kept exactly, the rest to 2^-15 of it. ``packed`` is False: the weight is not oneDNN's.
    """

    def __init__(
        self,
        team: Team,
        packer: Team,
        plain: Tensor | Blocks,
        bias: Tensor | None = None,
        *,
        paired: bool = False,
        arena: Arena | None = None,
    ) -> None:
        """Args:
        team: for later calls.
        packer: lays the weight out, now; no other thread may be calling it.
        plain: [out, in] bfloat16, contiguous; or in blocks of 8 bits.
        bias: [out] bfloat16.
        paired: the outputs are gate and up, which the step wants side by side.
        arena: where the packed weight goes; None is memory of its own.
        """
        values, scales = plain if isinstance(plain, Blocks) else (plain, None)
        self.out_features, self.in_features = values.shape
        self.bias = bias
        self.packed = False
        self._team = team
        bits = values.itemsize * 8
        self.struct = LinearStruct(None, pointer(bias), self.in_features, self.out_features, paired, bits)
        size = _packed_size(packer, self.out_features, self.in_features, paired, bits)
        self.weight = torch.empty(size, dtype=torch.uint8) if arena is None else arena.take(size)
        packer.library.pack(
            packer.handle, byref(self.struct), values.data_ptr(), pointer(scales), self.weight.data_ptr()
        )
        self.struct.weight = self.weight.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        return self.apply(x, torch.bfloat16)

    def apply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` [..., in] to [..., out] in ``dtype``, bfloat16 or float32 (the sums as they are)."""
        flat = x.reshape(-1, self.in_features)
        flat = flat if flat.stride(-1) == 1 else flat.contiguous()
        out = torch.empty((flat.shape[0], self.out_features), dtype=dtype)
        if flat.shape[0]:
            self._team.library.linear(
                self._team.handle,
                byref(self.struct),
                flat.data_ptr(),
                flat.stride(0),
                flat.shape[0],
                out.data_ptr(),
                self.out_features,
                dtype == torch.float32,
            )
        return out.view(*x.shape[:-1], self.out_features)

    def unpacked(self, packer: Team) -> Tensor | Blocks:
        """The plain weight, as it is in the layout."""
        int8 = self.struct.bits == 8
        plain = torch.empty((self.out_features, self.in_features), dtype=torch.int8 if int8 else torch.bfloat16)
        groups = -(-self.in_features // GROUP)
        scales = torch.empty((self.out_features, groups), dtype=torch.bfloat16) if int8 else None
        packer.library.unpack(packer.handle, byref(self.struct), plain.data_ptr(), pointer(scales))
        return plain if scales is None else Blocks(plain, scales)


class PackedHead(Head):
    """A Head whose logits are the step's float32 sums: with 16 bits no candidate needs computing again."""

    def __init__(self, team: Team, packer: Team, head: Head, arena: Arena | None = None) -> None:
        self.weight = head.weight
        given = head.linear
        plain = given.blocks if isinstance(given, BlockInt8Linear) else head.weight
        self.linear: PackedLinear = PackedLinear(team, packer, plain, arena=arena)

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.linear.apply(x, torch.float32)
        return logits if self.exact is None or not len(x) else self._rescored(logits, x)

    @property
    def struct(self) -> LinearStruct:
        return self.linear.struct

    @property
    def exact(self) -> Tensor | None:
        """[vocab, hidden] bfloat16: what the best candidates are computed again with; None if they are not."""
        return self.weight if self.struct.bits == 8 else None


def dense(linear: Linear, packer: Team) -> Tensor | Blocks:
    """A Linear's plain weight, [out, in] contiguous."""
    if isinstance(linear, PackedLinear):
        return linear.unpacked(packer)
    if isinstance(linear, BlockInt8Linear):
        return linear.blocks
    weight: Tensor = linear.weight.to_dense() if linear.packed else linear.weight
    return weight.contiguous()


def packed_linear(
    team: Team, packer: Team, linear: Linear, *, paired: bool = False, arena: Arena | None = None
) -> PackedLinear:
    """``linear`` in the step's layout; arguments as in ``PackedLinear``."""
    made = PackedLinear(team, packer, dense(linear, packer), linear.bias, paired=paired, arena=arena)
    made.rows = linear.rows  # for the way back
    return made


def packed_layer(team: Team, packer: Team, layer: Layer, arena: Arena | None = None) -> Layer:
    """``layer`` with its weights in the step's layout."""

    def packed(linear: Linear, *, paired: bool = False) -> PackedLinear:
        return packed_linear(team, packer, linear, paired=paired, arena=arena)

    return Layer(
        input_norm=layer.input_norm,
        qkv=packed(layer.qkv),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o=packed(layer.o),
        post_norm=layer.post_norm,
        gate_up=packed(layer.gate_up, paired=True),
        down=packed(layer.down),
    )


def plain_layer(layer: Layer, packer: Team) -> Layer:
    """The way back; ``packer`` as for ``PackedLinear``."""
    qkv, o, gate_up, down = (_plain(x, packer) for x in _linears(layer))
    return Layer(layer.input_norm, qkv, layer.q_norm, layer.k_norm, o, layer.post_norm, gate_up, down)


class CompiledForward:
    """``Llama.forward`` in one call, for a model whose layers and head are packed. For one thread at a time.

    Attributes:
        team: the threads that run it.
    """

    def __init__(self, team: Team, model: Llama) -> None:
        config = model.config
        self.team, self._model = team, model
        self._logits = Scratch(model.vocab_size, torch.float32)
        self._layers = (LayerStruct * config.num_layers)()
        for struct, layer in zip(self._layers, model.layers, strict=True):
            struct.input_norm, struct.post_norm = layer.input_norm.data_ptr(), layer.post_norm.data_ptr()
            struct.q_norm, struct.k_norm = pointer(layer.q_norm), pointer(layer.k_norm)
            struct.qkv, struct.o = struct_of(layer.qkv), struct_of(layer.o)
            struct.gate_up, struct.down = struct_of(layer.gate_up), struct_of(layer.down)
        assert isinstance(model.head, PackedHead)
        self._struct = ModelStruct(
            config.num_layers, config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads,
            config.head_dim, model.vocab_size, config.sliding_window or 0, config.rms_norm_eps, model.scale,
            self._layers, model.embedding.data_ptr(), model.norm.data_ptr(), model.head.struct,
            pointer(model.head.exact), model.rope.inv_freq.data_ptr(), model.rope.attention_scaling,
        )  # fmt: skip

    def __call__(self, batch: StepBatch, kv: KVCache, *, layers: int | None = None, taps: Taps | None = None) -> Tensor:
        """Arguments and result as in ``Llama.forward``; the logits lie where the next call writes its own."""
        model = self._model
        depth = model.config.num_layers if layers is None else layers
        logits, address = self._logits(batch.samples)
        step = StepStruct(BatchStruct.of(batch), depth, 0, None, None, *kv.place, address)
        if taps is not None:
            # what ``Llama.forward`` would see on the way: not the layers behind the last that runs
            wanted = array("i", [layer for layer in taps.layers if layer <= depth])
            taps.shape = batch.rows, len(wanted), model.config.hidden_size
            taps.memory = tapped = array("H", bytes(2 * math.prod(taps.shape)))
            step.taps, step.tap_layers, step.tapped = len(wanted), wanted.buffer_info()[0], tapped.buffer_info()[0]
        self.team.library.forward(self.team.handle, byref(self._struct), byref(step))
        return logits


def _plain(linear: Linear, packer: Team) -> Linear:
    weight = dense(linear, packer)
    plain = BlockInt8Linear(weight, linear.bias) if isinstance(weight, Blocks) else Linear(weight, linear.bias)
    plain.rows = linear.rows
    return plain


def _linears(layer: Layer) -> tuple[Linear, ...]:
    return layer.qkv, layer.o, layer.gate_up, layer.down


def _bits(linear: Linear) -> int:
    return 8 if isinstance(linear, BlockInt8Linear) else 16


def _packed_size(team: Team, outputs: int, inputs: int, paired: bool, bits: int) -> int:
    """Bytes of a packed weight."""
    size: int = team.library.packed_size(byref(LinearStruct(None, None, inputs, outputs, paired, bits)))
    return size


def _aligned(size: int) -> int:
    """Bytes up to the next cache line."""
    return -(-size // 64) * 64


def struct_of(linear: Linear) -> LinearStruct:
    """Of a packed linear layer."""
    assert isinstance(linear, PackedLinear)
    return linear.struct


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor's data lies; None of none."""
    return None if tensor is None else tensor.data_ptr()

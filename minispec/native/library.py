"""The compiled library through ctypes: its structs and its functions. ctypes lets go of the interpreter lock while a
call runs, so that the HTTP thread works on while a step computes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from minispec.batch import StepBatch


class LinearStruct(ctypes.Structure):
    """A packed weight; see linear.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("paired", c_int32),
        ("bits", c_int32),
    )


class LayerStruct(ctypes.Structure):
    """One decoder layer; see decoder.h."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("qkv", LinearStruct),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("o", LinearStruct),
        ("post_norm", c_void_p),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
    )


class ModelStruct(ctypes.Structure):
    """A model; see decoder.h."""

    _fields_ = (
        ("layers", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("window", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("layer", POINTER(LayerStruct)),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", LinearStruct),
        ("exact", c_void_p),
        ("inv_freq", c_void_p),
        ("rope_scaling", c_float),
    )


class BatchStruct(ctypes.Structure):
    """A StepBatch; see plan.h."""

    _fields_ = (
        ("rows", c_int32),
        ("spans", c_int32),
        ("samples", c_int32),
        ("words", c_int32),
        ("width", c_int32),
        ("page_size", c_int32),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("kv_index", c_void_p),
        ("sample_rows", c_void_p),
        ("row_start", c_void_p),
        ("num_cached", c_void_p),
        ("tree_size", c_void_p),
        ("causal", c_void_p),
        ("ancestors", c_void_p),
        ("page_table", c_void_p),
    )

    @staticmethod
    def of(batch: StepBatch) -> BatchStruct:
        """Pointers into ``batch``, which must outlive them."""
        arrays, spans = batch.arrays, len(batch.spans)
        return BatchStruct(
            len(arrays["tokens"]), spans, len(arrays["sample_rows"]), batch.words,
            len(arrays["page_table"]) // max(spans, 1), batch.page_size,
            *[arrays[name].buffer_info()[0] for name in _ARRAYS],
        )  # fmt: skip


_ARRAYS = [name for name, kind in BatchStruct._fields_ if kind is c_void_p]


class StepStruct(ctypes.Structure):
    """A batch, and what a forward reads and writes besides; see decoder.h."""

    _fields_ = (
        ("batch", BatchStruct),
        ("depth", c_int32),
        ("taps", c_int32),
        ("tap_layers", c_void_p),
        ("tapped", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("layer_stride", c_int64),
        ("head_stride", c_int64),
        ("logits", c_void_p),
    )


class EagleStruct(ctypes.Structure):
    """A draft head; see eagle.h."""

    _fields_ = (
        ("model", ModelStruct),
        ("fc", LinearStruct),
        ("hidden_norm", c_void_p),
        ("version", c_int32),
        ("norm_before_residual", c_int32),
    )


class EagleStepStruct(ctypes.Structure):
    """A forward of a draft head; see eagle.h."""

    _fields_ = (
        ("step", StepStruct),
        ("positions", c_void_p),
        ("hidden", c_void_p),
        ("g", c_void_p),
    )


class DrawsStruct(ctypes.Structure):
    """How rows are drawn; see choose.h."""

    _fields_ = (
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("keys", c_void_p),
        ("names", c_void_p),
        ("noise", POINTER(c_void_p)),
    )


class Library:
    """The functions of a compiled library.

    Args:
        path: the shared object that ``minispec.native.build`` made for this machine.

    Raises:
        OSError: it cannot be loaded.
        AttributeError: it is not ours.
    """

    def __init__(self, path: Path) -> None:
        lib = ctypes.CDLL(str(path))
        self.open = lib.minispec_open
        self.open.argtypes, self.open.restype = [c_int], c_void_p
        self.close = lib.minispec_close
        self.close.argtypes, self.close.restype = [c_void_p], None
        self.packed_size = lib.minispec_packed_size
        self.packed_size.argtypes, self.packed_size.restype = [POINTER(LinearStruct)], c_int64
        self.pack = lib.minispec_pack
        self.pack.argtypes, self.pack.restype = [c_void_p, POINTER(LinearStruct), c_void_p, c_void_p, c_void_p], None
        self.unpack = lib.minispec_unpack
        self.unpack.argtypes, self.unpack.restype = [c_void_p, POINTER(LinearStruct), c_void_p, c_void_p], None
        self.linear = lib.minispec_linear
        self.linear.argtypes = [
            c_void_p, POINTER(LinearStruct), c_void_p, c_int64, c_int, c_void_p, c_int64, c_int
        ]  # fmt: skip
        self.linear.restype = None
        self.forward = lib.minispec_forward
        self.forward.argtypes, self.forward.restype = [c_void_p, POINTER(ModelStruct), POINTER(StepStruct)], None
        self.eagle = lib.minispec_eagle
        self.eagle.argtypes, self.eagle.restype = [c_void_p, POINTER(EagleStruct), POINTER(EagleStepStruct)], None
        self.best = lib.minispec_best
        self.best.argtypes = [c_void_p, c_void_p, c_int, c_int, c_int, c_void_p, c_void_p, c_void_p]
        self.best.restype = None
        self.children = lib.minispec_children
        self.children.argtypes = [
            c_void_p, POINTER(DrawsStruct), c_void_p, c_int, c_int, c_int, c_void_p, c_void_p, c_void_p
        ]  # fmt: skip
        self.children.restype = None
        self.sample = lib.minispec_sample
        self.sample.argtypes = [c_void_p, POINTER(DrawsStruct), c_void_p, c_int, c_int, c_void_p]
        self.sample.restype = None
        self.gumbel = lib.minispec_gumbel
        self.gumbel.argtypes, self.gumbel.restype = [c_void_p, c_void_p, c_int, c_int, c_void_p], None
        self.gumbel_at = lib.minispec_gumbel_at
        self.gumbel_at.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int, c_void_p]
        self.gumbel_at.restype = None
        self.gather = lib.minispec_gather
        self.gather.argtypes, self.gather.restype = [c_void_p, c_void_p, c_int64, c_void_p, c_int64], None
        self.move = lib.minispec_move
        self.move.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64]
        self.move.restype = None


class Team:
    """A team of threads that runs the library's calls, with the working memory they need. One caller at a time:
    another waits.

    Attributes:
        library: whose functions.
        threads: its size, the calling thread included.
        handle: for the library's functions.
    """

    def __init__(self, library: Library, threads: int) -> None:
        self.library, self.threads = library, threads
        self.handle = library.open(threads)

    def __del__(self) -> None:
        self.library.close(self.handle)

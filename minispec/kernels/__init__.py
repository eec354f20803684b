"""The hot operations. Each file holds one: the Triton kernel, its launcher and its torch reference, with one signature.

Callers import from here and get the implementation for this process, chosen once from ``MINISPEC_KERNELS``:
``triton``, ``torch``, or ``auto`` (Triton iff CUDA is available). Tests import both by name.
"""

from __future__ import annotations

import logging
import os

import torch

from minispec.errors import ConfigError
from minispec.kernels import kv_commit as _kv_commit
from minispec.kernels import linear_int8 as _linear_int8
from minispec.kernels import qk_norm as _qk_norm
from minispec.kernels import rms_norm as _rms_norm
from minispec.kernels import rope as _rope
from minispec.kernels import rope_kv_write as _rope_kv_write
from minispec.kernels import sample as _sample
from minispec.kernels import silu_mul as _silu_mul
from minispec.kernels import top_children as _top_children
from minispec.kernels import tree_attention as _tree_attention
from minispec.kernels import verify as _verify
from minispec.kernels.edit_logits import LogitEdits
from minispec.kernels.linear_int8 import quantize_int8
from minispec.kernels.top_children import token_logprobs

CHOICES = ("auto", "triton", "torch")


def _choose() -> str:
    """``triton`` or ``torch``, from ``MINISPEC_KERNELS``."""
    wanted = os.environ.get("MINISPEC_KERNELS", "auto")
    if wanted not in CHOICES:
        raise ConfigError(f"MINISPEC_KERNELS must be one of {', '.join(CHOICES)}, not {wanted!r}; unset it for auto")
    if wanted != "auto":
        chosen, reason = wanted, f"MINISPEC_KERNELS={wanted}"
    elif torch.cuda.is_available():
        chosen, reason = "triton", "CUDA is available"
    else:
        chosen, reason = "torch", "CUDA is not available"
    logging.getLogger(__name__).info("kernels: %s (%s)", chosen, reason)
    return chosen


BACKEND = _choose()
"""The implementation this process runs: ``triton`` or ``torch``."""

_TRITON = BACKEND == "triton"

kv_commit = _kv_commit.kv_commit_triton if _TRITON else _kv_commit.kv_commit_ref
kv_commit_path = _kv_commit.kv_commit_path_triton if _TRITON else _kv_commit.kv_commit_path_ref
linear_int8 = _linear_int8.linear_int8_triton if _TRITON else _linear_int8.linear_int8_ref
qk_norm = _qk_norm.qk_norm_triton if _TRITON else _qk_norm.qk_norm_ref
rms_norm = _rms_norm.rms_norm_triton if _TRITON else _rms_norm.rms_norm_ref
rope = _rope.rope_triton if _TRITON else _rope.rope_ref
rope_kv_write = _rope_kv_write.rope_kv_write_triton if _TRITON else _rope_kv_write.rope_kv_write_ref
sample = _sample.sample_triton if _TRITON else _sample.sample_ref
silu_mul = _silu_mul.silu_mul_triton if _TRITON else _silu_mul.silu_mul_ref
top_children = _top_children.top_children_triton if _TRITON else _top_children.top_children_ref
top_logprobs = _top_children.top_logprobs_triton if _TRITON else _top_children.top_logprobs_ref
tree_attention = _tree_attention.tree_attention_triton if _TRITON else _tree_attention.tree_attention_ref
verify = _verify.verify_triton if _TRITON else _verify.verify_ref

__all__ = [
    "BACKEND",
    "LogitEdits",
    "kv_commit",
    "kv_commit_path",
    "linear_int8",
    "qk_norm",
    "quantize_int8",
    "rms_norm",
    "rope",
    "rope_kv_write",
    "sample",
    "silu_mul",
    "token_logprobs",
    "top_children",
    "top_logprobs",
    "tree_attention",
    "verify",
]

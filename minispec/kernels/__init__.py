"""The hot operations. Each file holds one: the Triton kernel, its launcher and its torch reference, with one signature.

Callers import from here and get the implementation for this process, chosen once from ``MINISPEC_KERNELS``:
``triton``, ``torch``, or ``auto`` (Triton iff CUDA is available). Tests import both by name.
"""

from __future__ import annotations

import logging
import os

import torch

from minispec.errors import ConfigError
from minispec.kernels.kv_commit import kv_commit_ref
from minispec.kernels.rms_norm import rms_norm_ref
from minispec.kernels.rope_kv_write import rope_kv_write_ref
from minispec.kernels.sample import sample_ref
from minispec.kernels.silu_mul import silu_mul_ref
from minispec.kernels.tree_attention import tree_attention_ref

kv_commit = kv_commit_ref
rms_norm = rms_norm_ref
rope_kv_write = rope_kv_write_ref
sample = sample_ref
silu_mul = silu_mul_ref
tree_attention = tree_attention_ref

__all__ = ["kv_commit", "rms_norm", "rope_kv_write", "sample", "silu_mul", "tree_attention"]

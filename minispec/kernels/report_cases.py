"""The shapes the kernels are compiled for: every dtype and head size they claim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from minispec.batch import Span, StepBatch
from minispec.kernels.edit_logits import LogitEdits, edit_logits_triton
from minispec.kernels.kv_commit import kv_commit_path_triton, kv_commit_triton
from minispec.kernels.linear_int8 import linear_int8_triton
from minispec.kernels.qk_norm import qk_norm_triton
from minispec.kernels.rms_norm import rms_norm_triton
from minispec.kernels.rope import rope_triton
from minispec.kernels.rope_kv_write import rope_kv_write_triton
from minispec.kernels.sample import sample_triton
from minispec.kernels.silu_mul import silu_mul_triton
from minispec.kernels.top_children import top_children_triton, top_logprobs_triton
from minispec.kernels.tree_attention import tree_attention_triton
from minispec.kernels.verify import verify_triton
from minispec.sampling import Noise, SamplingBatch

Case = tuple[str, Callable[[], object]]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_VOCAB = 128256
_POSITIONS = 4096


def cases(*, quick: bool) -> Iterator[Case]:
    """Named calls of launchers on tensors without storage, in an 8B Llama's shapes.

    Args:
        quick: a representative subset.
    """
    dtypes = [torch.bfloat16] if quick else list(_NAMES)
    yield from _attention(quick)
    for dtype in dtypes:
        name = _NAMES[dtype]
        for head_dim in (80,) if quick else (64, 80, 96, 128, 256):
            yield f"rope_kv_write {name} d={head_dim}", partial(_rope_kv_write, dtype, head_dim)
            yield f"rope {name} d={head_dim}", partial(_rope, dtype, head_dim)
            yield f"qk_norm {name} d={head_dim}", partial(_qk_norm, dtype, head_dim)
            yield f"kv_commit {name} d={head_dim}", partial(_kv_commit, dtype, head_dim)
        for dim in (4096,) if quick else (576, 4096, 16384):
            yield f"rms_norm {name} dim={dim}", partial(_rms_norm, dtype, dim)
        yield f"silu_mul {name}", partial(silu_mul_triton, _empty(8, 28672, dtype=dtype))
        for rows in (1,) if quick else (1, 32, 64):
            yield f"linear_int8 {name} rows={rows}", partial(_linear_int8, dtype, rows)
    for kind in ("truncated",) if quick else ("greedy", "plain", "truncated"):
        yield f"sample {kind}", partial(_sample, kind)
        for k in (8,) if quick else (1, 8, 32):
            yield f"top_children {kind} k={k}", partial(_top_children, kind, k)
    yield "top_logprobs bf16 k=20", partial(top_logprobs_triton, _empty(8, _VOCAB, dtype=torch.bfloat16), 20)
    yield "edit_logits", _edit_logits
    yield "verify", _verify


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _step(rows: int, window: int | None = None) -> StepBatch:
    page_size = 32
    span = Span.chunk(range(rows), range(_POSITIONS // page_size), 2048, sample_last=True)
    return StepBatch.build([span], page_size, "meta", window)


def _attention(quick: bool) -> Iterator[Case]:
    combinations = [
        (dtype, head_dim, rows, window, splits)
        for dtype in _NAMES
        for head_dim in (64, 80, 96, 128, 256)
        # block sizes 16, 32 and the largest
        for rows, window, splits in ((1, None, 8), (8, 1024, 1), (512, None, 1))
    ]
    if quick:
        combinations = [
            (torch.bfloat16, 128, 1, None, 8),
            (torch.bfloat16, 128, 512, None, 1),
            (torch.float16, 80, 8, 1024, 1),
            (torch.float32, 256, 8, None, 1),
        ]
    for dtype, head_dim, rows, window, splits in combinations:
        name = f"tree_attention {_NAMES[dtype]} d={head_dim} rows={rows}"
        name += (f" window={window}" if window else "") + (f" splits={splits}" if splits > 1 else "")
        yield name, partial(_attend, dtype, head_dim, rows, window, splits)


def _attend(dtype: torch.dtype, head_dim: int, rows: int, window: int | None, splits: int) -> None:
    q = _empty(rows, 32, head_dim, dtype=dtype)
    cache = _empty(8, _POSITIONS, head_dim, dtype=dtype)
    tree_attention_triton(q, cache, cache, _step(rows, window), head_dim**-0.5, splits=splits)


def _rope_kv_write(dtype: torch.dtype, head_dim: int) -> None:
    q, k = _empty(8, 32, head_dim, dtype=dtype), _empty(8, 8, head_dim, dtype=dtype)
    cos = _empty(8, head_dim // 2)
    cache = _empty(8, _POSITIONS, head_dim, dtype=dtype)
    rope_kv_write_triton(q, k, k, cos, cos, cache, cache, _step(8))


def _rope(dtype: torch.dtype, head_dim: int) -> None:
    cos = _empty(8, head_dim // 2)
    rope_triton(_empty(8, 32, head_dim, dtype=dtype), cos, cos)


def _qk_norm(dtype: torch.dtype, head_dim: int) -> None:
    weight = _empty(head_dim, dtype=dtype)
    q, k = _empty(8, 32, head_dim, dtype=dtype), _empty(8, 8, head_dim, dtype=dtype)
    qk_norm_triton(q, k, weight, weight, 1e-6)


def _kv_commit(dtype: torch.dtype, head_dim: int) -> None:
    cache = _empty(32, 8, _POSITIONS, head_dim, dtype=dtype)
    kv_commit_triton(cache, cache, range(1, 1001), range(1000))
    path, num_cached = _empty(8, 16, dtype=torch.int32), _empty(8, dtype=torch.int32)
    kv_commit_path_triton(cache, cache, path, num_cached, _empty(8, 16, dtype=torch.int32), 32)


def _rms_norm(dtype: torch.dtype, dim: int) -> None:
    x, weight = _empty(8, dim, dtype=dtype), _empty(dim, dtype=dtype)
    rms_norm_triton(x, weight, 1e-5)
    rms_norm_triton(x, weight, 1e-5, x)


def _linear_int8(dtype: torch.dtype, rows: int) -> None:
    x, bias = _empty(rows, 4096, dtype=dtype), _empty(6144, dtype=dtype)
    linear_int8_triton(x, _empty(6144, 4096, dtype=torch.int8), _empty(6144), bias)


def _sampling(kind: str) -> SamplingBatch:
    return SamplingBatch.of(
        temperature=[0.0 if kind == "greedy" else 0.8] * 8,
        top_k=[50 if kind == "truncated" else 0] * 8,
        top_p=[1.0] * 8,
        min_p=[0.0] * 8,
        keys=[(0, 0)] * 8,
        device="meta",
    )


def _sample(kind: str) -> None:
    sample_triton(_empty(8, _VOCAB), _sampling(kind), Noise(_VOCAB))


def _top_children(kind: str, k: int) -> None:
    top_children_triton(_empty(8, _VOCAB), _sampling(kind), Noise(_VOCAB), k)


def _edit_logits() -> None:
    per_slot, index = _empty(8), _empty(8, dtype=torch.int64)
    edits = LogitEdits(
        rows=index,
        slot=index,
        path=_empty(8, 16, dtype=torch.int64),
        tokens=_empty(8, 1000, dtype=torch.int64),
        counts=_empty(8, 1000, dtype=torch.int32),
        prompt=_empty(8, 1000, dtype=torch.bool),
        bias=_empty(8, 1000),
        repetition=per_slot,
        frequency=per_slot,
        presence=per_slot,
        banned=_empty(8, 2, dtype=torch.int64),
        allowed=_empty(8, _VOCAB // 32, dtype=torch.int32),
    )
    edit_logits_triton(_empty(8, _VOCAB), edits)


def _verify() -> None:
    index, tokens = _empty(64, dtype=torch.int32), _empty(64, dtype=torch.int64)
    verify_triton(tokens, index, tokens, _empty(9, dtype=torch.int32), 16)

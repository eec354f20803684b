"""The kernels' problems for ``minispec.bench.device``: what to run, how to check it, how many bytes it has to move."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minispec import kernels
from minispec.batch import Span, StepBatch
from minispec.kernels.edit_logits import LogitEdits
from minispec.kernels.kv_commit import kv_commit_path_ref, kv_commit_ref
from minispec.kernels.linear_int8 import linear_int8_ref
from minispec.kernels.qk_norm import qk_norm_ref
from minispec.kernels.rms_norm import rms_norm_ref
from minispec.kernels.rope import rope_ref
from minispec.kernels.rope_kv_write import rope_kv_write_ref
from minispec.kernels.sample import sample_ref
from minispec.kernels.silu_mul import silu_mul_ref
from minispec.kernels.top_children import top_children_ref, top_logprobs_ref
from minispec.kernels.tree_attention import tree_attention_ref
from minispec.kernels.verify import verify_ref
from minispec.sampling import Noise, SamplingBatch
from minispec.tree import DraftTree


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model's parts, and of the steps to try.

    Attributes:
        attention: (spans, nodes each, context) of trees.
        prefill: rows of a causal chunk without a prefix.
        rows: of the operations between the linear layers.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    page_size: int
    attention: tuple[tuple[int, int, int], ...]
    prefill: int
    rows: tuple[int, ...]


LLAMA_8B = Shapes(
    hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, layers=32, vocab=128256, page_size=32,
    attention=(
        (1, 1, 1024), (1, 1, 8192), (8, 1, 8192), (32, 1, 1024), (1, 16, 8192), (1, 64, 1024), (1, 64, 8192),
        (8, 64, 8192), (32, 16, 1024),
    ),
    prefill=2048,
    rows=(1, 64),
)  # fmt: skip
SMALL = Shapes(
    hidden=64, intermediate=96, heads=6, kv_heads=2, head_dim=16, layers=2, vocab=5000, page_size=16,
    attention=((1, 1, 40), (3, 5, 33)),
    prefill=24,
    rows=(3,),
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One operation on given data.

    Attributes:
        run: this process's implementation.
        deviation: its largest error as a share of what is allowed; up to 1 passes.
        bytes: what it has to read and write.
        flops: 0 where they do not matter.
        rivals: the same, or more work, by torch.
    """

    run: Callable[[], object]
    deviation: Callable[[], float]
    bytes: int
    flops: int = 0
    rivals: dict[str, Callable[[], object]] = field(default_factory=dict)


Case = tuple[str, Callable[[], Problem]]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# four units in the last place of the values' size: two roundings, with room for the order of sums
_TOLERANCE = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 1e-4}


def cases(shapes: Shapes, dtypes: Sequence[torch.dtype], device: torch.device) -> Iterator[Case]:
    """Named problems; each makes its data when called."""
    for dtype in dtypes:
        name = _NAMES[dtype]
        for spans, nodes, context in shapes.attention:
            label = f"tree_attention {name} {spans}x{nodes} nodes, {context} keys"
            yield label, partial(_attention, shapes, dtype, device, spans, nodes, context)
        yield f"tree_attention {name} causal {shapes.prefill}", partial(_prefill, shapes, dtype, device)
        for rows in shapes.rows:
            for operation in (_rms_norm, _qk_norm, _rope, _rope_kv_write, _silu_mul, _linear_int8):
                yield f"{operation.__name__[1:]} {name} rows={rows}", partial(operation, shapes, dtype, device, rows)
        yield f"kv_commit {name}", partial(_kv_commit, shapes, dtype, device)
        yield f"kv_commit_path {name}", partial(_kv_commit_path, shapes, dtype, device)
    for rows in shapes.rows:
        for kind in ("greedy", "plain", "truncated", "edited"):
            yield f"sample {kind} rows={rows}", partial(_sample, shapes, device, rows, kind)
        for kind in ("greedy", "truncated"):
            yield f"top_children {kind} rows={rows}", partial(_top_children, shapes, device, rows, kind)
        yield f"top_logprobs rows={rows}", partial(_top_logprobs, shapes, device, rows)
    yield "verify", partial(_verify, shapes, device)


def deviation(got: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    """Largest error, relative to the tolerance times the size of the entry and of a typical one."""
    want = want.double()
    allowed = _TOLERANCE[dtype] * (want.abs() + want.pow(2).mean().sqrt())
    worst = ((got.double() - want).abs() / allowed).nan_to_num(nan=float("inf"), posinf=float("inf")).amax()
    return float(worst)


def differing(got: Tensor, want: Tensor, share: float = 0.0) -> float:
    """For token ids: how many differ, relative to the ``share`` that near-ties may."""
    different = float((got != want).float().mean())
    return different / share if share else float("inf") if different else 0.0


def spread_pages(count: int, each: int) -> list[list[int]]:
    """Pages of ``count`` slots of ``each`` pages, scattered over the cache."""
    pages = random.Random(0).sample(range(count * each), count * each)
    return [pages[i * each : (i + 1) * each] for i in range(count)]


def binary_tree(nodes: int, vocab: int = 1000) -> DraftTree:
    """Every node has two children, as far as they go."""
    return DraftTree(
        tuple(7 * i % vocab for i in range(nodes)), (-1, *((i - 1) // 2 for i in range(1, nodes))), (0.0,) * nodes
    )


def _attention(s: Shapes, dtype: torch.dtype, device: torch.device, spans: int, nodes: int, context: int) -> Problem:
    tree = binary_tree(nodes)
    pages = spread_pages(spans, -(-(context + nodes) // s.page_size))
    return _attend(s, dtype, device, [Span.tree(tree, own, context) for own in pages])


def _prefill(s: Shapes, dtype: torch.dtype, device: torch.device) -> Problem:
    [pages] = spread_pages(1, -(-s.prefill // s.page_size))
    return _attend(s, dtype, device, [Span.chunk([0] * s.prefill, pages, 0, sample_last=True)])


def _attend(s: Shapes, dtype: torch.dtype, device: torch.device, spans: list[Span]) -> Problem:
    batch = StepBatch.build(spans, s.page_size, device)
    first = spans[0]
    n, keys = len(first.tokens), first.num_cached + first.tree_size
    q = torch.randn(n * len(spans), s.heads, s.head_dim, device=device, dtype=dtype)
    positions = len(spans) * len(first.pages) * s.page_size
    k, v = (torch.randn(s.kv_heads, positions, s.head_dim, device=device, dtype=dtype) for _ in range(2))
    scale = s.head_dim**-0.5

    def run() -> Tensor:
        return kernels.tree_attention(q, k, v, batch, scale)

    # torch's attention on a causal problem of the same size, its keys in place
    folded = q.view(len(spans), n, s.heads, s.head_dim).transpose(1, 2)
    dense = [torch.randn(len(spans), s.kv_heads, keys, s.head_dim, device=device, dtype=dtype) for _ in range(2)]
    group = s.heads // s.kv_heads
    keys_of, values_of = dense

    def grouped() -> Tensor:
        return F.scaled_dot_product_attention(
            folded, keys_of, values_of, is_causal=n == keys, scale=scale, enable_gqa=True
        )

    rivals: dict[str, Callable[[], object]] = {"sdpa": grouped}
    if 1 < n < keys:
        from torch.nn.attention.bias import causal_lower_right

        k_repeated, v_repeated = (part.repeat_interleave(group, 1) for part in dense)
        mask = causal_lower_right(n, keys)
        rivals["sdpa causal"] = lambda: F.scaled_dot_product_attention(
            folded, k_repeated, v_repeated, attn_mask=mask, scale=scale
        )
    pairs = n * keys - (n * (n - 1) // 2 if first.ancestors is None else 0)
    return Problem(
        run,
        lambda: deviation(run(), tree_attention_ref(q.double(), k.double(), v.double(), batch, scale), dtype),
        bytes=len(spans) * 2 * keys * s.kv_heads * s.head_dim * dtype.itemsize + 2 * q.nbytes,
        flops=4 * len(spans) * s.heads * s.head_dim * pairs,
        rivals=rivals,
    )


def _rms_norm(s: Shapes, dtype: torch.dtype, device: torch.device, rows: int) -> Problem:
    x, residual = (torch.randn(rows, s.hidden, device=device, dtype=dtype) for _ in range(2))
    weight = torch.rand(s.hidden, device=device, dtype=dtype) + 0.5

    def check() -> float:
        pairs = zip(
            kernels.rms_norm(x, weight, 1e-5, residual),
            rms_norm_ref(x.double(), weight.double(), 1e-5, residual.double()),
            strict=True,
        )
        return max(deviation(got, want, dtype) for got, want in pairs)

    return Problem(lambda: kernels.rms_norm(x, weight, 1e-5, residual), check, 4 * x.nbytes + weight.nbytes)


def _qk_norm(s: Shapes, dtype: torch.dtype, device: torch.device, rows: int) -> Problem:
    q, k, _ = _qkv(s, dtype, device, rows)
    weight = torch.rand(s.head_dim, device=device, dtype=dtype) + 0.5

    def check() -> float:
        wide = q.double(), k.double(), weight.double(), weight.double()
        pairs = zip(kernels.qk_norm(q, k, weight, weight, 1e-6), qk_norm_ref(*wide, 1e-6), strict=True)
        return max(deviation(got, want, dtype) for got, want in pairs)

    return Problem(
        lambda: kernels.qk_norm(q, k, weight, weight, 1e-6), check, 2 * (q.numel() + k.numel()) * dtype.itemsize
    )


def _rope(s: Shapes, dtype: torch.dtype, device: torch.device, rows: int) -> Problem:
    q, _, _ = _qkv(s, dtype, device, rows)
    angle = torch.rand(rows, s.head_dim // 2, device=device) * 6
    cos, sin = angle.cos(), angle.sin()
    return Problem(
        lambda: kernels.rope(q, cos, sin),
        lambda: deviation(kernels.rope(q, cos, sin), rope_ref(q.double(), cos, sin), dtype),
        2 * q.numel() * dtype.itemsize + 2 * cos.nbytes,
    )


def _rope_kv_write(s: Shapes, dtype: torch.dtype, device: torch.device, rows: int) -> Problem:
    q, k, v = _qkv(s, dtype, device, rows)
    angle = torch.rand(rows, s.head_dim // 2, device=device) * 6
    cos, sin = angle.cos(), angle.sin()
    [pages] = spread_pages(1, -(-rows // s.page_size) + 1)
    batch = StepBatch.build([Span.chunk([0] * rows, pages, 1, sample_last=True)], s.page_size, device)
    caches = [
        torch.zeros(s.kv_heads, len(pages) * s.page_size, s.head_dim, device=device, dtype=dtype) for _ in range(2)
    ]

    def check() -> float:
        wide = [cache.double() for cache in caches]
        want = rope_kv_write_ref(q.double(), k.double(), v.double(), cos, sin, wide[0], wide[1], batch)
        got = kernels.rope_kv_write(q, k, v, cos, sin, caches[0], caches[1], batch)
        return max(deviation(a, b, dtype) for a, b in zip((got, *caches), (want, *wide), strict=True))

    return Problem(
        lambda: kernels.rope_kv_write(q, k, v, cos, sin, caches[0], caches[1], batch),
        check,
        2 * (q.numel() + 2 * k.numel()) * dtype.itemsize + 2 * cos.nbytes,
    )


def _qkv(s: Shapes, dtype: torch.dtype, device: torch.device, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views into one fused projection, as the model has them."""
    widths = [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim]
    fused = torch.randn(rows, sum(widths), device=device, dtype=dtype)
    q, k, v = (part.view(rows, -1, s.head_dim) for part in fused.split(widths, dim=-1))
    return q, k, v


def _silu_mul(s: Shapes, dtype: torch.dtype, device: torch.device, rows: int) -> Problem:
    x = torch.randn(rows, 2 * s.intermediate, device=device, dtype=dtype)
    return Problem(
        lambda: kernels.silu_mul(x),
        lambda: deviation(kernels.silu_mul(x), silu_mul_ref(x.double()), dtype),
        x.nbytes * 3 // 2,
    )


def _linear_int8(s: Shapes, dtype: torch.dtype, device: torch.device, rows: int) -> Problem:
    x = torch.randn(rows, s.hidden, device=device, dtype=dtype)
    weight = torch.randn(2 * s.intermediate, s.hidden, device=device, dtype=dtype) * 0.02
    q, scale = kernels.quantize_int8(weight)
    return Problem(
        lambda: kernels.linear_int8(x, q, scale),
        lambda: deviation(kernels.linear_int8(x, q, scale), linear_int8_ref(x.float(), q, scale), dtype),
        q.nbytes + x.nbytes + 2 * rows * s.intermediate * dtype.itemsize,
        rivals={"unquantised": lambda: F.linear(x, weight)},
    )


def _kv_commit(s: Shapes, dtype: torch.dtype, device: torch.device) -> Problem:
    k, v = (torch.randn(s.layers, s.kv_heads, 256, s.head_dim, device=device, dtype=dtype) for _ in range(2))
    source, target = [40, 41, 57, 90, 12, 200], [11, 12, 41, 40, 13, 14]  # some targets are others' sources

    def check() -> float:
        want = k.clone(), v.clone()
        kv_commit_ref(*want, source, target)
        kernels.kv_commit(k, v, source, target)
        return max(differing(k, want[0]), differing(v, want[1]))

    moved = 4 * len(source) * s.layers * s.kv_heads * s.head_dim * dtype.itemsize
    return Problem(lambda: kernels.kv_commit(k, v, source, target), check, moved)


def _kv_commit_path(s: Shapes, dtype: torch.dtype, device: torch.device) -> Problem:
    slots, pages = 4, 6
    size = s.layers, s.kv_heads, slots * pages * s.page_size, s.head_dim
    k, v = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    path = torch.tensor([[0, 2, 5, 9, -1], [0, 1, 2, 3, 4], [0, 30, 31, 32, 40], [-1] * 5], dtype=torch.int32)
    num_cached = torch.tensor([s.page_size - 2, 0, s.page_size - 1, 3], dtype=torch.int32)
    table = torch.tensor(spread_pages(slots, pages), dtype=torch.int32)
    path, num_cached, table = path.to(device), num_cached.to(device), table.to(device)

    def check() -> float:
        want = k.clone(), v.clone()
        kv_commit_path_ref(*want, path, num_cached, table, s.page_size)
        kernels.kv_commit_path(k, v, path, num_cached, table, s.page_size)
        return max(differing(k, want[0]), differing(v, want[1]))

    moved = 4 * 7 * s.layers * s.kv_heads * s.head_dim * dtype.itemsize
    return Problem(lambda: kernels.kv_commit_path(k, v, path, num_cached, table, s.page_size), check, moved)


def _sampling(rows: int, kind: str, device: torch.device) -> SamplingBatch:
    top_k = [(0, 50, 3)[i % 3] if kind == "truncated" else 0 for i in range(rows)]
    top_p = [(0.9, 0.5, 1.0)[i % 3] if kind == "truncated" else 1.0 for i in range(rows)]
    return SamplingBatch.of(
        temperature=[0.0 if kind == "greedy" else 0.8] * rows,
        top_k=top_k,
        top_p=top_p,
        min_p=[0.01 if kind == "truncated" else 0.0] * rows,
        keys=[(i // 4, 100 + i) for i in range(rows)],
        device=device,
    )


def _sample(s: Shapes, device: torch.device, rows: int, kind: str) -> Problem:
    logits = torch.randn(rows, s.vocab, device=device) * 3
    sampling, noise = _sampling(rows, kind, device), Noise(s.vocab, device)
    edits = _edits(s, device, rows) if kind == "edited" else None
    passes = 1 if kind != "edited" else 5  # edited logits are copied, masked, put back and read again
    return Problem(
        lambda: kernels.sample(logits, sampling, noise, edits),
        lambda: differing(
            kernels.sample(logits, sampling, noise, edits), sample_ref(logits, sampling, noise, edits), 0.02
        ),
        passes * logits.nbytes,
    )


def _edits(s: Shapes, device: torch.device, rows: int) -> LogitEdits:
    per_slot, touched = torch.ones(1, device=device), min(1000, s.vocab)
    return LogitEdits(
        rows=torch.arange(rows, device=device),
        slot=torch.zeros(rows, dtype=torch.int64, device=device),
        path=torch.randint(-1, s.vocab, (rows, 8), device=device),
        tokens=torch.randperm(s.vocab, device=device)[None, :touched],
        counts=torch.randint(0, 3, (1, touched), dtype=torch.int32, device=device),
        prompt=torch.rand(1, touched, device=device) < 0.1,
        bias=torch.randn(1, touched, device=device),
        repetition=per_slot * 1.2,
        frequency=per_slot * 0.3,
        presence=per_slot * 0.1,
        banned=torch.tensor([[0, 7]], device=device),
        allowed=torch.randint(-(2**31), 2**31, (rows, -(-s.vocab // 32)), dtype=torch.int64, device=device).int(),
    )


def _top_children(s: Shapes, device: torch.device, rows: int, kind: str) -> Problem:
    logits = torch.randn(rows, s.vocab, device=device) * 3
    sampling, noise = _sampling(rows, kind, device), Noise(s.vocab, device)

    def check() -> float:
        tokens, values = kernels.top_children(logits, sampling, noise, 4)
        want_tokens, want = top_children_ref(logits, sampling, noise, 4)
        drawable = want > float("-inf")  # which tokens stand for "none" is nobody's business
        values, want = values[drawable], want[drawable]
        ids = differing(tokens[drawable], want_tokens[drawable], 0.02)
        return max(ids, deviation(values, want, torch.float32))

    return Problem(lambda: kernels.top_children(logits, sampling, noise, 4), check, logits.nbytes)


def _top_logprobs(s: Shapes, device: torch.device, rows: int) -> Problem:
    logits = torch.randn(rows, s.vocab, device=device) * 3

    def check() -> float:
        (tokens, values), (want_tokens, want) = kernels.top_logprobs(logits, 20), top_logprobs_ref(logits, 20)
        return max(differing(tokens, want_tokens, 0.02), deviation(values, want, torch.float32))

    return Problem(lambda: kernels.top_logprobs(logits, 20), check, logits.nbytes)


def _verify(s: Shapes, device: torch.device) -> Problem:
    trees = [binary_tree(nodes) for nodes in (1, 2, 63, 64, 17)]
    rng = random.Random(0)
    tokens = [token for tree in trees for token in tree.tokens]
    samples = [rng.choice([*children, -5]) for tree in trees for children in tree.children]
    starts = [sum(map(len, trees[:i])) for i in range(len(trees) + 1)]
    data = (
        torch.tensor(tokens, device=device),
        torch.tensor([parent for tree in trees for parent in tree.parents], dtype=torch.int32, device=device),
        torch.tensor(samples, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
    )

    def check() -> float:
        pairs = zip(kernels.verify(*data, 16), verify_ref(*data, 16), strict=True)
        return max(differing(got, want) for got, want in pairs)

    return Problem(lambda: kernels.verify(*data, 16), check, 20 * len(tokens))

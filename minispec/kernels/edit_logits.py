"""Changes to the logits of each node before sampling: penalties, bias, grammar.

    c = times the token occurs in the slot's output and on the node's own path
    x = x / repetition if x > 0 else x * repetition      where c > 0 or the prompt has the token
    x = x - frequency * c - presence * (c > 0) + bias
    x = -inf                                             where the node's grammar mask does not allow the token

Repetition penalty: Keskar et al. 2019, arXiv 1909.05858; the others as in OpenAI's API.

Roofline for n rows: 8 n vocab bytes for reading and writing the logits, up to 9 n vocab more for counts, prompt and
bias; bound by memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minispec.kernels._triton import cdiv, jit

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True)
class LogitEdits:
    """What to change; None is off.

    Attributes:
        slot: [rows] int64, row of each node in the tables that have one row per slot.
        path: [rows, depth] int64, the draft tokens from below the root to the node, padded with -1.
        counts: [slots, vocab] int32, times each token occurs in the committed output. None turns all penalties off.
        prompt: [slots, vocab] bool, which tokens the prompt has.
        repetition, frequency, presence: [slots] float32; 1, 0 and 0 are off.
        bias: [slots, vocab] float32.
        allowed: [rows, words] int32 bit masks: bit ``t % 32`` of word ``t // 32`` says whether token t may follow.
    """

    slot: Tensor
    path: Tensor
    counts: Tensor | None = None
    prompt: Tensor | None = None
    repetition: Tensor | None = None
    frequency: Tensor | None = None
    presence: Tensor | None = None
    bias: Tensor | None = None
    allowed: Tensor | None = None

    def __post_init__(self) -> None:
        penalties = (self.counts, self.prompt, self.repetition, self.frequency, self.presence)
        if len({p is None for p in penalties}) != 1:
            raise ValueError("counts, prompt, repetition, frequency and presence come together or not at all")


def edit_logits_ref(logits: Tensor, edits: LogitEdits) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        logits: [rows, vocab] float32.
        edits: what to change.

    Returns:
        [rows, vocab] float32, new.
    """
    x = logits.float()
    if edits.counts is not None:
        assert edits.prompt is not None and edits.repetition is not None
        assert edits.frequency is not None and edits.presence is not None
        counts = edits.counts[edits.slot].float()
        counts.scatter_add_(1, edits.path.clamp(min=0), (edits.path >= 0).float())
        repetition, frequency, presence = (
            t[edits.slot][:, None] for t in (edits.repetition, edits.frequency, edits.presence)
        )
        penalised = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where((counts > 0) | edits.prompt[edits.slot], penalised, x)
        x = x - frequency * counts - presence * (counts > 0)
    if edits.bias is not None:
        x = x + edits.bias[edits.slot]
    if edits.allowed is not None:
        token = torch.arange(x.shape[-1], device=x.device)
        x = x.masked_fill((edits.allowed[:, token // 32] >> (token % 32)) & 1 == 0, float("-inf"))
    return x if x is not logits else logits.clone()


_BLOCK = 1024


def edit_logits_triton(logits: Tensor, edits: LogitEdits) -> Tensor:
    """Triton launcher; arguments as in the reference."""
    rows, vocab = logits.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    if rows == 0:
        return out

    def given(table: Tensor | None) -> Tensor:
        return out if table is None else table  # a place holder that the kernel does not touch

    _edit_logits_kernel[(rows, cdiv(vocab, _BLOCK))](
        logits, out, edits.slot, edits.path, given(edits.counts), given(edits.prompt), given(edits.repetition),
        given(edits.frequency), given(edits.presence), given(edits.bias), given(edits.allowed),
        vocab, logits.stride(0), edits.path.shape[1], 0 if edits.allowed is None else edits.allowed.shape[1],
        PENALTIES=edits.counts is not None, BIAS=edits.bias is not None, GRAMMAR=edits.allowed is not None,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@jit
def _edit_logits_kernel(
    logits: tl.tensor,
    out: tl.tensor,
    slots: tl.tensor,
    path: tl.tensor,
    counts: tl.tensor,
    prompt: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    bias: tl.tensor,
    allowed: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    depth: tl.tensor,
    words: tl.tensor,
    PENALTIES: tl.constexpr,
    BIAS: tl.constexpr,
    GRAMMAR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK tokens of one row. Shapes as in LogitEdits; logits, out [rows, vocab]."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    slot = tl.load(slots + row)
    table = slot * vocab + token
    x = tl.load(logits + row * stride + token, mask=inside, other=0.0).to(tl.float32)
    if PENALTIES:
        c = tl.load(counts + table, mask=inside, other=0)
        for i in range(depth):
            c += (token == tl.load(path + row * depth + i)).to(tl.int32)
        r = tl.load(repetition + slot)
        in_prompt = tl.load(prompt + table, mask=inside, other=0).to(tl.int32)
        x = tl.where(c + in_prompt > 0, tl.where(x > 0, x / r, x * r), x)
        x -= tl.load(frequency + slot) * c.to(tl.float32)
        x -= tl.where(c > 0, tl.load(presence + slot), 0.0)
    if BIAS:
        x += tl.load(bias + table, mask=inside, other=0.0)
    if GRAMMAR:
        word = tl.load(allowed + row * words + token // 32, mask=inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
    tl.store(out + row * vocab + token, x, mask=inside)

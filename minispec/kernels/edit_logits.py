"""Changes to the logits of each node before sampling: penalties, bias, grammar.

    c = times the token occurs in the slot's output and on the node's own path
    x = x / repetition if x > 0 else x * repetition      where c > 0 or the prompt has the token
    x = x - frequency * c - presence * (c > 0) + bias
    x = -inf                                             where the token is banned, or the node's grammar forbids it

Repetition penalty: Keskar et al. 2019, arXiv 1909.05858; the others as in OpenAI's API.

Only the tokens that occur or have a bias are looked at, but for a grammar's. Roofline for n edited rows: 8 n vocab
bytes for a copy of their logits, 8 more with a grammar; the touched tokens are few beside that. Bound by memory.
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
    """What to change in which rows.

    Attributes:
        rows: [edited] int64, the rows of the logits that change; those with a grammar first.
        slot: [edited] int64, each one's row in the tables that have one row per slot.
        path: [edited, depth] int64, the draft tokens from below the root to the node, padded with -1.
        tokens: [slots, width] int64, the tokens touched: each slot's own, then the first of them again and again. A
            slot without any has token 0, with nothing in the other tables.
        counts: [slots, width] int32, times each occurs in the committed output.
        prompt: [slots, width] bool, whether the prompt has it, as far as the repetition penalty is concerned.
        bias: [slots, width] float32.
        repetition, frequency, presence: [slots] float32; 1, 0 and 0 are off.
        banned: [bans, 2] int64: index in ``rows``, and a token it may not draw.
        allowed: [constrained, words] int32 bit masks of the first so many of ``rows``: bit ``t % 32`` of word
            ``t // 32`` says whether token t may follow. None without a grammar.
    """

    rows: Tensor
    slot: Tensor
    path: Tensor
    tokens: Tensor
    counts: Tensor
    prompt: Tensor
    bias: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    banned: Tensor
    allowed: Tensor | None = None


def edit_logits_ref(logits: Tensor, edits: LogitEdits) -> Tensor:
    """Torch reference, and the path of a CPU.

    Args:
        logits: [rows, vocab] float32; not changed.
        edits: what to change.

    Returns:
        [edited, vocab] float32: the rows ``edits.rows`` after the changes.
    """
    x = logits[edits.rows]
    if edits.tokens.shape[1]:
        tokens, counts = edits.tokens[edits.slot], edits.counts[edits.slot]
        for token in edits.path.unbind(1):
            counts += tokens == token[:, None]
        repetition, frequency, presence = (
            table[edits.slot][:, None] for table in (edits.repetition, edits.frequency, edits.presence)
        )
        y = x.gather(1, tokens)
        penalised = torch.where(y > 0, y / repetition, y * repetition)
        y = torch.where((counts > 0) | edits.prompt[edits.slot], penalised, y)
        y = y - frequency * counts - presence * (counts > 0) + edits.bias[edits.slot]
        x.scatter_(1, tokens, y)  # what stands there several times is the same each time
    if edits.allowed is not None:
        x[: len(edits.allowed)].masked_fill_(forbidden(edits.allowed, x.shape[1]), float("-inf"))
    x[edits.banned[:, 0], edits.banned[:, 1]] = float("-inf")
    return x


def forbidden(allowed: Tensor, vocab: int) -> Tensor:
    """[rows, vocab] bool: the tokens whose bit is 0 in the masks [rows, words] int32."""
    octets = (~allowed.contiguous()).view(torch.uint8)  # little-endian, as every machine is that this runs on
    bits = (octets[:, :, None] & 1 << torch.arange(8, dtype=torch.uint8, device=allowed.device)) != 0
    return bits.flatten(1)[:, :vocab]


_BLOCK = 1024


def edit_logits_triton(logits: Tensor, edits: LogitEdits) -> Tensor:
    """Triton launcher; arguments as in the reference."""
    out = logits[edits.rows].float()
    edited, vocab = out.shape
    width = edits.tokens.shape[1]
    if edited and width:
        _penalties_kernel[(edited, cdiv(width, _BLOCK))](
            logits, out, edits.rows, edits.slot, edits.path, edits.tokens, edits.counts, edits.prompt, edits.bias,
            edits.repetition, edits.frequency, edits.presence, vocab, logits.stride(0), edits.path.shape[1], width,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    if edits.allowed is not None:
        constrained, words = edits.allowed.shape
        _grammar_kernel[(constrained, cdiv(vocab, _BLOCK))](out, edits.allowed, vocab, words, BLOCK=_BLOCK, num_warps=4)
    out[edits.banned[:, 0], edits.banned[:, 1]] = float("-inf")
    return out


@jit
def _penalties_kernel(
    logits: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    path: tl.tensor,
    tokens: tl.tensor,
    counts: tl.tensor,
    prompt: tl.tensor,
    bias: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    depth: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK touched tokens of one row. Shapes as in LogitEdits; logits [rows, vocab], out [edited, vocab].

    Reads from logits and writes to out, as a token may stand in several lanes.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < width
    slot = tl.load(slots + row)
    table = slot * width + lane
    token = tl.load(tokens + table, mask=inside, other=0)
    x = tl.load(logits + tl.load(rows + row) * stride + token, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(counts + table, mask=inside, other=0)
    for i in range(depth):
        c += (token == tl.load(path + row * depth + i)).to(tl.int32)
    r = tl.load(repetition + slot)
    in_prompt = tl.load(prompt + table, mask=inside, other=0).to(tl.int32)
    x = tl.where(c + in_prompt > 0, tl.where(x > 0, x / r, x * r), x)
    x -= tl.load(frequency + slot) * c.to(tl.float32)
    x -= tl.where(c > 0, tl.load(presence + slot), 0.0)
    x += tl.load(bias + table, mask=inside, other=0.0)
    tl.store(out + row * vocab + token, x, mask=inside)


@jit
def _grammar_kernel(
    out: tl.tensor, allowed: tl.tensor, vocab: tl.tensor, words: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program: BLOCK tokens of one row. out [rows, vocab]; allowed [rows, words]."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    word = tl.load(allowed + row * words + token // 32, mask=inside, other=0)
    out_of = ((word >> (token % 32)) & 1) == 0
    tl.store(out + row * vocab + token, tl.full((BLOCK,), float("-inf"), tl.float32), mask=inside & out_of)

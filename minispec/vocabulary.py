"""A target's vocabulary as grammars see it: the bytes of each token, and which tokens end a text."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from llguidance import LLTokenizer, TokenizerWrapper
from torch import Tensor

if TYPE_CHECKING:
    from minispec.tokenizer import Tokenizer

_WORD_BITS = 32


class Vocabulary:
    """Which bytes each token stands for, in llguidance's form, and the masks it computes in ours.

    llguidance gets an end of sequence of its own, one id past the vocabulary, and no control token at all. Whether a
    model has one end token or three, or none, is then no concern of a grammar, and no text can hold a control token.

    Args:
        tokenizer: the target's.
        vocab_size: rows of logits; the tokenizer may have fewer ids, or more.
        eos_ids: tokens that end a text.

    Attributes:
        eos_ids: those that have logits.
        library: the vocabulary for llguidance.
        library_words: 32-bit words of a mask that llguidance computes.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        spellings = [
            b"" if token in self.eos_ids else tokenizer.token_bytes(token) for token in range(vocab_size)
        ]  # of control tokens and padding there are no bytes either
        self._is_text = [bool(spelling) for spelling in spellings]
        self._end = vocab_size
        self.library = LLTokenizer(TokenizerWrapper(_Spelling(tokenizer, spellings)))
        self.library_words = -(-(vocab_size + 1) // _WORD_BITS)
        self._text_words = _words([t for t in range(vocab_size) if self._is_text[t]], vocab_size)
        self._eos_words = _words(self.eos_ids, vocab_size)

    def is_text(self, token: int) -> bool:
        """Whether the token adds bytes to a text; ids without logits do not."""
        return 0 <= token < len(self._is_text) and self._is_text[token]

    def leads_on(self, row: Tensor) -> bool:
        """Whether a mask of llguidance's, [library_words] int32, allows a token of text or the end."""
        text = row[: len(self._text_words)] & self._text_words
        return bool(text.any()) or bool(self._may_end(row[None]).any())

    def masks(self, rows: Tensor, *, may_end: bool) -> Tensor:
        """llguidance's masks as masks over logits.

        Args:
            rows: [n, library_words] int32 as computed by llguidance, zero where there is nothing to be said.
            may_end: the text may end where the grammar lets it, and not only where nothing else may follow.

        Returns:
            [n, ceil(vocab_size / 32)] int32; a row that would be empty allows every token.
        """
        masks = rows[:, : len(self._text_words)] & self._text_words
        ends = self._may_end(rows)
        masks[ends if may_end else ends & _empty(masks)] |= self._eos_words
        masks[_empty(masks)] = self._text_words | self._eos_words
        return masks

    def _may_end(self, rows: Tensor) -> Tensor:
        """[n] bool: the rows that have the bit of llguidance's end of sequence."""
        return (rows[:, self._end // _WORD_BITS] >> (self._end % _WORD_BITS)) & 1 == 1


class _Spelling:
    """What ``TokenizerWrapper`` asks for: the bytes of all tokens, and how the tokenizer would cut a text."""

    def __init__(self, tokenizer: Tokenizer, spellings: list[bytes]) -> None:
        self.eos_token_id = len(spellings)
        self.bos_token_id = None
        self.tokens = [*spellings, b""]
        self.special_token_ids = [self.eos_token_id]
        self._tokenizer = tokenizer
        self._known = {spelling: token for token, spelling in enumerate(spellings) if spelling}
        self._longest = max(map(len, self._known), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """The tokens that a text is cut into where it stands inside another one."""
        readable = text.decode(errors="replace")
        # SentencePiece puts a space in front of a text; behind a line feed, which merges with nothing there, it shows
        # how the text is cut without one
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + readable, add_special_tokens=False)
            spelt = list(map(self._bytes, ids))
            surplus = sum(map(len, spelt)) - len(text)
            while surplus > 0:
                surplus -= len(spelt.pop(0))
            if b"".join(spelt) == text:
                return ids[len(ids) - len(spelt) :]
        return self._longest_first(text)

    def _bytes(self, token: int) -> bytes:
        return self.tokens[token] if token < len(self.tokens) else b""

    def _longest_first(self, text: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(text):
            length = next(
                (
                    n
                    for n in range(min(self._longest, len(text) - start), 0, -1)
                    if text[start : start + n] in self._known
                ),
                0,
            )
            if not length:
                break  # not even the byte has a token
            ids.append(self._known[text[start : start + length]])
            start += length
        return ids


def _empty(masks: Tensor) -> Tensor:
    """[n] bool: rows without a bit. Faster than ``any``."""
    return (masks.amax(dim=1) == 0) & (masks.amin(dim=1) == 0)


def _words(tokens: Collection[int], vocab_size: int) -> Tensor:
    """Bit words, [ceil(vocab_size / 32)] int32, of a set of tokens."""
    bits = torch.zeros(-(-vocab_size // _WORD_BITS), _WORD_BITS, dtype=torch.int64)
    bits.view(-1)[list(tokens)] = 1
    return (bits << torch.arange(_WORD_BITS)).sum(1).to(torch.int32)

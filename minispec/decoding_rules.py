"""What a tokenizer.json decoder does, applied to one token at a time.

The ``tokenizers`` library decodes whole sequences only. For the decoders of Llama-family models the text of a sequence
is the bytes of its tokens joined, but for a few spaces at the beginning, which is what makes streaming exact.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minispec.errors import ModelError


@dataclass(frozen=True)
class DecodingRules:
    """What a tokenizer.json decoder does to one token, and to the beginning of a text.

    Attributes:
        byte_level: tokens are written in GPT-2's byte alphabet.
        replacements: substitutions in each token, such as "▁" by " ".
        byte_fallback: "<0x0A>" stands for one byte.
        leading_spaces: spaces to take off the beginning of a text.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    leading_spaces: int = 0

    @classmethod
    def of(cls, decoder: Mapping[str, Any] | None) -> DecodingRules:
        """Reads the ``decoder`` section of tokenizer.json.

        Raises:
            ModelError: a step of it is none of ByteLevel, Metaspace, Replace, ByteFallback, Fuse and Strip.
        """
        steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder or {"type": "none"}]
        byte_level = byte_fallback = False
        replacements: list[tuple[str, str]] = []
        spaces = 0
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    byte_level = True
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                    replacements.append((pattern, content))
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                    spaces += start
                case {"type": "Metaspace", "replacement": str(pattern)}:
                    replacements.append((pattern, " "))
                    # Files of before 2023 say it with a flag.
                    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
                    spaces += scheme != "never"
                case _:
                    raise ModelError(
                        f"tokenizer.json has a decoder of type {step['type']} that minispec cannot run token by token: "
                        f"{json.dumps(step)[:200]}. Supported: ByteLevel, Metaspace, Replace, ByteFallback, Fuse and "
                        "Strip (at the beginning); use a Llama-family model."
                    )
        return cls(byte_level, tuple(replacements), byte_fallback, spaces)

    def token_bytes(self, token: str) -> bytes:
        """Bytes of an ordinary token, given as the vocabulary spells it."""
        if self.byte_level:
            try:
                return bytes(BYTE_OF[character] for character in token)
            except KeyError:  # not written in the byte alphabet, so it stands for itself
                return token.encode()
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet (``bytes_to_unicode`` in its encoder.py), inverted: printable bytes stand for themselves,
    the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()

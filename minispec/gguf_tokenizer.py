"""Rebuild a Hugging Face tokenizer (tokenizer.json, tokenizer_config.json) from the tokenizer of a GGUF file.

Two kinds exist in Llama models. ``gpt2``: byte-level BPE with merges; ``tokenizer.ggml.pre`` names the regular
expressions that split text into words first. ``llama``: SentencePiece BPE, whose merges are implied by the scores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from minispec.errors import ModelError

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# The regular expressions of llama.cpp's src/llama-vocab.cpp, applied one after the other.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (_LLAMA3,)),
    "qwen2": (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


class Keys(Protocol):
    """What is asked of the metadata of a GGUF file."""

    path: Path

    def get(self, key: str, default: Any = None) -> Any: ...

    def need(self, key: str) -> Any: ...


def write_tokenizer(meta: Keys, destination: Path, *, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json to the folder ``destination``."""
    tokens: list[str] = meta.need("tokenizer.ggml.tokens")
    types: list[int] = meta.get("tokenizer.ggml.token_type", [1] * len(tokens))
    special = _special_tokens(meta, tokens)
    model = meta.need("tokenizer.ggml.model")
    try:
        if model == "gpt2":
            tokenizer, add_bos = _byte_level(meta, tokens)
        elif model == "llama":
            tokenizer, add_bos = _sentencepiece(meta, tokens, types, special.get("unk_token")), True
        else:
            raise ModelError(f"{meta.path}: tokenizer model {model!r} is not supported; 'gpt2' and 'llama' are.")
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"{meta.path}: its tokenizer cannot be rebuilt: {error}") from error
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", add_bos)) and "bos_token" in special
    if add_bos:
        bos = special["bos_token"]
        prefix = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokens.index(bos))]
        )
        tokenizer.post_processor = prefix
    tokenizer.save(str(destination / "tokenizer.json"))

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        **special,
    }
    template = meta.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (destination / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _special_tokens(meta: Keys, tokens: list[str]) -> dict[str, str]:
    """bos_token, eos_token, unk_token, pad_token as far as the file names them."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in names.items():
        token = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            if not 0 <= int(token) < len(tokens):
                raise ModelError(f"{meta.path}: {key}_token_id is {token}, but there are {len(tokens)} tokens.")
            special[name] = tokens[int(token)]
    return special


def _byte_level(meta: Keys, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether llama.cpp adds BOS for this kind where the file does not say."""
    name = meta.get("tokenizer.ggml.pre", "default")
    patterns = _PRE_TOKENIZERS.get(name)
    if patterns is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelError(f"{meta.path}: pre-tokenizer {name!r} is not supported. Supported are: {known}.")
    merges = [tuple(merge.split(" ", 1)) for merge in meta.need("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    is_llama3 = name in _LLAMA3_NAMES
    # Llama 3 takes a word that is a token as it is, even where no chain of merges leads to it.
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=is_llama3))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, is_llama3


def _sentencepiece(meta: Keys, tokens: list[str], types: list[int], unknown: str | None) -> Tokenizer:
    """SentencePiece BPE: of all pairs of pieces that join to a piece, the one whose piece scores best merges first."""
    scores: list[float] = meta.need("tokenizer.ggml.scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE):
            continue  # never the product of a merge
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    merges.sort(key=lambda merge: merge[:3])
    pairs = [(left, right) for *_, left, right in merges]
    tokenizer = Tokenizer(BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    # Not the Metaspace pre-tokenizer: it adds no prefix to a text that starts with a space, as SentencePiece does.
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer

"""Tiny tokenizers, written as model folders: one of bytes, one like Llama 2's."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minispec.decoding_rules import BYTE_OF

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# BYTE: ids 0-255 are the bytes
BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
BYTE_VOCAB_SIZE = 260

# SentencePiece-like: <unk> 0, <s> 1, </s> 2, the bytes 3-258, then pieces
SP_BOS, SP_EOS, SP_FIRST_BYTE = 1, 2, 3
SP_WORDS = ("▁Hello", "▁world", "▁cat", "▁The", "The", "!", "▁▁", "é", "日本")


def _write(path: Path, tokenizer: Tokenizer, **config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def byte_tokenizer_folder(path: Path, **config: object) -> Path:
    """One token per byte (id = byte), then BOS 256, EOS 257, im_start 258, im_end 259; ChatML; raw text gets one BOS.

    ``config`` overrides entries of tokenizer_config.json.
    """
    tokenizer = Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
    tokenizer.add_special_tokens(
        [
            AddedToken(text, normalized=False, special=True)
            for text in ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    defaults = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": CHATML}
    return _write(path, tokenizer, **{**defaults, **config})


def sentencepiece_folder(path: Path, **config: object) -> Path:
    """BPE with byte fallback, "▁" for spaces and one put in front of every text, as in Llama 2's tokenizer.json."""
    vocab = {"<unk>": 0, "<s>": SP_BOS, "</s>": SP_EOS}
    vocab |= {f"<0x{byte:02X}>": SP_FIRST_BYTE + byte for byte in range(256)}
    for character in sorted(set("".join(SP_WORDS)) | set("abcdefghijklmnopqrstuvwxyz</>")):
        vocab.setdefault(character, len(vocab))
    merges = []
    for word in SP_WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", SP_BOS)]
    )
    template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    eos = {"__type": "AddedToken", "content": "</s>", "normalized": False, "special": True}
    defaults = {"bos_token": "<s>", "eos_token": eos, "unk_token": "<unk>", "chat_template": template}
    return _write(path, tokenizer, **{**defaults, **config})

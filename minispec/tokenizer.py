"""Text to token ids, conversations to token ids, and token ids back to text, one token at a time.

Built on the ``tokenizers`` library. Two things are done here and not there:

- Decoding is incremental and byte-exact. Every token has its own bytes (`Tokenizer.token_bytes`); text is these bytes
  joined and read as UTF-8, so a character split over several tokens appears once it is whole.
- Text from a caller can be kept free of control tokens. A second copy of the tokenizer knows the control tokens under
  secret names only; what spells "<|im_end|>" there is plain text, and what shall be a control token is renamed first.

A `Tokenizer` is shared by the HTTP thread and the engine thread: it is not changed after loading, save for two caches
whose entries never differ.
"""

from __future__ import annotations

import codecs
import json
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from minispec.chat_template import SPECIAL_TOKEN_NAMES, ChatTemplate, check_text, token_text
from minispec.decoding_rules import DecodingRules
from minispec.errors import ModelError


class Tokenizer:
    """A model folder's tokenizer: text -> ids, chat -> ids, ids -> bytes.

    Attributes:
        vocab_size: largest id + 1, added tokens included; the model's embedding may have more rows.
        bos_id: the token that begins a text, if the model has one.
        eos_ids: every id that ends a text (generation_config.json, config.json and tokenizer_config.json together).
        special_ids: control tokens: never part of the decoded text.
        chat_template: the model's chat templates, possibly none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate,
        bos_id: int | None,
        eos_ids: frozenset[int],
        special_ids: frozenset[int],
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        eos_id: int | None = None,
    ) -> None:
        """
        Args:
            backend: owned by this object from here on.
            add_bos, add_eos: whether raw text gets these tokens; None leaves it to the backend's post-processor.
            eos_id: the tokenizer's own end token, for ``add_eos``.

        Raises:
            ModelError: the backend's decoder is of a type that cannot be decoded token by token.
        """
        backend.no_truncation()  # some tokenizer.json files keep the settings of their training run
        backend.no_padding()
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self.vocab_size = max([*backend.get_vocab(with_added_tokens=True).values(), *self._added], default=-1) + 1
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.special_ids = special_ids
        self.chat_template = chat_template
        self._control_tokens = {
            self._added[token_id]: token_id for token_id in sorted(special_ids & self._added.keys())
        }
        self._prefix, self._suffix = _affixes(backend, bos_id, add_bos, eos_id, add_eos)
        self._rules = DecodingRules.of(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._literal: tuple[tokenizers.Tokenizer, dict[str, str]] | None = None
        self._literal_lock = threading.Lock()

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Loads tokenizer.json and what the other configuration files of a model folder say about tokens.

        Raises:
            ModelError: tokenizer.json is missing, or a file is broken or of an unsupported kind.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json. Download the model again, or convert an older tokenizer.model with "
                "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"Cannot read {path}: {error}. Download the model again.") from error
        # Older folders keep the special tokens in a file of their own.
        config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        texts = {name: token_text(config.get(name)) for name in SPECIAL_TOKEN_NAMES}
        named = {name: backend.token_to_id(text) for name, text in texts.items() if text}
        _add_named(backend, texts.values())
        declared = config.get("added_tokens_decoder")
        special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        if isinstance(declared, Mapping):
            special |= {int(i) for i, token in declared.items() if i.isdecimal() and dict(token).get("special")}
        special |= {token_id for token_id in named.values() if token_id is not None}

        model, generation = _read_json(folder / "config.json"), _read_json(folder / "generation_config.json")
        eos_ids = {*_ids(model, "eos_token_id", folder), *_ids(generation, "eos_token_id", folder)}
        eos_id, bos_id = named.get("eos_token"), named.get("bos_token")
        if eos_id is not None:
            eos_ids.add(eos_id)
        if bos_id is None and "bos_token" not in config:
            bos_id = next(iter(_ids(model, "bos_token_id", folder)), None)
        return cls(
            backend,
            chat_template=ChatTemplate.from_folder(folder, config),
            bos_id=bos_id,
            eos_ids=frozenset(eos_ids),
            special_ids=frozenset(special),
            add_bos=config.get("add_bos_token"),
            add_eos=config.get("add_eos_token"),
            eos_id=eos_id,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a raw text.

        Args:
            text: any text; long texts take one call and are never truncated.
            add_special_tokens: add what the model wants around a raw text: as a rule one BOS, which is not doubled if
                the text begins with it.
            parse_special: read control tokens spelt out in the text as such; otherwise they stay text.

        Raises:
            RequestError: the text holds a lone surrogate.
        """
        check_text(text)
        backend = self._backend if parse_special else self._literal_backend()[0]
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        if not add_special_tokens:
            return ids
        prefix = self._prefix
        if prefix and ids[: len(prefix)] == prefix:
            prefix = []
        return prefix + ids + self._suffix

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, rendered by the model's chat template; BOS only where the template writes it.

        Control tokens spelt out in messages, tools or template variables stay text.

        Args:
            messages, tools, kwargs: see `ChatTemplate.render`.
            add_generation_prompt: end with the header of a new assistant turn; None means yes, unless
                ``continue_final_message`` leaves the last turn open.

        Raises:
            RequestError: no template, a template that refuses the messages, contradictory flags, a lone surrogate.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        rendered = self.chat_template.render(
            messages,
            list(self._control_tokens),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **kwargs,
        )
        check_text(rendered.text, "messages")
        backend, text = self._backend, rendered.text
        if rendered.markers is not None:
            backend, names = self._literal_backend()
            text = rendered.rename_control_tokens(names)
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def first_difference(self, other: Tokenizer) -> int | None:
        """The first id that the two vocabularies spell differently; a longer one may go on past the shorter's end."""
        ids = range(min(self.vocab_size, other.vocab_size))
        mine, theirs = self._backend.id_to_token, other._backend.id_to_token
        return next((i for i in ids if mine(i) != theirs(i)), None)

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token; b"" for special tokens and ids outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = b"" if token_id in self.special_ids else self._spelling(token_id)
            self._bytes[token_id] = known  # two threads may both get here, with equal bytes
        return known

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``, equal to what a fresh decoder streams: an incomplete character at the end is dropped."""
        decoder = IncrementalDecoder(self, at_start=True, skip_special_tokens=skip_special_tokens)
        return "".join([decoder.feed(token_id) for token_id in ids]) + decoder.finish()

    def decoder(self, prompt_ids: Sequence[int] = (), *, spelt: Collection[int] = ()) -> IncrementalDecoder:
        """A decoder for the text that follows ``prompt_ids``; the control tokens ``spelt`` are written out."""
        return IncrementalDecoder(self, at_start=not any(map(self.token_bytes, prompt_ids)), spelt=spelt)

    def spell(self, ids: Iterable[int]) -> str:
        """The text of ``ids`` with control tokens written out, and U+FFFD for bytes that are no UTF-8."""
        return b"".join(map(self.spelling, ids)).decode("utf-8", "replace")

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """The tokens of these texts, of those that are one token."""
        ids = (self._backend.token_to_id(text) for text in texts)
        return frozenset(token_id for token_id in ids if token_id is not None)

    @property
    def leading_spaces(self) -> int:
        """How many spaces SentencePiece put in front of a text, to be taken off when the text begins."""
        return self._rules.leading_spaces

    def spelling(self, token_id: int) -> bytes:
        """Like `token_bytes`, but special tokens are written out."""
        return self._spelling(token_id) if token_id in self.special_ids else self.token_bytes(token_id)

    def _spelling(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._rules.token_bytes(token)

    def _literal_backend(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """The copy that knows control tokens under secret names only, and the names. Made at the first need."""
        with self._literal_lock:
            if self._literal is None:
                self._literal = _rename_tokens(self._backend, self._control_tokens)
            return self._literal


class IncrementalDecoder:
    """Turns the ids of one growing text into text, each as it comes.

    Invalid bytes become U+FFFD by the rules of Python's UTF-8 decoder; an incomplete character is held until it is
    complete or shown to be invalid.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, at_start: bool, skip_special_tokens: bool = True, spelt: Collection[int] = ()
    ) -> None:
        """
        Args:
            at_start: nothing comes before this text, so the space that SentencePiece adds is taken off.
            spelt: special tokens that are not skipped.
        """
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids.difference(spelt) if skip_special_tokens else frozenset()
        self._spaces_to_strip = tokenizer.leading_spaces if at_start else 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that this token completes, "" while a character is incomplete. O(1) per token."""
        data = b"" if token_id in self._skip else self._tokenizer.spelling(token_id)
        while self._spaces_to_strip and data:
            if not data.startswith(b" "):
                self._spaces_to_strip = 0
                break
            data = data[1:]
            self._spaces_to_strip -= 1
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Ends the text. A character cut in the middle is dropped, so that nothing sent is ever taken back."""
        self._utf8.reset()
        return ""


def _affixes(
    backend: tokenizers.Tokenizer, bos_id: int | None, add_bos: bool | None, eos_id: int | None, add_eos: bool | None
) -> tuple[list[int], list[int]]:
    """What goes before and after a raw text: the post-processor's tokens, corrected by the explicit settings."""
    encoding = backend.encode("a", add_special_tokens=True)
    length = len(backend.encode("a", add_special_tokens=False).ids)
    start = encoding.special_tokens_mask.index(0) if 0 in encoding.special_tokens_mask else 0
    prefix, suffix = encoding.ids[:start], encoding.ids[start + length :]
    if add_bos is False:
        prefix = [token_id for token_id in prefix if token_id != bos_id]
    elif add_bos and bos_id is not None and bos_id not in prefix:
        prefix = [bos_id, *prefix]
    if add_eos is False:
        suffix = [token_id for token_id in suffix if token_id != eos_id]
    elif add_eos and eos_id is not None and eos_id not in suffix:
        suffix = [*suffix, eos_id]
    return prefix, suffix


def _add_named(backend: tokenizers.Tokenizer, texts: Iterable[str | None]) -> None:
    """Makes tokens that tokenizer_config.json names special, where the vocabulary has them but tokenizer.json does not
    say so; transformers does the same."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in texts if text and text not in added and backend.token_to_id(text) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in missing])


def _rename_tokens(
    backend: tokenizers.Tokenizer, tokens: Mapping[str, int]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """A copy of ``backend`` in which ``tokens`` keep their ids but answer to secret names; and the names.

    The names hold a random number, so that no text can spell them.
    """
    nonce = secrets.token_hex(8)
    names = {text: f"\ue000{nonce}-{token_id}\ue001" for text, token_id in tokens.items()}
    data = json.loads(backend.to_str())
    for token in data["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = data["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in model["vocab"].items()}
    else:  # Unigram: pairs of piece and score, in the order of their ids
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        # A merge that builds a control token out of ordinary ones would let text spell it after all.
        pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    copy = tokenizers.Tokenizer.from_str(json.dumps(data))
    moved = [text for text, token_id in tokens.items() if copy.token_to_id(names[text]) != token_id]
    if moved:
        raise ModelError(
            f"tokenizer.json numbers its added tokens in a way that minispec cannot copy ({moved[0]!r} moved); save it "
            "again with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    return copy, names


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} if there is no such file. Raises ModelError if it is broken."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read {path}: {error}. Download the model again.") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds a {type(data).__name__}, not an object. Download the model again.")
    return data


def _ids(config: Mapping[str, Any], key: str, folder: Path) -> list[int]:
    """Token ids given as a number, a list of numbers or null. Raises ModelError for anything else."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int for token_id in ids):
        raise ModelError(f"{key} in {folder} is {value!r}; it must be a token id or a list of them. Correct the file.")
    return ids

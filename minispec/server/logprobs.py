"""Log-probabilities in the two shapes of OpenAI's API.

One entry stands for one token, always: also for those without a text of their own (control tokens, parts of a
character) and for those whose text a stop string has cut off. So there are as many entries as tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minispec.request import TokenLogprobs
from minispec.tokenizer import IncrementalDecoder, Tokenizer


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenLogprobs], count: int) -> dict[str, Any]:
    """The ``logprobs`` object of a chat choice.

    Args:
        count: alternatives at each token.
    """
    content = []
    for token in tokens:
        top = [_chat_token(tokenizer, other, logprob) for other, logprob in token.top[:count]]
        content.append({**_chat_token(tokenizer, token.token, token.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    # Control tokens have a name but no bytes: those of all entries, joined, are the bytes of the text.
    own = tokenizer.token_bytes(token)
    shown = tokenizer.spelling(token).decode("utf-8", "replace")
    return {"token": shown, "logprob": logprob, "bytes": list(own) if own else None}


class CompletionLogprobs:
    """Makes the ``logprobs`` objects of one choice of a completion, piece by piece.

    Args:
        decoder: fresh; where the text begins. It says at which character each token begins.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: IncrementalDecoder) -> None:
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._offset = 0

    def piece(self, ids: Sequence[int], tokens: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The object for the next tokens.

        Args:
            ids: of them.
            tokens: one for each id; None for the first of a prompt, which nothing leads to.
        """
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.feed(token))
        return {
            "tokens": [token_name(self._tokenizer, token) for token in ids],
            "token_logprobs": [None if token is None else token.logprob for token in tokens],
            "top_logprobs": [None if token is None else self._alternatives(token) for token in tokens],
            "text_offset": offsets,
        }

    def _alternatives(self, token: TokenLogprobs) -> dict[str, float]:
        """By name; the chosen token is among them, as in OpenAI's API."""
        named: dict[str, float] = {}
        for other, logprob in (*token.top, (token.token, token.logprob)):
            named.setdefault(token_name(self._tokenizer, other), logprob)  # of two of one name, the likelier
        return named


def prompt_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[TokenLogprobs | None]
) -> list[dict[str, dict[str, Any]] | None]:
    """The ``prompt_logprobs`` list, in vLLM's shape: for each token of the prompt, id → what it is and how likely."""
    return [
        None
        if token is None
        else {
            str(one): {"logprob": logprob, "decoded_token": token_name(tokenizer, one)}
            for one, logprob in dict((*token.top, (token.token, token.logprob))).items()
        }
        for token in tokens
    ]


def token_name(tokenizer: Tokenizer, token: int) -> str:
    r"""The text of a token; of one that is no whole text its bytes, like ``bytes:\xf0\x9f``."""
    data = tokenizer.spelling(token)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

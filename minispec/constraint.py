"""Structured output: which tokens a grammar lets follow each node of a tree.

Grammars are compiled and run by llguidance (https://github.com/guidance-ai/llguidance), which walks the vocabulary as a
tree of bytes beside the state of an Earley parser. What is done here and not there: a token's bytes are those that our
decoder shows, ends of sequence are this module's own business, and the state behind each draft node is reached along
the node's own path and taken back again, so that drafts leave no trace.

JSON is written in one layout, ``{"a": 1, "b": [2, 3]}``: free white space is where small models begin to loop. What
stands between two values is then decided by the grammar alone, and is drafted without a drafter (``forced``).
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from llguidance import LLMatcher, LLParserLimits
from torch import Tensor

from minispec.errors import RequestError
from minispec.tree import DraftTree
from minispec.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from minispec.tokenizer import Tokenizer

PARAM = "response_format"
"""The request field that errors name."""
MAX_CHARACTERS = 65_536
"""Longest schema, regular expression, grammar or list of choices."""
KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")

_JSON_LAYOUT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPILED = 64  # grammars kept; one takes some 100 kB
_MESSAGE = 400  # most characters of the library's own message that are passed on
_EXCERPT = re.compile(r"\s*\d+ \| ")  # a numbered line of the grammar, which is ours more often than the client's
_IN_WORDS = {"NoExtensionBias": "no text matches it"}


@dataclass(frozen=True)
class OutputFormat:
    """What a request's text must be.

    Attributes:
        kind: ``json_object`` for any JSON object; ``json_schema``; ``regex`` (Rust's syntax, without look-around and
            back references), which the whole text must match; ``choice``, one of several strings; ``grammar``
            (llguidance's variant of Lark).
        value: the schema as a dict or as JSON text, kept as JSON text; the expression; the choices; the grammar. Empty
            for ``json_object``.

    Raises:
        RequestError: the value is of another kind, empty or too long. What the grammar itself says is checked by
            ``Grammars.constraint``.
    """

    kind: str
    value: Any = ""

    def __post_init__(self) -> None:
        value: Any = self.value
        match self.kind:
            case "json_object":
                if value:
                    raise RequestError("json_object takes no value; give a schema as json_schema", param=PARAM)
                value = ""
            case "json_schema":
                value = _schema(value)
            case "choice":
                if isinstance(value, str) or not isinstance(value, Sequence):
                    raise RequestError(f"the choices must be a list of strings, not {value!r:.100}", param=PARAM)
                if not value or not all(isinstance(choice, str) and choice for choice in value):
                    raise RequestError("the choices must be non-empty strings, at least one", param=PARAM)
                value = tuple(value)
            case "regex" | "grammar":
                if not isinstance(value, str) or not value:
                    raise RequestError(f"a {self.kind} must be a non-empty string, not {value!r:.100}", param=PARAM)
            case _:
                raise RequestError(
                    f"there is no output format {self.kind!r}; there are {', '.join(KINDS)}", param=PARAM
                )
        length = len(value) if isinstance(value, str) else sum(map(len, value))
        if length > MAX_CHARACTERS:
            raise RequestError(
                f"a {self.kind} may have {MAX_CHARACTERS} characters, this one has {length}; shorten it", param=PARAM
            )
        object.__setattr__(self, "value", value)

    def compile(self) -> str:
        """The grammar in llguidance's own notation."""
        match self.kind:
            case "json_object":
                return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_LAYOUT)
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(self.value, overrides=_JSON_LAYOUT)
            case "regex":
                return LLMatcher.grammar_from_regex(self.value)
            case "choice":
                # as one terminal: choices that are rules cost the parser a row of items each, and it has room for 2000
                return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(lark_string, self.value)))
            case _:
                return LLMatcher.grammar_from_lark(self.value)


class Constraint(Protocol):
    """What one request may still say. It stands behind the request's committed text, and only ``accept`` moves it.

    What it allows is a function of the tokens accepted so far and of nothing else: neither what was drafted nor who
    shares the step matters, and a preempted request keeps it.
    """

    @property
    def done(self) -> bool:
        """The text is complete and nothing may follow, so that the request ends."""

    @property
    def error(self) -> str | None:
        """Why ``accept`` refused a token: the grammar has no way on, or became too complex."""

    def masks(self, tree: DraftTree) -> Tensor:
        """The tokens allowed after each node, along its own path.

        End-of-sequence tokens are among them exactly where the text may end; under ``ignore_eos`` only where it must.
        No row is empty: where the grammar has no way on every token is allowed, and ``accept`` will refuse whichever
        comes.

        Returns:
            [nodes, ceil(vocab_size / 32)] int32 on the CPU: bit ``t % 32`` of word ``t // 32`` for token t.
        """

    def accept(self, token: int) -> bool:
        """The text goes on with ``token``; False, and ``error`` says why, if it may not."""

    def prune(self, tree: DraftTree) -> DraftTree:
        """The tree without the nodes that could never come true."""

    def forced(self, limit: int) -> tuple[int, ...]:
        """At most ``limit`` tokens that are sure to come next, whatever the target thinks."""


class Grammars:
    """Makes the constraints of an engine's requests. Thread-safe.

    Args:
        tokenizer: says which bytes each token stands for.
        vocab_size: rows of logits; ids that the tokenizer does not have are never allowed.
        eos_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[OutputFormat, _Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, output_format: OutputFormat, *, ignore_eos: bool = False) -> Constraint:
        """A constraint at the beginning of a text. Compiles what it has not met before: some milliseconds as a rule.

        Args:
            ignore_eos: the text ends only where the grammar leaves no choice.

        Raises:
            RequestError: the grammar has an error, uses something unsupported, or is too complex.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
            start = self._compiled.get(output_format)
            if start is None or start.spoilt:
                start = _Compiled(_compile(self._vocabulary, output_format))
                self._compiled[output_format] = start
            self._compiled.move_to_end(output_format)
            while len(self._compiled) > _COMPILED:
                self._compiled.popitem(last=False)
            return GrammarConstraint(start, self._vocabulary, ignore_eos=ignore_eos)


@dataclass
class _Compiled:
    """A grammar at the beginning of a text, to be copied.

    Copies share one lexer, which grows with what it meets. Once that is too much for it, it fails for all of them, so
    the next request compiles the grammar anew.

    Attributes:
        spoilt: a copy has met with a limit.
    """

    matcher: LLMatcher
    spoilt: bool = False


class GrammarConstraint:
    """A ``Constraint`` by a grammar.

    Args:
        start: the compiled grammar at the beginning of a text; copied, not changed.
        vocabulary: of the target.
        ignore_eos: the text ends only where it must.
    """

    def __init__(self, start: _Compiled, vocabulary: Vocabulary, *, ignore_eos: bool = False) -> None:
        self.done = False
        self.error: str | None = None
        self._start = start
        self._matcher = start.matcher.deep_copy()
        self._vocabulary = vocabulary
        self._ignore_eos = ignore_eos
        self._text: list[int] = []
        self._too_complex = ""

    def masks(self, tree: DraftTree) -> Tensor:
        vocabulary = self._vocabulary
        rows = torch.zeros(len(tree), vocabulary.library_words, dtype=torch.int32)
        size = rows.stride(0) * rows.element_size()
        for node in self._walk(tree):
            self._matcher.unsafe_compute_mask_ptr(rows.data_ptr() + node * size, size)
            if self._matcher.is_error():  # what was written then says that the text may end
                rows[node] = 0
                self._note_error()
        return vocabulary.masks(rows, may_end=not self._ignore_eos)

    def accept(self, token: int) -> bool:
        if token in self._vocabulary.eos_ids:
            self.done = self._matcher.is_accepting()
            return self.done or self._refuse()
        if not self._consume(token):
            return self._refuse()
        self._text.append(token)
        self.done = self._matcher.is_stopped()
        return True

    def prune(self, tree: DraftTree) -> DraftTree:
        kept = list(self._walk(tree))
        return tree if len(kept) == len(tree) else tree.keep(kept)

    def forced(self, limit: int) -> tuple[int, ...]:
        return tuple(self._matcher.compute_ff_tokens()[: max(limit, 0)])

    def _walk(self, tree: DraftTree) -> Iterator[int]:
        """The nodes that the grammar allows, each with the matcher standing behind it, parents first."""
        path: list[int] = []
        stack = [0]
        while stack:
            node = stack.pop()
            self._back(tree, path, tree.depth[node])
            if node and tree.tokens[node] in self._vocabulary.eos_ids:
                if self._matcher.is_accepting():
                    yield node  # nothing comes after it
                continue
            if node and not self._consume(tree.tokens[node]):
                continue
            path.append(node)
            yield node
            if not self._matcher.is_stopped():  # the text is complete: nothing comes after it, not even an end token
                stack += tree.children[node].values()
        self._back(tree, path, 1)

    def _back(self, tree: DraftTree, path: list[int], length: int) -> None:
        """Cut the path that the matcher has gone to its first ``length`` nodes."""
        above = len(path) - length
        del path[length:]
        if self._matcher.is_error():  # something was too complex, and it never leaves that state
            self._matcher = self._start.matcher.deep_copy()
            self._matcher.try_consume_tokens(self._text + [tree.tokens[node] for node in path[1:]])
        elif above > 0:
            self._matcher.rollback(above)

    def _consume(self, token: int) -> bool:
        if not self._vocabulary.is_text(token):
            return False
        done = self._matcher.try_consume_tokens([token]) == 1
        self._note_error()
        return done

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self._too_complex = self._too_complex or self._matcher.get_error()
            self._start.spoilt = True

    def _refuse(self) -> bool:
        if not self._matcher.is_error():
            self._matcher.compute_bitmask()  # a lexer that another copy has ruined refuses everything and says why here
        self._note_error()
        message = self._too_complex
        reason = f"it became too complex ({_short(message)})" if message else "no token of this model can follow"
        self.error = f"the output cannot go on in the form that the request demands: {reason}; simplify the form"
        return False


def lark_string(text: str) -> str:
    """A text as a literal of a Lark grammar: JSON's, without the one character that may stand in JSON and not there."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _schema(value: Any) -> str:
    """A JSON schema as text; the order of its properties, which is that of the output, is kept."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping):
            raise RequestError(f"a JSON schema must be an object, not {schema!r:.100}", param=PARAM)
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}", param=PARAM) from error


def _compile(vocabulary: Vocabulary, output_format: OutputFormat) -> LLMatcher:
    # one mask may cost some 10 ms; a lexer state takes one or two kB
    limits = LLParserLimits(
        step_lexer_fuel=100_000, max_lexer_states=20_000, max_grammar_size=100_000, verbose_errors=False
    )
    try:
        matcher = LLMatcher(vocabulary.library, output_format.compile(), log_level=0, limits=limits)
    except ValueError as error:
        raise RequestError(f"the {output_format.kind} cannot be used: {_short(str(error))}", param=PARAM) from error
    trial = matcher.deep_copy()
    if not matcher.is_error():
        row = torch.frombuffer(bytearray(trial.compute_bitmask()), dtype=torch.int32)
        leads_on = vocabulary.leads_on(row)
        # some limits show only here: at the first mask, and on the way that is sure to be gone
        trial.try_consume_tokens(trial.compute_ff_tokens())
        if not (leads_on or trial.is_error()):
            message = f"the {output_format.kind} cannot be used: no text of this model's tokens begins as it demands"
            raise RequestError(message, param=PARAM)
    if trial.is_error():
        message = f"the {output_format.kind} cannot be used: {_short(trial.get_error())}"
        raise RequestError(message, param=PARAM)
    return matcher


def _short(message: str) -> str:
    """The library's message on one line, without the state, traces and lines of the grammar that it may append."""
    for mark in ("<state>", "<backtrace>", "<non-verbose/>"):
        message = message.split(mark)[0]
    lines = itertools.takewhile(lambda line: not _EXCERPT.match(line), message.splitlines())
    short = " ".join(" ".join(lines).split())
    return _IN_WORDS.get(short, short if len(short) <= _MESSAGE else short[:_MESSAGE] + "…")

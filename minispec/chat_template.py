"""Chat templates: find the model's Jinja template and render a conversation with it.

Rendering follows transformers (``utils/chat_template_utils.py``), so that a template gives here the text it was written
for: same sandbox, extensions, filters and globals. What is added is that text from the caller can never become a
control token (see `Rendered`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from minispec.errors import ModelError, RequestError

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_MAX_DEPTH = 100  # of nested lists and objects; deeper ones would run into Python's recursion limit

# Names with a meaning of their own, that a caller's template variables may not take.
RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation in which the caller's own control-token texts can be told from the template's.

    A control token spelt out in a message ("A<|im_end|>B") was wrapped in two marker characters before rendering. The
    markers stand around it and not inside, so that templates may still split or search the content.

    Attributes:
        text: the rendered text, markers included.
        markers: the opening and the closing marker; None if no message spelt out a control token.
    """

    text: str
    markers: tuple[str, str] | None

    def rename_control_tokens(self, names: Mapping[str, str]) -> str:
        """The text with the template's control tokens renamed by ``names``, the caller's left as they are."""
        start, end = self.markers or ("", "")
        tokens = _pattern(names)
        if self.markers is None:
            return re.sub(tokens, lambda match: names[match[0]], self.text)
        # A template may have torn the markers apart (content.split("</think>")[-1]): a lone one is dropped too.
        found = re.compile(f"{start}({tokens}){end}|({tokens})|[{start}{end}]")
        return found.sub(lambda match: names[match[2]] if match[2] else match[1] or "", self.text)


class ChatTemplate:
    """The named chat templates of one model, and the special tokens they may write. Immutable, thread-safe."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        """
        Args:
            sources: template name ("default", "tool_use", …) to Jinja source; empty if the model has none.
            special_tokens: variables such as ``bos_token`` that templates refer to.
        """
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def from_folder(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate:
        """Looks in ``chat_template.jinja``, ``additional_chat_templates/`` and then in tokenizer_config.json.

        Raises:
            ModelError: a template file cannot be read or is no Jinja, or ``chat_template`` has an unknown form.
        """
        sources: dict[str, str] = {}
        configured = tokenizer_config.get("chat_template")
        try:
            if isinstance(configured, str):
                sources["default"] = configured
            elif configured:
                named = configured.items() if isinstance(configured, Mapping) else None
                sources |= dict(named or ((entry["name"], entry["template"]) for entry in configured))
        except (TypeError, KeyError) as error:
            raise ModelError(
                f"chat_template in {folder / 'tokenizer_config.json'} is neither a string nor a list of objects with "
                "'name' and 'template'; correct it, or put the template in chat_template.jinja beside it."
            ) from error
        files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if (folder / "chat_template.jinja").is_file():
            files["default"] = folder / "chat_template.jinja"
        for name, path in files.items():
            try:
                sources[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"Cannot read the chat template {path}: {error}. Download the model again.") from error
        template = cls(sources, special_tokens(tokenizer_config))
        for name, source in sources.items():
            try:
                template._environment.parse(source)
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(
                    f"The chat template {name!r} of {folder} is broken in line {error.lineno}: {error.message}. "
                    "Correct it, or put a working one in chat_template.jinja."
                ) from error
        return template

    def source_for(self, *, tools: bool) -> str:
        """Source of the template for conversations with tools, or without; "" if there is none."""
        return self.sources.get("tool_use" if tools else "default", self.sources.get("default", ""))

    def mentions(self, variable: str) -> bool:
        """Whether the template for conversations with tools reads a variable, such as ``tools``."""
        syntax = self._environment.parse(self.source_for(tools=True))
        return variable in jinja2.meta.find_undeclared_variables(syntax)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        control_tokens: Sequence[str],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> Rendered:
        """Renders a conversation.

        Args:
            messages: objects with ``role`` and ``content``; lists of text parts are joined.
            control_tokens: token texts that the template may write and the caller may not.
            add_generation_prompt: end with the header of a new assistant turn.
            continue_final_message: leave the last message's turn open, to be continued.
            tools: function descriptions for templates that know tools.
            variables: further variables for the template, such as ``enable_thinking=False``.

        Raises:
            RequestError: the model has no template, the template refuses or fails on the messages, or the arguments
                contradict each other.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message are both true; set one of them to false.",
                param="continue_final_message",
            )
        if not messages:
            raise RequestError("messages is empty; give at least one message.", param="messages")
        if clash := sorted(RESERVED_VARIABLES & variables.keys()):
            raise RequestError(f"{clash[0]} cannot be set as a chat template variable; rename or remove it.")
        source = self._choose("tool_use" if tools else "default")
        given = plain_data([normalise_message(message, index) for index, message in enumerate(messages)], "messages")
        tools = plain_data(tools, "tools")
        variables = plain_data(variables, "chat_template_kwargs")

        given_text = "\0".join(_strings([given, tools, variables]))
        pattern = _pattern(control_tokens)
        markers = _unused_characters(given_text + source) if re.search(pattern, given_text) else None
        if markers:
            given, tools, variables = _mark([given, tools, variables], re.compile(pattern), markers)
        final = given[-1].get("content")
        if continue_final_message:
            if not isinstance(final, str):
                raise RequestError("continue_final_message: the last message has no content.", param="messages")
            given[-1]["content"] = final + _CONTINUE_TAG
        context = {
            **self._special_tokens,
            "documents": None,
            **variables,
            "messages": given,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(source, context)
        for marker in markers or ():
            # A template may ask for |tojson(ensure_ascii=True); the messages hold neither form of the marker.
            text = text.replace(json.dumps(marker)[1:-1], marker)
        return Rendered(_cut_at_tag(text, final) if continue_final_message else text, markers)

    def _choose(self, name: str) -> str:
        if not self.sources:
            raise RequestError(
                "This model has no chat template, so chat requests cannot be served; use /v1/completions, or put a "
                "chat_template.jinja in the model folder.",
                param="messages",
            )
        for candidate in (name, "default"):
            if candidate in self.sources:
                return self.sources[candidate]
        raise RequestError(
            f"This model's chat templates are named {sorted(self.sources)}, and none is 'default'; "
            "use /v1/completions, or put a chat_template.jinja in the model folder."
        )

    def _render(self, source: str, context: Mapping[str, Any]) -> str:
        try:
            if source not in self._compiled:
                self._compiled[source] = self._environment.from_string(source)
            return self._compiled[source].render(context)
        except _TemplateRefusal as error:
            message = f"The chat template refuses these messages: {error.message}"
        # Templates are small programs of other people's: any exception of theirs is this request's failure, not ours.
        except Exception as error:
            message = f"The chat template fails on these messages: {type(error).__name__}: {error}"
        raise RequestError(message.encode("utf-8", "replace").decode(), param="messages", code="chat_template_error")


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens that tokenizer_config.json names, each given there as a string or as ``{"content": …}``."""
    texts = {name: token_text(tokenizer_config.get(name)) for name in SPECIAL_TOKEN_NAMES}
    tokens: dict[str, Any] = {name: text for name, text in texts.items() if text is not None}
    if isinstance(additional := tokenizer_config.get("additional_special_tokens"), list):
        tokens["additional_special_tokens"] = [text for text in map(token_text, additional) if text is not None]
    return tokens


def token_text(value: Any) -> str | None:
    """Text of a special token given as a string or as an object; None for anything else."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def normalise_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message as templates expect it: content a string, no null fields (templates would write "None").

    Raises:
        RequestError: content is null where the role needs it, or holds parts other than text.
    """
    where = f"messages[{index}].content"
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] is not an object with 'role' and 'content'.", param="messages")
    content = message.get("content")
    if content is None:
        if message.get("role") != "assistant":
            raise RequestError(f"{where} is null; only assistant messages may have no content.", param=where)
        content = ""
    elif isinstance(content, Sequence) and not isinstance(content, str):
        for number, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise RequestError(
                    f"{where}[{number}] is of type {kind!r}; this model reads text only: "
                    'give {"type": "text", "text": "…"}.',
                    param=f"{where}[{number}]",
                )
        content = "".join(part["text"] for part in content)
    elif not isinstance(content, str):
        raise RequestError(f"{where} is neither a string nor a list of text parts.", param=where)
    return {**{key: value for key, value in message.items() if value is not None}, "content": content}


def check_text(text: str, param: str | None = None) -> None:
    """Raises RequestError if the text holds a lone surrogate, which no tokenizer and no UTF-8 stream can carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; send whole "
            'characters: a \\u escape above U+FFFF comes in pairs, such as "\\ud83e\\udd8a".',
            param=param,
            code="invalid_unicode",
        ) from error


def plain_data(value: Any, param: str, depth: int = 0) -> Any:
    """A copy of JSON-like data, made of plain types only: no object with methods may reach a template.

    Raises:
        RequestError: another type, a lone surrogate, or nesting deeper than 100.
    """
    if depth > _MAX_DEPTH:
        raise RequestError(f"{param} is nested deeper than {_MAX_DEPTH} levels; flatten it.", param=param)
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        check_text(value, param)
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {plain_data(key, param, depth + 1): plain_data(item, param, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, param, depth + 1) for item in value]
    raise RequestError(f"{param} holds a {type(value).__name__}; only JSON values can be used.", param=param)


def _strings(value: Any) -> list[str]:
    """Every string in plain data, object keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    return [text for item in value for text in _strings(item)] if isinstance(value, list) else []


def _mark(value: Any, tokens: re.Pattern[str], markers: tuple[str, str]) -> Any:
    """Plain data with every control token in its strings wrapped in the markers, in object keys too."""
    if isinstance(value, str):
        return tokens.sub(lambda match: markers[0] + match[0] + markers[1], value)
    if isinstance(value, dict):
        return {_mark(key, tokens, markers): _mark(item, tokens, markers) for key, item in value.items()}
    return [_mark(item, tokens, markers) for item in value] if isinstance(value, list) else value


def _pattern(tokens: Sequence[str] | Mapping[str, str]) -> str:
    """A regular expression for any of the tokens, longest first as tokenizers match them."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"


def _unused_characters(text: str) -> tuple[str, str]:
    """Two private-use characters that the text holds neither as they are nor as JSON escapes: nobody can forge them."""
    unused = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text and f"\\u{code:04x}" not in text)
    try:
        return next(unused), next(unused)
    except StopIteration:
        raise RequestError("messages use every private-use character; remove some of them.", param="messages") from None


def _cut_at_tag(text: str, final: str) -> str:
    """The text up to the tag that was put after the final message, as transformers cuts it."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "continue_final_message: the chat template drops or changes the last message, so it cannot be continued; "
            "set it to false.",
            param="continue_final_message",
        )
    if text.startswith(_CONTINUE_TAG, at):
        return text[:at]
    return text[:at].rstrip()  # the template trims its messages, so the message's own trailing blanks go too


class _TemplateRefusal(jinja2.TemplateError):
    """raise_exception(message), called by the template itself."""


def _raise_exception(message: object) -> None:
    raise _TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were never trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2.ext.Extension

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # Jinja alone would print "" for {{ x.__class__ }}; no honest template asks for it.
        if attribute.startswith("_"):
            raise SecurityError(f"access to attribute {attribute!r} is refused")
        return super().unsafe_undefined(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment

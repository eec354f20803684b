"""A request's bytes to a pydantic model: strict JSON, and errors that name the field, what it may be and what it is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from minispec.chat_template import check_text
from minispec.errors import RequestError

Body = TypeVar("Body", bound=BaseModel)


def parse_body(body: bytes, kind: type[Body], unsupported: Mapping[str, Unsupported] | None = None) -> Body:
    """The body as a ``kind``.

    Args:
        unsupported: known fields that are refused, unless their value asks for nothing.

    Raises:
        RequestError: whatever is wrong with it.
    """
    data, is_strict = _load_json(body)
    try:
        parsed = kind.model_validate(data)
    except ValidationError as error:
        raise _type_error(error, kind) from None
    if not is_strict:  # in a field without a type of its own; those with one have been named above
        raise RequestError("The body holds NaN or an infinite number, which JSON does not have.", code="invalid_json")
    known = unsupported or {}
    for name in sorted(known.keys() & data.keys()):
        known[name].check(name, data[name])
    return parsed


class Unsupported:
    """A field of other servers that is not supported.

    Args:
        harmless: values that ask for nothing; null, an empty list and an empty object always do.
        remedy: what to do instead.
    """

    def __init__(self, *harmless: Any, remedy: str = "leave it out") -> None:
        self.harmless = harmless
        self._remedy = remedy

    def check(self, name: str, value: Any) -> None:
        """Raises RequestError unless ``value`` asks for nothing."""
        if value is None or value in ([], {}) or any(_same(value, harmless) for harmless in self.harmless):
            return
        raise RequestError(
            f"{name} is not supported; {self._remedy} ({short(value)} given).", param=name, code="unsupported_parameter"
        )


def short(value: Any) -> str:
    """A value as it stands in JSON, cut to fit an error message."""
    if isinstance(value, list | dict) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:80] + "…"


def _load_json(body: bytes) -> tuple[dict[str, Any], bool]:
    """The object in ``body``, and whether all its numbers are finite.

    Non-finite ones are let through here so that the field that holds one can be named.
    """
    non_finite: list[str] = []

    def number(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):
            non_finite.append(literal)
        return value

    try:
        data = json.loads(body.decode("utf-8"), parse_float=number, parse_constant=number)
    except UnicodeDecodeError as error:
        raise RequestError(f"The body is not UTF-8: byte {error.start} is invalid.", code="invalid_json") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply; flatten it.", code="invalid_json") from None
    except ValueError as error:  # also an integer of thousands of digits
        raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError(f"The body must be a JSON object, not {short(data)}.", code="invalid_json")
    if b"\\u" in body:  # only an escape can hide half a character in UTF-8
        for name, value in data.items():
            check_text(name)
            _check_texts(value, name)
    return data, not non_finite


def _check_texts(value: Any, param: str) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            check_text(item, param)
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, dict):
            stack += item
            stack += item.values()


def _type_error(error: ValidationError, kind: type[BaseModel]) -> RequestError:
    first = error.errors(include_url=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    given = short(first["input"])
    match first["type"]:
        case "missing":
            message = f"{param} is missing; it is required."
        case "extra_forbidden":
            where = param.rpartition(".")[0]
            known = ", ".join(_fields_at(kind, first["loc"][:-1]))
            message = f"{param} is unknown; {where} may have {known}."
        case "literal_error":
            message = f"{param} must be {first['ctx']['expected']}, not {given}."
        case "model_type" | "dict_type":
            message = f"{param}: input should be an object, {given} given"
        case "value_error":  # raised by a validator of ours, which knows what to say
            message = f"{param}: {first['ctx']['error']}" if param else str(first["ctx"]["error"])
        case _:
            message = f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}, {given} given"
    return RequestError(message, param=param or None)


def _fields_at(kind: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the model that stands at ``path``."""
    for part in path:
        if isinstance(part, str):
            field = next(field for name, field in kind.model_fields.items() if part in (name, field.alias))
            kind = next(inner for inner in _models_in(field.annotation))
    return [field.alias or name for name, field in kind.model_fields.items()]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)]


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)  # True == 1 in Python, not in JSON

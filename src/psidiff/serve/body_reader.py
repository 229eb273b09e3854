"""Bodies of requests from bytes: the time it takes grows with the bytes, and all that can be
wrong is one sentence that names the field."""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..checksums import in_short
from ..limits import no_constant
from .config import Settings
from .errors import ApiError
from .schemas import (
    ALIASES,
    IGNORED,
    NOT_OFFERED,
    Message,
    SamplingBody,
    StreamOptions,
    TextPart,
)

_NAMES = 4096  # of an object
_DEEP = 8  # values that a list or an object counts as, before anything is parsed
_EXACT = 2**53  # whole numbers with a point are exact below it
# the last string may lack its end
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)

B = TypeVar("B", bound=SamplingBody)


def read_body(kind: type[B], raw: bytes, settings: Settings) -> B:
    """A body from bytes; all that can be wrong with them is one sentence.

    The time it takes grows with the bytes, and what it keeps with what the settings allow.
    """
    _check_size(raw, 2 * settings.samples * settings.length + _NAMES)
    fields = _parse(raw)
    for name, allowed in NOT_OFFERED.items():
        if name in fields and not _among(fields.pop(name), allowed):
            raise ApiError(400, f"{name} is not offered by this server", name, "unsupported")
    ignored = [name for name in IGNORED if fields.pop(name, None) is not None]
    for alias, name in ALIASES.items():
        if (value := fields.pop(alias, None)) is not None:
            if fields.get(name) is not None:
                raise ApiError(400, f"{alias} is another word for {name}: give one", alias)
            fields[name] = value
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _in_words(kind, error) from None
    if body.stream_options and body.stream_options.include_obfuscation is not None:
        ignored.append("stream_options.include_obfuscation")
    body._ignored = tuple(ignored)
    return body


def _among(value: Any, allowed: Sequence[Any]) -> bool:
    """Whether it is one of them, where false is no 0."""
    kind = isinstance(value, bool)
    return any(value == each and kind == isinstance(each, bool) for each in allowed)


def _check_size(raw: bytes, most: int) -> None:
    """No body with more values than `most` is parsed; lists and objects count many times, as
    they cost."""
    if _num_values(raw) > most and _num_values(_STRING.sub(b"", raw)) > most:
        said = f"the body holds more than {most:,} values"
        raise ApiError(400, f"{said} (--max-samples and --max-length raise that)")


def _num_values(text: bytes) -> int:
    return text.count(b",") + _DEEP * (text.count(b"[") + text.count(b"{"))


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
        fields = json.loads(
            text,
            parse_constant=no_constant,
            parse_float=_number,
            object_pairs_hook=_object,
        )
        if re.search(r"\\u[dD][89a-fA-F]", text):  # perhaps half a pair
            json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        reasons: dict[type[Exception], str] = {
            UnicodeDecodeError: "is not UTF-8",
            UnicodeEncodeError: "holds half a surrogate pair",
            RecursionError: "is not JSON: it nests too deeply",
        }
        said = f"the body {reasons.get(type(error), f'is not JSON: {error}')}"
        raise ApiError(400, said, code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return fields


def _number(text: str) -> int | float:
    """JSON has one kind of number: 3.0 is whole."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Each of its names is looked at: there are not too many."""
    if len(pairs) > _NAMES:
        said = f"an object of the body has {len(pairs):,} names, and may have {_NAMES:,}"
        raise ApiError(400, said)
    return dict(pairs)


def _in_words(kind: type[BaseModel], error: ValidationError) -> ApiError:
    """The first thing that is wrong, by the description of its field."""
    first = error.errors(include_url=False, include_context=False)[0]
    top, *inside = first["loc"]  # pydantic says there which of several types it tried, too
    loc = [top, *(part for part in inside if isinstance(part, int) or "[" not in part)]
    param, known = str(top)[:64], _fields_at(kind, loc)
    if first["type"] == "missing":
        return ApiError(400, f"{_path(loc)} is missing", param, "missing")
    if first["type"] == "extra_forbidden":
        near = get_close_matches(str(loc[-1])[:64], [*known, *ALIASES], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        said = f"there is no field {_path(loc)[:99]!r}{hint}"
        return ApiError(400, said, param, "unknown_field")
    while loc[-1] not in known:
        loc.pop()
    got = in_short(first["input"], 60)
    said = f"{_path(loc)} must be {known[loc[-1]].description}, got {got}"
    return ApiError(400, said, param, "invalid_value")


def _path(loc: Sequence[int | str]) -> str:
    """A place in a body, such as messages[0].content."""
    inside = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[1:])
    return str(loc[0])[:64] + "".join(inside)


def _fields_at(kind: type[BaseModel], loc: Sequence[int | str]) -> dict[Any, Any]:
    """The fields that a place in a body is in, or goes through."""
    inside: Any = {"messages": (Message, TextPart), "stream_options": (StreamOptions,)}
    if len(loc) == 1:
        return dict(kind.model_fields)
    first = str(loc[0])
    fields = [each.model_fields for each in inside.get(first, ())]
    return dict(ChainMap({first: kind.model_fields[first]}, *fields))

"""The bodies of requests: OpenAI's fields, and ours, which begin with `diffusion_`.

A field's description completes the sentence "... must be", which answers a wrong value.
"""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..checksums import in_short
from ..limits import no_constant
from ..sampler_options import OPTIONS
from .config import Settings
from .errors import ApiError

ALIASES = {
    "diffusion_max_steps": "diffusion_steps",
    "num_denoising_steps": "diffusion_steps",
    "block_length": "diffusion_canvas_length",
}
Word = Annotated[str, Field(max_length=99)]  # errors repeat it
First = Field(fail_fast=True)  # a list has room for a million mistakes: the first is enough
Words = Annotated[list[str], First]
Ids = Annotated[list[int], First]
_NAMES = 4096  # of an object
_DEEP = 8  # values that a list or an object counts as, before anything is parsed
# the last string may lack its end
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
# Fields of OpenAI's API that only pass with a value that asks for nothing.
_NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "parallel_tool_calls": (None, False, True),
    "functions": (None, []),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
}


def _field(must_be: str, **limits: Any) -> Any:
    return Field(default=None, description=must_be, **limits)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream ends with."""

    include_usage: bool | None = _field("true or false")


class SamplingBody(_Body):
    """What completions and chats share."""

    model: str = Field(description="the name of a model, a string")
    max_tokens: int | None = _field("a whole number of at least 1", ge=1)
    temperature: float | None = _field("a number from 0 to 2", ge=0, le=2)
    top_p: float | None = _field(OPTIONS["top_p"].must_be, gt=0, le=1)
    n: int | None = _field("a whole number of at least 1", ge=1)
    seed: int | None = _field("a whole number from 0 to 2**63 - 1", ge=0, lt=2**63)
    stop: str | Words | None = _field("a string, or a list of strings")
    stream: bool | None = _field("true or false")
    stream_options: StreamOptions | None = _field('an object such as {"include_usage": true}')
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = _field(
        "an object from token ids to numbers between -100 and 100"
    )
    user: str | None = _field("a string")
    metadata: dict[str, str] | None = _field("an object of strings")
    diffusion_steps: int | None = _field(OPTIONS["steps"].must_be, ge=1)
    diffusion_kappa: Word | None = _field(OPTIONS["kappa"].must_be)
    diffusion_preset: Word | None = _field("the name of a preset, such as paper-text")
    diffusion_predictor: Word | None = _field(OPTIONS["predictor"].must_be)
    diffusion_corrector: Word | None = _field(OPTIONS["corrector"].must_be)
    diffusion_sampler: Annotated[str, Field(max_length=499)] | None = _field(
        "a sampler in words, at most 499 characters, such as cap:.02 steps=64 grid=alpha"
    )
    diffusion_grid: Word | None = _field(OPTIONS["grid"].must_be)
    diffusion_schedule: Word | None = _field(OPTIONS["schedule"].must_be)
    diffusion_last: Literal["sample", "greedy"] | None = _field(OPTIONS["last"].must_be)
    diffusion_top_k: int | None = _field(OPTIONS["top_k"].must_be, ge=1)
    diffusion_min_p: float | None = _field(OPTIONS["min_p"].must_be, ge=0, le=1)
    diffusion_nucleus: Literal["keep", "drop"] | None = _field(OPTIONS["nucleus"].must_be)
    diffusion_processor: Word | None = _field(OPTIONS["processor"].must_be)
    diffusion_label: Annotated[int, Field(ge=0, lt=2**31)] | Word | None = _field(
        "the number or the name of a class"
    )
    diffusion_guidance: float | Word | None = _field(OPTIONS["guidance"].must_be)
    diffusion_guidance_on: Literal["x", "posterior"] | None = _field("x or posterior")
    diffusion_pinned: dict[str, int] | Annotated[list[int | None], First] | None = _field(
        "an object from positions to token ids, or a list of ids with null where free"
    )
    diffusion_canvas_length: int | None = _field("a whole number of at least 1", ge=1)
    diffusion_overlap: int | None = _field("a whole number of at least 1", ge=1)
    diffusion_deadline: float | None = _field("a number of seconds above 0", gt=0)
    diffusion_drafts: bool | None = _field("true or false")


class CompletionBody(SamplingBody):
    """Of /v1/completions."""

    prompt: str | Words | Ids | Annotated[list[Ids], First] | None = _field(
        "a string, a list of strings, a list of token ids, or a list of such lists"
    )
    suffix: str | None = _field("a string")
    echo: bool | None = _field("true or false")
    best_of: int | None = _field("a whole number of at least 1", ge=1)
    diffusion_infill: str | None = _field("a text with blanks such as {{8}}, or a puzzle")


class TextPart(_Body):
    """A part of a message."""

    type: str = Field(description="text", pattern="^text$")
    text: str = Field(description="a string")


class Message(_Body):
    """Of a conversation."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="one of system, developer, user, assistant"
    )
    content: str | Annotated[list[TextPart], First] = Field(
        description="a string, or a list of text parts"
    )
    name: str | None = _field("a string")

    def plain(self) -> dict[str, str]:
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ChatBody(SamplingBody):
    """Of /v1/chat/completions."""

    messages: Annotated[list[Message], First] = Field(
        description="a list of messages", min_length=1
    )
    max_completion_tokens: int | None = _field("a whole number of at least 1", ge=1)


B = TypeVar("B", bound=SamplingBody)


def read_body(kind: type[B], raw: bytes, settings: Settings) -> B:
    """A body from bytes; all that can be wrong with them is one sentence.

    The time it takes grows with the bytes, and what it keeps with what the settings allow.
    """
    _check_size(raw, 2 * settings.samples * settings.length + _NAMES)
    fields = _parse(raw)
    for name, allowed in _NOT_OFFERED.items():
        if name in fields and fields.pop(name) not in allowed:
            raise ApiError(400, f"{name} is not offered by this server", name, "unsupported")
    for alias, name in ALIASES.items():
        if alias in fields:
            if name in fields:
                raise ApiError(400, f"{alias} is another word for {name}: give one", alias)
            fields[name] = fields.pop(alias)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _in_words(kind, error) from None


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
        fields = json.loads(text, parse_constant=no_constant, object_pairs_hook=_object)
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

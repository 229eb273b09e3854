"""The bodies of requests: OpenAI's fields, and ours, which begin with `diffusion_`.

A field's description completes the sentence "... must be", which answers a wrong value.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from ..sampler_options import OPTIONS
from .errors import ApiError

ALIASES = {
    "diffusion_max_steps": "diffusion_steps",
    "num_denoising_steps": "diffusion_steps",
    "block_length": "diffusion_canvas_length",
}
Word = Annotated[str, Field(max_length=99)]  # errors repeat it
# a list has room for a million mistakes: the first is enough
First: Any = Field(fail_fast=True)
Words = Annotated[list[str], First]
Ids = Annotated[list[int], First]
# Fields of OpenAI's API that only pass with a value that asks for nothing.
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
# Fields that clients send by default and that change no answer: their names are answered.
IGNORED = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)


def _field(must_be: str, **limits: Any) -> Any:
    return Field(default=None, description=must_be, **limits)


class _Body(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False
    )


class StreamOptions(_Body):
    """What a stream ends with."""

    include_usage: bool | None = _field("true or false")
    include_obfuscation: bool | None = _field("true or false; it is ignored")


class SamplingBody(_Body):
    """What completions and chats share."""

    model: str = Field(description="the name of a model, a string")
    max_tokens: int | None = _field("a whole number of at least 1", ge=1)
    temperature: float | None = _field("a number from 0 to 2", ge=0, le=2)
    top_p: float | None = _field(OPTIONS["top_p"].must_be, gt=0, le=1)
    n: int | None = _field("a whole number of at least 1", ge=1)
    seed: int | None = _field("a whole number from -2**63 to 2**63 - 1", ge=-(2**63), lt=2**63)
    stop: str | Words | None = _field("a string, or a list of strings")
    stream: bool | None = _field("true or false")
    stream_options: StreamOptions | None = _field('an object such as {"include_usage": true}')
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = _field(
        "an object from token ids to numbers between -100 and 100"
    )
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
    _ignored: tuple[str, ...] = PrivateAttr(())  # what the body said besides, to no effect


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
    """Of a conversation. What was answered before may come back as it was."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="one of system, developer, user, assistant (this server offers no tools)"
    )
    content: str | Annotated[list[TextPart], First] | None = _field(
        "a string, or a list of text parts"
    )
    name: str | None = _field("a string")
    refusal: str | None = _field("a string")
    annotations: list[Any] | None = _field("a list")
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = _field(
        "left out (this server offers no tools)"
    )

    @model_validator(mode="before")
    @classmethod
    def _said(cls, fields: Any) -> Any:
        """Without fields that clients add and leave empty."""
        if not isinstance(fields, dict):
            return fields
        return {k: v for k, v in fields.items() if k in cls.model_fields or not _empty(v)}

    def plain(self) -> dict[str, str] | None:
        """Role and text; None where the text is missing; an assistant may leave it out."""
        said = self.content
        if self.role == "assistant":
            said = said or self.refusal or ""
        if said is None:
            return None
        text = said if isinstance(said, str) else "".join(part.text for part in said)
        return {"role": self.role, "content": text}


def _empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(each is None for each in value.values())
    return value is None or value == []


class ChatBody(SamplingBody):
    """Of /v1/chat/completions."""

    messages: Annotated[list[Message], First] = Field(
        description="a list of messages", min_length=1
    )
    max_completion_tokens: int | None = _field("a whole number of at least 1", ge=1)

    def conversation(self) -> list[dict[str, str]]:
        """Role and text of each message.

        Raises:
            ApiError: a message lacks its text.
        """
        found = []
        for number, message in enumerate(self.messages):
            if (said := message.plain()) is None:
                words = f"messages[{number}].content is missing"
                raise ApiError(400, words, "messages", "missing")
            found.append(said)
        return found

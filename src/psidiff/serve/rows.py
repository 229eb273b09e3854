"""Prompts as rows of tokens: what is given, and free places where the answer goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.infill import before_blank, blanks, frame, text_ids
from ..request import build_request
from ..types import FREE
from .chat_template import apply_chat_template
from .config import Settings
from .errors import ApiError, errors_for_field
from .schemas import ChatBody, CompletionBody, SamplingBody

if TYPE_CHECKING:
    from ..model import Model

_CHARACTERS = 16  # of a text for each token that a sample may have: more do not fit


@dataclass(frozen=True)
class Row:
    """Tokens, FREE where there is none yet. The answer is tokens[start:stop].

    open_ended: nothing follows the answer, so an end of text in it ends it.
    before: the prompt's last space, where it is part of the answer's first token; the answer
    goes without it.
    """

    tokens: Tensor
    start: int
    stop: int
    open_ended: bool
    before: str = ""

    @property
    def given(self) -> Tensor:
        """Where tokens came with the request, (L,)."""
        return self.tokens != FREE


def rows_of(model: Model, body: SamplingBody, settings: Settings) -> list[Row]:
    """One for each prompt; how many, and how long, is checked before anything is tokenized."""
    most = settings.length
    if isinstance(body, ChatBody):
        prompt = apply_chat_template(model, body.conversation())
        free = body.max_completion_tokens or body.max_tokens
        rows = [_text_row(model, prompt, None, free, most)]
    else:
        assert isinstance(body, CompletionBody)
        rows = _completion_rows(model, body, settings)
    return [replace(row, tokens=_pinned(model, body, row)) for row in rows]


def token_id(model: Model, name: str, token: int) -> int:
    """It is one of the model's."""
    size = model.codec.vocab_size if model.codec else getattr(model.prior, "vocab_size", 2**31)
    if not 0 <= token < size:
        said = f"{name}: {str(token)[:20]} is no token id; they go from 0 to {size - 1}"
        raise ApiError(400, said, name)
    return token


def whole_number(word: str) -> int | None:
    """A key of JSON as a number, if it is one."""
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else None


def at_most(name: str, value: int, most: int, what: str, option: str | None = None) -> None:
    """option: of `psidiff serve`, where whoever started the server can raise the limit."""
    if value > most:
        hint = "" if option is None else f" ({option})"
        said = f"{name}: this server allows {most} {what}{hint}, got {str(value)[:20]}"
        raise ApiError(400, said, name)


def _completion_rows(model: Model, body: CompletionBody, settings: Settings) -> list[Row]:
    codec, most = model.codec, settings.length
    kind = None if codec is None else codec.kind
    prompts = _prompts(body.prompt)
    count = (body.n or 1) * len(prompts)
    at_most("prompt", count, settings.samples, "samples in all", "--max-samples")
    if body.diffusion_infill is not None:
        return [_infill_row(model, body, most)]
    if kind == "puzzle" and any(isinstance(prompt, str) and prompt for prompt in prompts):
        return [_whole(_encoded(model, "prompt", str(prompt), most)) for prompt in prompts]
    if codec is not None and codec.length is not None and kind != "text":
        length = codec.length
        for name in ("suffix", "echo"):
            if getattr(body, name):
                raise ApiError(400, f"{name} is for models of text; this makes {kind}s", name)
        if any(prompts):
            raise ApiError(400, f"prompt: this model makes {kind}s, leave it empty", "prompt")
        if body.max_tokens not in (None, length):
            said = f"every {kind} of this model has {length} tokens"
            raise ApiError(400, said, "max_tokens")
        return [_whole(torch.full((length,), FREE)) for _ in prompts]
    rows = [_text_row(model, each, body.suffix, body.max_tokens, most) for each in prompts]
    if body.echo:  # without the suffix, as OpenAI's
        rows = [replace(row, start=int(model.config.framed), before="") for row in rows]
    return rows


def _prompts(prompt: Any) -> list[str | list[int]]:
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    if not prompt:
        raise ApiError(400, "prompt is an empty list", "prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt


def _text_row(
    model: Model, prompt: str | list[int], suffix: str | None, free: int | None, most: int
) -> Row:
    """The prompt, free tokens, the suffix; as many as the model is long where nobody says."""
    text = before_blank(model.codec, prompt) if isinstance(prompt, str) else prompt
    front, back = _ids(model, "prompt", text, most), _ids(model, "suffix", suffix or "", most)
    opening, closing = frame(model.codec, model.config.framed)
    front = [*opening.tolist(), *front]
    back = [*back, *closing.tolist()] if suffix else back
    known, length = len(front) + len(back), model.length
    if free is None:
        if length is None:
            said = "this model has no length of its own: give max_tokens"
            raise ApiError(400, said, "max_tokens")
        free = length - known if known < length else max(length // 2, 1)
    at_most("max_tokens", known + free, most, "tokens with what is given", "--max-length")
    tokens = torch.tensor([*front, *[FREE] * free, *back], dtype=torch.long)
    space = "" if text == prompt else " "
    return Row(tokens, len(front), len(front) + free, open_ended=not back, before=space)


def _ids(model: Model, name: str, text: str | list[int], most: int) -> list[int]:
    if not isinstance(text, str):
        at_most(name, len(text), most, "tokens", "--max-length")
        return [token_id(model, name, token) for token in text]
    return _encoded(model, name, text, most).tolist() if text else []


def _encoded(model: Model, name: str, text: str, most: int) -> Tensor:
    if model.codec is None:
        raise ApiError(400, f"{name}: this model has no tokenizer, give token ids", name)
    _check_size(name, text, most)
    try:
        return text_ids(model.codec, text)
    except ValueError as error:
        raise ApiError(400, f"{name}: {error}", name) from error


def _infill_row(model: Model, body: CompletionBody, most: int) -> Row:
    """A text with blanks, or a puzzle; its answer is the whole."""
    for name in ("prompt", "suffix", "max_tokens"):
        if getattr(body, name):
            raise ApiError(400, f"diffusion_infill says everything: leave {name} out", name)
    text = str(body.diffusion_infill)
    _check_size("diffusion_infill", text, most)
    with errors_for_field("diffusion_infill"):
        sizes = [part for part in blanks(text) if isinstance(part, int)] if "{{" in text else []
        if sum(sizes) > most:  # no billion tokens are ever made
            raise ValueError(f"blanks may have {most} tokens in all (--max-length)")
        request = build_request(model, 1, 1, infill=text)
    assert request.given is not None
    at_most("diffusion_infill", request.length, most, "tokens", "--max-length")
    frame = int(model.config.framed)  # a token that opens it, one that closes it
    return Row(request.given[0], frame, request.length - frame, open_ended=False)


def _check_size(name: str, text: str, most: int) -> None:
    """Tokenizing takes time and memory: a text that cannot fit is not looked at."""
    at_most(name, len(text), _CHARACTERS * most, "characters", "16 for each of --max-length")


def _whole(tokens: Tensor) -> Row:
    return Row(tokens, 0, len(tokens), open_ended=False)


def _pinned(model: Model, body: SamplingBody, row: Row) -> Tensor:
    """The row with what diffusion_pinned holds fixed of its answer."""
    pinned, name = body.diffusion_pinned, "diffusion_pinned"
    if pinned is None:
        return row.tokens
    if isinstance(pinned, list):
        pinned = {str(i): token for i, token in enumerate(pinned) if token not in (None, FREE)}
    tokens, size = row.tokens.clone(), row.stop - row.start
    for place, token in pinned.items():
        at = whole_number(place)
        if at is None or at >= size:
            said = f"{name}: {place[:20]!r} is no position of an answer of {size} tokens"
            raise ApiError(400, said, name)
        tokens[row.start + at] = token_id(model, name, token)
    return tokens

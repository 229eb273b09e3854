"""Rows in which some tokens are given: a prompt, an ending, a text with blanks.

-1 stands where a token is free.
"""

from __future__ import annotations

import re
from itertools import zip_longest

import torch
from torch import Tensor

from ..types import FREE
from .codec import Codec


def encode_prompt(
    codec: Codec,
    prompt: str | None = None,
    suffix: str | None = None,
    length: int | None = None,
    framed: bool = False,
) -> Tensor:
    """The prompt at the front, the suffix at the end, free tokens between: (length,).

    framed: rows of this model open with the codec's bos and close with its eos.
    """
    opening, closing = frame(codec, framed)
    front = torch.cat((opening, text_ids(codec, before_blank(codec, prompt or ""))))
    back = torch.cat((text_ids(codec, suffix), closing)) if suffix else text_ids(codec, "")
    if length is None:
        raise ValueError("this model does not say how long its sequences are: give length")
    named = "the prompt" if not suffix else "what is given"
    free = length - len(front) - len(back)
    if free < 1:
        raise ValueError(
            f"{named} has {len(front) + len(back)} tokens, and a sample has {length}: shorten "
            "it, or ask for a larger length"
        )
    return torch.cat((front, torch.full((free,), FREE), back))


def encode_template(
    codec: Codec, template: str, length: int | None = None, framed: bool = False
) -> Tensor:
    """A text with blanks: "Once upon a {{8}} there was" has a blank of 8 tokens.

    The row is as long as the template; up to a larger `length` free tokens follow. Where tokens
    begin with the space before them, a space before a blank is the blank's to write.
    """
    found = blanks(template)
    parts = [
        blank(p)
        if isinstance(p, int)
        else text_ids(codec, before_blank(codec, p) if isinstance(follows, int) else p)
        for p, follows in zip_longest(found, found[1:])
    ]
    opening, closing = frame(codec, framed)
    row = torch.cat((opening, *parts, closing if length is None else closing[:0]))
    if length is None:
        return row
    if length < len(row):
        raise ValueError(
            f"the template has {len(row)} tokens, more than the length of {length}"
        )
    return torch.cat((row, blank(length - len(row))))


def blanks(template: str) -> list[str | int]:
    """The texts of a template, and the sizes of the blanks between them."""
    parts = re.split(r"(\{\{[^{}]*\}\})", template)
    found: list[str | int] = []
    for part in filter(None, parts):
        if part.startswith("{{") and part.endswith("}}"):
            size = part[2:-2].strip()
            if not size.isdecimal() or int(size) < 1:
                raise ValueError(
                    f"a blank is {{{{n}}}} with the number of its tokens, such as {{{{8}}}}, "
                    f"got {part}"
                )
            found.append(int(size))
        elif "{{" in part or "}}" in part:
            raise ValueError(
                f"the template has a blank that is not {{{{n}}}}: look at {part.strip()[:40]!r}"
            )
        else:
            found.append(part)
    if not any(isinstance(part, int) for part in found):
        raise ValueError("the template has no blank: write {{8}} where 8 tokens are missing")
    return found


def before_blank(codec: Codec | None, text: str) -> str:
    """A text that free tokens follow: without its last space, if their first one brings it."""
    return text.removesuffix(" ") if codec is not None and codec.leading_spaces else text


def blank(size: int) -> Tensor:
    return torch.full((size,), FREE)


def text_ids(codec: Codec, text: str) -> Tensor:
    """The token ids (L,) of a text."""
    return torch.as_tensor(codec.encode(text)).long()


def frame(codec: Codec | None, framed: bool) -> tuple[Tensor, Tensor]:
    """The tokens that a row opens and closes with, where the codec has them."""
    ends = (codec.bos_id, codec.eos_id) if codec is not None and framed else (None, None)
    opening, closing = (
        torch.tensor([i] if i is not None else [], dtype=torch.long) for i in ends
    )
    return opening, closing

"""The text of an answer as it becomes certain: what was said is never taken back."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..data.codec import Codec
from ..generate import until_end
from .request_parsing import Prompt

_PARTIAL = "\ufffd"  # the bytes of a character that is not whole yet


class Choice:
    """One sample of one prompt. `grow` gives what is new; `reason` says why it ended.

    "length" is for an answer that could go on: a puzzle, an image, a text between others is
    whole, "stop".
    """

    def __init__(self, codec: Codec | None, prompt: Prompt) -> None:
        self.codec, self.prompt, self.row = codec, prompt, prompt.row
        self.text, self.made = "", 0
        self.reason: str | None = None
        self.tokens: list[int] = []

    @cached_property
    def _front(self) -> str:
        """The text before the answer, which is given."""
        return readable(self.codec, self.row.tokens[: self.row.start])

    def grow(self, tokens: Tensor, settled: int, last: bool = False) -> str:
        """The part of the text that is certain since the first `settled` tokens are."""
        if self.reason is not None:
            return ""
        row = tokens[self.row.start : min(settled, self.row.stop)]
        end = self.codec.end_id if self.codec is not None and self.row.open_ended else None
        row, ended = until_end(end, row, self.row.start == 0)  # a text without a prompt
        front = self._front
        text = readable(self.codec, torch.cat((tokens[: self.row.start], row)))
        text = text[len(front) :] if text.startswith(front) else readable(self.codec, row)
        text = text.removeprefix(self.row.before)
        stops = [at for stop in self.prompt.stops if (at := text.find(stop)) >= 0]
        cut = text[: min(stops, default=len(text))]
        if not (stops or ended or last):
            cut = self._held_back(cut)
        if stops or ended:
            self.reason = "stop"
        elif last:
            self.reason = "length" if self.row.open_ended else "stop"
        inside = int(self.row.given[self.row.start : self.row.stop].sum())
        self.tokens, self.made = tokens.tolist(), max(len(row) - inside, 0)
        new, self.text = cut[len(self.text) :], self.text + cut[len(self.text) :]
        return new

    def _held_back(self, text: str) -> str:
        """Without an ending that may turn out to be half a character, or open a stop."""
        text = text.rstrip(_PARTIAL)
        opening = 0
        for stop in self.prompt.stops:
            longest = min(len(stop) - 1, len(text))
            fits = (k for k in range(longest, 0, -1) if text.endswith(stop[:k]))
            opening = max(opening, next(fits, 0))
        return text[: len(text) - opening]


def readable(codec: Codec | None, tokens: Tensor) -> str:
    """Text where the codec knows it, else the numbers of the tokens."""
    if codec is None or codec.kind == "image":
        return " ".join(map(str, tokens.tolist()))
    if codec.kind == "puzzle":
        return codec.decode(tokens) if len(tokens) == codec.length else ""
    return codec.decode(tokens)

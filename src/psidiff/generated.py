"""Samples that know what their tokens mean: text, images, puzzles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .generate import Made


@dataclass(frozen=True)
class Decoded(Made):
    """Samples that know what their tokens mean.

    A text ends before its first end-of-text token, where the codec has one; `whole` shows all.
    """

    codec: Any = None
    whole: bool = False

    @property
    def text(self) -> list[str]:
        """Each sample as text; a puzzle as its lines."""
        return self._decoded("text", "puzzle")

    @property
    def images(self) -> list[Any]:
        """Each sample as an array of uint8, (H, W) or (H, W, 3)."""
        return self._decoded("image")

    def _decoded(self, *kinds: str) -> list[Any]:
        if self.codec is None or self.codec.kind not in kinds:
            kind = "tokens only" if self.codec is None else f"a codec for {self.codec.kind}"
            raise ValueError(f"this model has {kind}: its samples are not {kinds[0]}")
        end = None if self.whole else getattr(self.codec, "end_id", None)
        return [self.codec.decode(_until(end, row)) for row in self.tokens.cpu()]


def _until(end: int | None, row: Tensor) -> Tensor:
    """A row up to its end; ends that it opens with do not count."""
    if end is None:
        return row
    text = (row != end).nonzero()[:, 0]
    row = row[text[0] :] if len(text) else row[:0]
    ends = (row == end).nonzero()[:, 0]
    return row[: ends[0]] if len(ends) else row


def verdicts(made: Decoded) -> list[dict[str, bool]]:
    """Of each puzzle whether its grid is valid; of others nothing."""
    if made.codec is None or made.codec.kind != "puzzle":
        return [{} for _ in made.tokens]
    from .data.sudoku import valid

    return [{"valid": each} for each in valid(made.tokens).tolist()]

"""A step from logits that a pipeline has computed already, row by row.

The three weights of a token need one number of its row, and a predicted token one draw from it,
so nothing as wide as the vocabulary is made beyond a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sampling.filters import RowFilter, chain
from ..types import Tokens, at_least_float32

_CHUNK = 2**20  # logits in float32 at a time


@dataclass(frozen=True)
class Shaping:
    """What becomes of logits before tokens are drawn. Temperature 0: only the largest stays."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    nucleus: str = "keep"

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature:g}")
        self._chain()

    def drawing(self) -> RowFilter:
        """From a network's rows to those that tokens are drawn from."""
        return _only_the_largest if self.temperature == 0 else self._chain()

    def shown(self) -> RowFilter | None:
        """The same for others to look at; None: nothing changes.

        At temperature 0 that is the rows themselves: a row without doubt would tell a pipeline
        that the network has none.
        """
        truncated = self.top_k, self.top_p, self.min_p
        if self.temperature == 0 or (self.temperature == 1 and truncated == (None,) * 3):
            return None
        return self._chain()

    def _chain(self) -> RowFilter:
        return chain(self.temperature or 1.0, self.top_k, self.top_p, self.min_p, self.nucleus)


def _only_the_largest(logits: Tensor) -> Tensor:
    best = logits.argmax(-1, keepdim=True)
    return torch.full_like(logits, -torch.inf).scatter(-1, best, 0.0)


def looked_at(logits: Tensor, shaping: Shaping, drawn: Tokens) -> tuple[Tokens, Tensor, Tensor]:
    """Tokens, their probabilities, and the logits as they were shaped, (B, L, K).

    drawn (B, L) is -1 where the most probable token is wanted.
    """
    shown, shape = logits, shaping.shown()
    tokens, probs = drawn.clone(), torch.empty(drawn.shape, device=drawn.device)
    if shape is not None:
        shown = torch.empty_like(logits)
    for at in _chunks(logits):
        rows = at_least_float32(logits[at])
        if shape is not None:
            rows = shape(rows)
            shown[at] = rows.to(shown.dtype)
        tokens[at] = torch.where(drawn[at] < 0, rows.argmax(-1), drawn[at])
        chosen = rows.gather(-1, tokens[at][:, None])[:, 0]
        probs[at] = (chosen - rows.logsumexp(-1)).exp().float()
    return tokens, probs, shown


def _chunks(logits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """All (sequence, position), as many at a time as there is room for."""
    num_samples, length, vocab_size = logits.shape
    places = torch.arange(num_samples * length, device=logits.device)
    for part in places.split(max(_CHUNK // vocab_size, 1)):
        yield part // length, part % length

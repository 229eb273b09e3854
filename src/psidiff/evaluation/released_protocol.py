"""Generative perplexity as the released code measures it, whose numbers the papers print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .sequence_nll import autoregressive_nll

RELEASED_BATCH = 8
RELEASED_CONTEXT = 1024


def score_as_released(
    logits: Callable[[Tensor], Tensor],
    rows: Sequence[Sequence[int]],
    end: int | None,
    max_length: int,
    context: int,
    **how: Any,
) -> list[tuple[float, int, bool]]:
    """(-log p, scored tokens, whether it was cut) of texts; those that do not fill the last
    batch of 8 are left out.

    A text is cut to `max_length` of the judge's tokens, padded by end-of-text tokens to the
    longest of them, and cut into pieces of `context`. Nothing comes before a piece, so its
    first token is not scored. All others are, also those after an end of text; but of the ends
    in a piece, padding among them, only the first. end: None where the judge has none.
    """
    cut = [list(row[:max_length]) for row in rows]
    longest = max(map(len, cut))
    kept = len(cut) - len(cut) % min(RELEASED_BATCH, len(cut))
    pieces, owners = [], []
    for number, row in enumerate(cut[:kept]):
        padded = row if end is None else row + [end] * (longest - len(row))
        for piece in torch.tensor(padded, dtype=torch.long).split(context):
            pieces.append(piece)
            owners.append(number)
    scored = [_scored(piece, end) for piece in pieces]
    sizes = [int(mask.nonzero().max()) + 1 if mask.any() else 0 for mask in scored]
    found = autoregressive_nll(  # what comes after the last scored token changes nothing
        logits,
        None,
        [piece[:size] for piece, size in zip(pieces, sizes, strict=True)],
        scored=[mask[:size] for mask, size in zip(scored, sizes, strict=True)],
        **how,
    )
    nats, tokens = [0.0] * kept, [0] * kept
    for number, each in zip(owners, found, strict=True):
        nats[number] += each.nats
        tokens[number] += each.num_tokens
    is_cut = [len(row) > max_length for row in rows[:kept]]
    return list(zip(nats, tokens, is_cut, strict=True))


def _scored(piece: Tensor, end: int | None) -> Tensor:
    """Which tokens of a piece count, (L,): not the first, and of the ends only the first."""
    ends = piece == (-1 if end is None else end)
    return (~ends | (ends.cumsum(0) == 1)) & (torch.arange(len(piece)) > 0)

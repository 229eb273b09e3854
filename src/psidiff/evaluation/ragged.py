"""Sequences of unequal length, met in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..types import as_count

Sequences = Sequence[Tensor]
"""Token ids, or marks of them, (L_i,) each."""


@dataclass(frozen=True)
class Piece:
    """Some draws of one row."""

    row: int
    draws: slice

    def __len__(self) -> int:
        return self.draws.stop - self.draws.start


def in_batches(
    lengths: Sequence[int], draws: int, batch_size: int, mixed: bool
) -> Iterator[list[Piece]]:
    """All draws of all rows, at most `batch_size` at a time, the short ones first.

    Unless lengths may be mixed, a batch has one of them. Rows of length 0 are left out.
    """
    batch: list[Piece] = []
    room = as_count("batch_size", batch_size)
    for row in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i]):
        if batch and not mixed and lengths[row] != lengths[batch[-1].row]:
            yield batch
            batch, room = [], batch_size
        first = 0
        while first < draws:
            last = min(first + room, draws)
            batch.append(Piece(row, slice(first, last)))
            first, room = last, room - (last - first)
            if not room:
                yield batch
                batch, room = [], batch_size
    if batch:
        yield batch


def joined(blocks: list[Tensor]) -> Tensor:
    """Blocks (n_i, L_i) as one, padded on the right with zeros: tokens, clean, not real."""
    longest = max(block.shape[1] for block in blocks)
    return torch.cat([F.pad(block, (0, longest - block.shape[1])) for block in blocks])


def marks_of(rows: Sequences, scored: Sequences | None) -> list[Tensor]:
    if scored is None:
        return [torch.ones(len(row), dtype=torch.bool) for row in rows]
    for row, mark in zip(rows, scored, strict=True):
        if row.shape != mark.shape:
            raise ValueError(
                f"scored must mark the tokens of its row: {len(mark)} marks, {len(row)} tokens"
            )
    return [mark.bool().cpu() for mark in scored]

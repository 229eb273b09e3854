"""Validation: the mean of an objective over held-out data, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed import Processes
from ..types import Dataset
from .batch import Batch, stratified_times
from .objective import Objective
from .shuffling import seeded


class Estimate(NamedTuple):
    """Nats a token, and the standard error over sequences."""

    mean: float
    standard_error: float
    sequences: int


@torch.no_grad()
def validate(
    objective: Objective,
    denoiser: Any,
    data: Dataset,
    sequences: int,
    piece: int = 32,
    seed: int = 0,
    group: Processes | None = None,
    on_piece: Callable[[int, int], None] | None = None,
) -> Estimate:
    """`objective` on so many rows, spread over the data (all of it, if it has fewer).

    Times are stratified and all chance is a function of the seed, so two runs compare on common
    random numbers. Processes share the pieces. on_piece(rows so far, of how many) is called
    after each piece of this one's; what it raises ends the validation.
    """
    group = group or Processes()
    count = min(sequences, len(data))
    chosen = torch.arange(count) * len(data) // count
    times = stratified_times(count, seeded(seed, 0), t_min=0.0)[
        torch.randperm(count, generator=seeded(seed, 1))
    ]
    sums = torch.zeros(count, 2, dtype=torch.float64)  # nats and tokens of each sequence
    for number, first in enumerate(range(0, count, piece)):
        if number % group.world == group.rank:
            part = slice(first, first + piece)
            generator = seeded(seed, 2, number)
            tokens, labels, real, _ = data.rows(chosen[part])
            moved = [None if v is None else v.to(group.device) for v in (tokens, labels, real)]
            batch = Batch(moved[0], times[part], moved[1], real=moved[2])
            sums[part] = _totals(objective(denoiser, batch, generator), batch)
            if on_piece is not None:
                on_piece(min(first + piece, count), count)
    return _estimate(group.mean(sums).cpu().double() * group.world)


def _totals(loss: Tensor, batch: Batch) -> Tensor:
    learnt = torch.ones_like(loss) if batch.real is None else batch.real.to(loss)
    return torch.stack((loss.sum(-1), learnt.sum(-1)), -1).cpu().double()


def _estimate(sums: Tensor) -> Estimate:
    """A ratio of sums, and its error to first order."""
    nats, tokens = sums.unbind(-1)
    mean = nats.sum() / tokens.sum()
    spread = ((nats - mean * tokens) ** 2).sum().sqrt() / tokens.sum()
    count = len(nats)
    error = spread.item() * math.sqrt(count / (count - 1)) if count > 1 else math.inf
    return Estimate(mean.item(), error, count)

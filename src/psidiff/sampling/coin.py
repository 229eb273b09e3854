"""One coin a token decides its route, and often before the network is asked.

u < W_predict: predicted; u < W_predict + W_renoise: renoised; else kept. Both weights grow with
p, the chance that z is noise, so what they are at most says whose p nobody needs to know.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tossed(NamedTuple):
    """What coins (B, L) say without the network."""

    limit: Tensor  # the most that W_predict + W_renoise can be
    renoised: Tensor  # for certain
    needed: Tensor  # where the network decides


def toss(
    u: Tensor, free: Tensor, masked: Tensor, doubtful: Tensor, predict: Tensor, renoise: Tensor
) -> Tossed:
    """predict, renoise: the weights at p = 1 where z can be noise (`doubtful`), else at p = 0.

    A mask is noise for sure, and what is not doubtful is not: there the bound is the truth.
    """
    limit = predict + renoise
    certain = masked | ~doubtful
    renoised = free & certain & (u >= predict) & (u < limit)
    needed = free & doubtful & (u < torch.where(certain, predict, limit))
    return Tossed(limit, renoised, needed)


def settle(u: Tensor, predict: Tensor, renoise: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Which are predicted and which renoised, by the weights at the network's own p."""
    predicted = u < predict
    changed = u < torch.minimum(predict + renoise, limit)
    return predicted, changed & ~predicted

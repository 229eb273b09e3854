"""The route of each token from one uniform number, often before the network runs.

u < W_predict: predicted; u < W_predict + W_renoise: renoised; else kept. Both weights grow with
p, the probability that z is noise, so their bounds tell which tokens do not need p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KEPT, PREDICTED, RENOISED = 0, 1, 2


class RouteBounds(NamedTuple):
    """What uniforms (B, L) decide without the network."""

    limit: Tensor  # the largest value of W_predict + W_renoise
    renoised: Tensor  # for certain
    needed: Tensor  # where the network decides


def bound_routes(
    u: Tensor,
    free: Tensor,
    masked: Tensor,
    can_be_noise: Tensor,
    predict: Tensor,
    renoise: Tensor,
) -> RouteBounds:
    """Decide the routes that do not depend on the network.

    Args:
        u: uniforms, one per token, (B, L) as all others.
        free: False where a token is given.
        masked: where z is the mask, which is noise for certain.
        can_be_noise: where z may be a draw from the prior.
        predict, renoise: upper bounds of the two weights; exact where z is the mask or cannot
            be noise.
    """
    limit = predict + renoise
    certain = masked | ~can_be_noise
    renoised = free & certain & (u >= predict) & (u < limit)
    needed = free & can_be_noise & (u < torch.where(certain, predict, limit))
    return RouteBounds(limit, renoised, needed)


def choose_routes(
    u: Tensor, predict: Tensor, renoise: Tensor, limit: Tensor
) -> tuple[Tensor, Tensor]:
    """Which tokens are predicted and which renoised, by the weights at the network's own p."""
    predicted = u < predict
    changed = u < torch.minimum(predict + renoise, limit)
    return predicted, changed & ~predicted

"""Between the two things a denoiser may predict: p(x_l | z without z_l) and p(x_l | z).

The first, leave-one-out, is what minimising the NELBO yields and what posteriors expect. By
Bayes' rule they differ in one logit, that of z_l itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Level, Probs, Tokens, per_token
from .prior import Prior


def to_leave_one_out(prior: Prior, z: Tokens, logits: Probs, alpha: Level) -> Probs:
    """Convert p(x_l | z) to p(x_l | z without z_l).

    Subtracts log(1 + alpha/((1-alpha) pi_z)) from the logit of z, which for the uniform prior
    is log1p(K alpha/(1-alpha)).

    Args:
        prior: the noise pi over K tokens.
        z: token ids z_t, (B, L).
        logits: of p(x_l | z), (B, L, K).
        alpha: level, a float or a tensor that broadcasts to (B, L, 1).

    Returns:
        Logits (B, L, K), not normalised.

    Example:
        >>> from psidiff.process import Uniform, to_leave_one_out
        >>> to_leave_one_out(Uniform(2), torch.tensor([[0]]), torch.zeros(1, 1, 2), 0.5)
        tensor([[[-1.0986,  0.0000]]])
    """
    return _shift(prior, z, logits, alpha, -1)


def to_plain(prior: Prior, z: Tokens, logits: Probs, alpha: Level) -> Probs:
    """Convert p(x_l | z without z_l) to p(x_l | z): the inverse of `to_leave_one_out`.

    Args:
        prior: the noise pi over K tokens.
        z: token ids z_t, (B, L).
        logits: of p(x_l | z without z_l), (B, L, K).
        alpha: level, a float or a tensor that broadcasts to (B, L, 1).

    Returns:
        Logits (B, L, K), not normalised.

    Example:
        >>> from psidiff.process import Uniform, to_plain
        >>> to_plain(Uniform(2), torch.tensor([[0]]), torch.zeros(1, 1, 2), 0.5).softmax(-1)
        tensor([[[0.7500, 0.2500]]])
    """
    return _shift(prior, z, logits, alpha, 1)


def own_odds(prior: Prior, z: Tokens, alpha: Level, like: Tensor) -> Tensor:
    """log(1 + alpha/((1-alpha) pi_z)): what z itself says of x, over what the others say.

    Plus it turns leave-one-out logits into plain ones at z, minus it back (B, L).
    """
    noise = (1 - per_token(alpha)) * prior.probs(like=like)[z]
    odds = per_token(alpha) / torch.where(noise > 0, noise, torch.inf)  # not noise: left as is
    return odds.log1p()


def _shift(prior: Prior, z: Tokens, logits: Probs, alpha: Level, sign: int) -> Probs:
    odds = own_odds(prior, z, alpha, like=logits)
    return logits.scatter_add(-1, z[..., None], sign * odds[..., None].to(logits))

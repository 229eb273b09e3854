"""The forward process and its reversal, for any prior.

Going from t back to s, a token is kept as it is, predicted by the denoiser, or replaced by
fresh noise. All that the network has to say about these three chances is one number a token:
the chance that z_t is noise at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from ..kernels.counter_rng import Purpose, Stream
from ..kernels.exponential_race import block_race
from ..types import (
    Level,
    PerToken,
    Probs,
    Tokens,
    as_tokens,
    check_falls,
    check_level,
    check_shape,
    check_tensor,
    check_unit,
    per_token,
    working_dtype,
)
from .prior import Prior


def marginal(prior: Prior, x: Probs, alpha: Level) -> Probs:
    """q_t(. | x) = alpha_t x + (1 - alpha_t) pi  (Eq. 1)"""
    check_tensor("x", x)
    check_shape("x", x, (*x.shape[:-1], prior.vocab_size))
    check_level("alpha", alpha, tuple(x.shape[:-1]))
    return alpha * x + (1 - alpha) * prior.probs(like=x)


def corrupt(
    prior: Prior, tokens: Tokens, alpha: Level, generator: Generator | None = None
) -> Tokens:
    """z_t ~ q_t(. | x): keep each token with probability alpha_t, else redraw it from pi."""
    tokens = as_tokens("tokens", tokens, prior.vocab_size)
    check_level("alpha", alpha, tuple(tokens.shape))
    return corrupted(prior, tokens, alpha, generator)


def corrupted(
    prior: Prior, tokens: Tokens, alpha: Level, generator: Generator | None = None
) -> Tokens:
    """`corrupt` without its checks, which would make a GPU wait."""
    stream = Stream.seeded(generator, (tokens.shape[0], tokens.shape[1]), tokens.device)
    u = stream.uniform(0, Purpose.COIN, working_dtype(tokens.device))
    noise = prior.from_bits(stream.bits(0, Purpose.NOISE))
    return torch.where(u < per_token(alpha), tokens, noise)


@dataclass(frozen=True)
class Mixture:
    """z_s given z_t: keep z_t, predict it from x, or renoise it from pi."""

    keep: Any  # (B, L), each
    predict: Any
    renoise: Any

    def probs(self, prior: Prior, z: Tokens, x: Probs) -> Probs:
        """The distribution over all K tokens."""
        drawn = self.predict[..., None] * x + self.renoise[..., None] * prior.probs(like=x)
        return drawn.scatter_add(-1, z[..., None].long(), self.keep[..., None].to(drawn))

    def sample(
        self, prior: Prior, z: Tokens, x: Probs, generator: Generator | None = None
    ) -> Tokens:
        """z_s. Only the tokens to be predicted cost a draw from x."""
        stream = Stream.seeded(generator, (z.shape[0], z.shape[1]), z.device)
        u = stream.uniform(0, Purpose.COIN, x.dtype)
        predicted = u < self.predict
        renoised = ~predicted & (u < self.predict + self.renoise)
        z_s = torch.where(renoised, prior.from_bits(stream.bits(0, Purpose.NOISE)), z)
        z_s[predicted] = block_race(x[predicted], stream.bits(0, Purpose.DRAW)[predicted])
        return z_s


Predictor = Callable[[Level, Level, Level], Mixture]
"""(p_noise, alpha_s, alpha_t) -> the step t -> s, where p_noise = P(z_t is noise | z_t)."""


def noise_probability(pi_z: Tensor, x_z: Tensor, alpha_t: Level) -> Tensor:
    """P(z_t is a draw from pi, not the clean token) = (1 - alpha_t) pi_z / q_t(z_t | x)

    Where pi_z = 0 a token cannot be noise, and at alpha_t = 1 nothing is.
    """
    noise = (1 - alpha_t) * pi_z
    return noise / torch.where(noise > 0, alpha_t * x_z + noise, 1)


def markov(p_noise: Level, alpha_s: Level, alpha_t: Level) -> Mixture:
    """q_{s|t}: redraw z_t if it is noise that arrived between s and t; from q_s then.

    P(it arrived after s | it is noise) = (1 - alpha_{t|s}) / (1 - alpha_t)
    """
    survival = _ratio(alpha_t, alpha_s, empty=1.0)  # alpha_{t|s}
    redrawn = p_noise * _ratio(1 - survival, 1 - alpha_t)
    return Mixture(1 - redrawn, redrawn * alpha_s, redrawn * (1 - alpha_s))


def maximal(p_noise: Level, alpha_s: Level, alpha_t: Level) -> Mixture:
    """Stay at z_t with the largest chance that keeps the marginals, else take a clean token.

    stay a = (1 - alpha_s) / (1 - alpha_t), clean token b = alpha_s - a alpha_t = 1 - a. The
    clean token is drawn from q_{0|t}: z_t itself unless that is noise, then x.
    """
    clean = 1 - _ratio(1 - alpha_s, 1 - alpha_t, empty=1.0)
    return Mixture(1 - clean * p_noise, clean * p_noise, 0 * p_noise)


PREDICTORS: dict[str, Predictor] = {"markov": markov, "maximal": maximal}


def superpose(
    predictor: Predictor, p_noise: Level, alpha_s: Level, alpha_t: Level, kappa: Level
) -> Mixture:
    """kappa (predictor) + (1 - kappa) [alpha_s q_{0|t} + (1 - alpha_s) pi]  (Eq. 12)"""
    forth = predictor(p_noise, alpha_s, alpha_t)
    predict = kappa * forth.predict + (1 - kappa) * alpha_s * p_noise
    renoise = kappa * forth.renoise + (1 - kappa) * (1 - alpha_s)
    return Mixture(1 - predict - renoise, predict, renoise)


def posterior(prior: Prior, z: Tokens, x: Probs, alpha_s: Level, alpha_t: Level) -> Mixture:
    """q_{s|t}(. | z_t, x): Bayes' rule on Eq. 1. Eqs. 2 and 3 are its two special cases."""
    return psi(prior, z, x, alpha_s, alpha_t, 1.0)


def psi(
    prior: Prior,
    z: Tokens,
    x: Probs,
    alpha_s: Level,
    alpha_t: Level,
    kappa: float | int | PerToken,
    predictor: Predictor = markov,
) -> Mixture:
    """Psi_{s|t} = kappa_t q_{s|t} + (1 - kappa_t) q_s(. | q_{0|t})  (Eq. 12)"""
    z = as_tokens("z", z, prior.vocab_size)
    check_falls(alpha_s, alpha_t, tuple(z.shape))
    check_unit("kappa", kappa)
    check_shape("x", x, (*z.shape, prior.vocab_size))
    if bool((x < -1e-6).any()):
        raise ValueError(f"x must hold probabilities, not their logarithms, got {x.min():g}")
    if isinstance(kappa, Tensor) and kappa.ndim:
        check_shape("kappa", kappa, tuple(z.shape))
    alpha_s, alpha_t = per_token(alpha_s), per_token(alpha_t)
    x_z = x.gather(-1, z[..., None]).squeeze(-1)
    p_noise = noise_probability(prior.probs(like=x)[z], x_z, alpha_t)
    return superpose(predictor, p_noise, alpha_s, alpha_t, kappa)


def _ratio(part: Level, whole: Level, empty: float = 0.0) -> Level:
    """part / whole, and `empty` where the whole is 0."""
    if isinstance(whole, Tensor):
        return torch.where(whole == 0, empty, part / torch.where(whole == 0, 1, whole))
    return part / whole if whole else empty

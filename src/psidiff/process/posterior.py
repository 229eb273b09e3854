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

from ..kernels.counter_rng import CounterRNG, Purpose, blocked_race
from ..types import (
    Level,
    PerToken,
    Probs,
    Tokens,
    as_tokens,
    check_alpha_order,
    check_level,
    check_shape,
    check_tensor,
    check_unit,
    per_token,
    working_dtype,
)
from .prior import Prior


def marginal(prior: Prior, x: Probs, alpha: Level) -> Probs:
    """q_t(. | x) = alpha_t x + (1 - alpha_t) pi  (Eq. 1)

    Args:
        prior: the noise pi over K tokens.
        x: probabilities of the clean tokens, (B, L, K).
        alpha: level, a float or a tensor that broadcasts to (B, L, 1).

    Returns:
        Probabilities (B, L, K).

    Example:
        >>> from psidiff.process import Uniform, marginal
        >>> x = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
        >>> marginal(Uniform(4), x, 0.6)
        tensor([[[0.7000, 0.1000, 0.1000, 0.1000]]])
    """
    check_tensor("x", x)
    check_shape("x", x, (*x.shape[:-1], prior.vocab_size))
    check_level("alpha", alpha, tuple(x.shape[:-1]))
    return alpha * x + (1 - alpha) * prior.probs(like=x)


def corrupt(
    prior: Prior, tokens: Tokens, alpha: Level, generator: Generator | None = None
) -> Tokens:
    """z_t ~ q_t(. | x): keep each token with probability alpha_t, else redraw it from pi.

    Args:
        prior: the noise pi over K tokens.
        tokens: clean token ids x, (B, L).
        alpha: level, a float or a tensor that broadcasts to (B, L, 1).
        generator: where one random key is drawn from; None: torch's global generator.

    Returns:
        Noised token ids z_t, (B, L).

    Raises:
        ValueError: if ids or levels are out of range.

    Example:
        >>> from psidiff.process import Masked, corrupt
        >>> tokens = torch.arange(4)[None]
        >>> z = corrupt(Masked(5, mask_id=4), tokens, 0.5, torch.Generator().manual_seed(0))
        >>> bool(((z == tokens) | (z == 4)).all())
        True
    """
    tokens = as_tokens("tokens", tokens, prior.vocab_size)
    check_level("alpha", alpha, tuple(tokens.shape))
    return corrupt_unchecked(prior, tokens, alpha, generator)


def corrupt_unchecked(
    prior: Prior, tokens: Tokens, alpha: Level, generator: Generator | None = None
) -> Tokens:
    """`corrupt` without its checks, which would make a GPU wait."""
    stream = CounterRNG.seeded(generator, (tokens.shape[0], tokens.shape[1]), tokens.device)
    u = stream.uniform(0, Purpose.COIN, working_dtype(tokens.device))
    noise = prior.from_bits(stream.bits(0, Purpose.NOISE))
    return torch.where(u < per_token(alpha), tokens, noise)


@dataclass(frozen=True)
class Mixture:
    """The distribution of z_s given z_t: keep z_t, predict it from x, or renoise it from pi.

    Args:
        keep: probability that z_s is z_t, (B, L).
        predict: probability that z_s is drawn from x, (B, L).
        renoise: probability that z_s is drawn from pi, (B, L); the three sum to 1.

    Example:
        >>> from psidiff.process import Masked, posterior
        >>> prior, z = Masked(3, mask_id=2), torch.tensor([[2, 0]])
        >>> x = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
        >>> posterior(prior, z, x, alpha_s=0.6, alpha_t=0.2).predict  # a mask, and a token
        tensor([[0.5000, 0.0000]])
    """

    keep: Any  # (B, L), each
    predict: Any
    renoise: Any

    def probs(self, prior: Prior, z: Tokens, x: Probs) -> Probs:
        """Compute the distribution over all K tokens.

        Args:
            prior: the noise pi.
            z: token ids z_t, (B, L).
            x: probabilities of the clean tokens, (B, L, K).

        Returns:
            Probabilities of z_s, (B, L, K).

        Example:
            >>> from psidiff.process import Uniform, posterior
            >>> z, x = torch.tensor([[0]]), torch.full((1, 1, 4), 0.25)
            >>> mixture = posterior(Uniform(4), z, x, alpha_s=0.6, alpha_t=0.2)
            >>> mixture.probs(Uniform(4), z, x).sum(-1)
            tensor([[1.]])
        """
        drawn = self.predict[..., None] * x + self.renoise[..., None] * prior.probs(like=x)
        return drawn.scatter_add(-1, z[..., None].long(), self.keep[..., None].to(drawn))

    def sample(
        self, prior: Prior, z: Tokens, x: Probs, generator: Generator | None = None
    ) -> Tokens:
        """Draw z_s. Only the tokens to be predicted cost a draw from x.

        Args:
            prior: the noise pi.
            z: token ids z_t, (B, L).
            x: probabilities of the clean tokens, (B, L, K).
            generator: where one random key is drawn from; None: torch's global generator.

        Returns:
            Token ids z_s, (B, L).

        Example:
            >>> from psidiff.process import Uniform, posterior
            >>> z, x = torch.tensor([[0, 1]]), torch.full((1, 2, 4), 0.25)
            >>> posterior(Uniform(4), z, x, 0.6, 0.2).sample(Uniform(4), z, x).shape
            torch.Size([1, 2])
        """
        stream = CounterRNG.seeded(generator, (z.shape[0], z.shape[1]), z.device)
        u = stream.uniform(0, Purpose.COIN, x.dtype)
        predicted = u < self.predict
        renoised = ~predicted & (u < self.predict + self.renoise)
        z_s = torch.where(renoised, prior.from_bits(stream.bits(0, Purpose.NOISE)), z)
        z_s[predicted] = blocked_race(x[predicted], stream.bits(0, Purpose.DRAW)[predicted])
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

    Args:
        p_noise: P(z_t is noise | z_t), (B, L) or a float.
        alpha_s: level after the step, at least alpha_t.
        alpha_t: level before the step.

    Returns:
        The step from t to s as a `Mixture`; its `renoise` is 0.

    Example:
        >>> from psidiff.process import maximal
        >>> maximal(1.0, alpha_s=0.5, alpha_t=0.0)
        Mixture(keep=0.5, predict=0.5, renoise=0.0)
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
    """q_{s|t}(. | z_t, x): Bayes' rule on Eq. 1. Eqs. 2 and 3 are its two special cases.

    Args:
        prior: the noise pi over K tokens.
        z: token ids z_t, (B, L).
        x: probabilities of the clean tokens, (B, L, K); a one-hot for the true posterior.
        alpha_s: level after the step, a float or a tensor that broadcasts to (B, L, 1).
        alpha_t: level before the step, at most alpha_s.

    Returns:
        A `Mixture` with weights (B, L).

    Raises:
        ValueError: if alpha_s < alpha_t, or x does not hold probabilities.

    Example:
        >>> from psidiff.process import Uniform, posterior
        >>> z, x = torch.tensor([[0]]), torch.tensor([[[0.7, 0.1, 0.1, 0.1]]])
        >>> posterior(Uniform(4), z, x, alpha_s=1.0, alpha_t=0.5).renoise
        tensor([[0.]])
    """
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
    """Psi_{s|t} = kappa_t q_{s|t} + (1 - kappa_t) q_s(. | q_{0|t})  (Eq. 12)

    Args:
        prior: the noise pi over K tokens.
        z: token ids z_t, (B, L).
        x: probabilities of the clean tokens, (B, L, K).
        alpha_s: level after the step, a float or a tensor that broadcasts to (B, L, 1).
        alpha_t: level before the step, at most alpha_s.
        kappa: 1 for the ancestral posterior, 0 for the corrector alone; a float or (B, L).
        predictor: `markov` or `maximal`, a function (p_noise, alpha_s, alpha_t) -> Mixture.

    Returns:
        A `Mixture` with weights (B, L).

    Raises:
        ValueError: if alpha_s < alpha_t, kappa is not in [0, 1], or x holds no probabilities.

    Example:
        >>> from psidiff.process import Uniform, psi
        >>> z, x = torch.tensor([[0]]), torch.tensor([[[0.7, 0.1, 0.1, 0.1]]])
        >>> psi(Uniform(4), z, x, alpha_s=0.6, alpha_t=0.5, kappa=0.5).keep.round(decimals=4)
        tensor([[0.6772]])
    """
    z = as_tokens("z", z, prior.vocab_size)
    check_alpha_order(alpha_s, alpha_t, tuple(z.shape))
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


# Between the two things a denoiser may predict: p(x_l | z without z_l), leave-one-out, which is
# what minimising the NELBO yields and posteriors expect, and p(x_l | z). By Bayes' rule they
# differ in one logit, that of z_l itself.


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


def self_log_odds(prior: Prior, z: Tokens, alpha: Level, like: Tensor) -> Tensor:
    """log(1 + alpha/((1-alpha) pi_z)): what z itself says of x, over what the others say.

    Plus it turns leave-one-out logits into plain ones at z, minus it back (B, L).
    """
    noise = (1 - per_token(alpha)) * prior.probs(like=like)[z]
    odds = per_token(alpha) / torch.where(noise > 0, noise, torch.inf)  # not noise: left as is
    return odds.log1p()


def _shift(prior: Prior, z: Tokens, logits: Probs, alpha: Level, sign: int) -> Probs:
    odds = self_log_odds(prior, z, alpha, like=logits)
    return logits.scatter_add(-1, z[..., None], sign * odds[..., None].to(logits))

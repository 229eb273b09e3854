"""The per-token integrand of the continuous-time negative ELBO."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor
from torch.nn import functional as F

from ..types import Level, PerToken, Probs, Tokens, check_ids, check_unit
from .prior import Masked, Prior, Uniform


def nelbo(
    prior: Prior, z: Tokens, x: Tokens, log_x_theta: Probs, alpha: Level, dalpha: Level
) -> PerToken:
    """Nats a token and unit of time; its mean over z_t ~ q_t(. | x), integrated over t, bounds
    -log p(x) up to KL(q_1 || p_1). Always >= 0 (the paper's Eq. 4 has a spurious minus)."""
    check_unit("alpha", alpha)
    check_ids("z", z, prior.vocab_size)
    check_ids("x", x, prior.vocab_size)
    return integrand(prior, z, x, log_x_theta, alpha, dalpha)


def general(
    prior: Prior, z: Tokens, x: Tokens, log_x_theta: Probs, alpha: Level, dalpha: Level
) -> PerToken:
    """-alpha'/alpha * pi_z/q_z * [KL(q || p) + rho - 1 - log rho],  rho = q_z/p_z

    q and p are the marginals (Eq. 1) of x and of x_theta. For the uniform prior this is Eq. 5.
    """
    alpha, dalpha = _as(log_x_theta, alpha), _as(log_x_theta, dalpha)
    pi = prior.probs(like=log_x_theta)
    q = alpha * F.one_hot(x, prior.vocab_size).to(log_x_theta) + (1 - alpha) * pi
    p = alpha * log_x_theta.exp() + (1 - alpha) * pi
    divergence = torch.where(q > 0, q * _log_ratio(q, p), 0).sum(-1, keepdim=True)
    q_z, p_z = q.gather(-1, z[..., None]), p.gather(-1, z[..., None])
    noisy = (pi[z] > 0).unsqueeze(-1)
    log_rho = _log_ratio(q_z, torch.where(noisy, p_z, 1))
    rate = -dalpha / alpha * pi[z][..., None] / torch.where(noisy, q_z, 1)
    value = rate * (divergence + log_rho.expm1() - log_rho)
    return torch.where(noisy, value, 0).squeeze(-1)


integrand = singledispatch(general)
"""The formula for a type of prior: `general`, or a closed form registered for it."""


@integrand.register
def masked(
    prior: Masked, z: Tokens, x: Tokens, log_x_theta: Probs, alpha: Level, dalpha: Level
) -> PerToken:
    """-alpha'/(1 - alpha) * cross-entropy, on the masked tokens"""
    a, da = _exact(alpha), _exact(dalpha)
    rate = (-da / torch.where(a < 1, 1 - a, torch.inf)).to(log_x_theta)
    cross_entropy = -log_x_theta.gather(-1, x[..., None])
    masked = torch.as_tensor(z == prior.mask_id)
    return torch.where(masked[..., None], rate * cross_entropy, 0).squeeze(-1)


@integrand.register
def uniform(
    prior: Uniform, z: Tokens, x: Tokens, log_x_theta: Probs, alpha: Level, dalpha: Level
) -> PerToken:
    """Eq. 5 with the K-sums of log(1 - alpha) taken out, so that float32 is enough:

    w [K e^{-b_r}/(1-alpha) - K/xbar_r + coef (K b_r - B) + ne c (b_r - b_i) + const],
    c = K alpha/(1-alpha), b_j = log1p(c p_j), B = sum_j b_j, zeta = 1/(1+c), ne = [z != x]
    """
    K = prior.vocab_size
    a, da = (_exact(level).squeeze(-1) for level in (alpha, dalpha))
    clean = a >= 1  # nothing is noise; the limit stands below
    noise = torch.where(clean, 0.5, 1 - a)
    c = K * torch.where(clean, 0.5, a) / noise
    zeta = 1 / (1 + c)
    if_differs = -zeta.log() / zeta - K / noise  # const - K/xbar_r
    if_equal = (K - 1) * zeta * zeta.log() - K * zeta / noise
    w, slope = -da / (K * a), -da / K
    scalars = (c, noise, zeta, w, slope, if_differs, if_equal)
    c, noise, zeta, w, slope, if_differs, if_equal = (v.to(log_x_theta) for v in scalars)

    differs = z != x
    p_z, p_x = (log_x_theta.gather(-1, i[..., None]).squeeze(-1).exp() for i in (z, x))
    b_r, b_i = (c * p_z).log1p(), (c * p_x).log1p()
    B = (c[..., None] * log_x_theta.exp()).log1p().sum(-1)
    gain = torch.where(differs, K * b_r - B + c * (b_r - b_i), zeta * (K * b_r - B))
    value = K * (-b_r).exp() / noise + gain + torch.where(differs, if_differs, if_equal)
    return torch.where(clean.to(z.device), slope * (1 / p_x - 1), w * value)


def _log_ratio(q: Tensor, p: Tensor) -> Tensor:
    """log(q/p), 0 where q is: a NaN there would leak into the gradient."""
    return torch.where(q > 0, q, 1).log() - torch.where(q > 0, p, 1).log()


def _exact(level: Level) -> Tensor:
    """A level in float64 where float64 is cheap: 1 - alpha must not lose its digits."""
    if not isinstance(level, Tensor):
        return torch.full((1, 1, 1), level, dtype=torch.float64)
    return level.double() if level.device.type == "cpu" else level


def _as(like: Tensor, level: Level) -> Tensor:
    return torch.as_tensor(level).to(like)

"""The per-token integrand of the continuous-time negative ELBO."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor
from torch.nn import functional as F

from ..types import (
    Level,
    PerToken,
    Probs,
    Tokens,
    as_tokens,
    check_broadcasts,
    check_level,
    check_shape,
    working_dtype,
)
from .prior import Masked, Prior, Uniform

_LEAST = 1e-30  # alpha: below it the integrand is a straight line, and float32 ends soon


def nelbo(
    prior: Prior, z: Tokens, x: Tokens, log_x_theta: Probs, alpha: Level, dalpha: Level
) -> PerToken:
    """Compute the negative ELBO of each token, in nats per unit of time  (Eq. 4).

    Its mean over z_t ~ q_t(. | x), integrated over t, bounds -log p(x) up to KL(q_1 || p_1). It
    is never below 0 (the paper's Eq. 4 has a spurious minus).

    Args:
        prior: the noise pi over K tokens.
        z: noised token ids z_t, (B, L).
        x: clean token ids, (B, L).
        log_x_theta: log-probabilities of the denoiser, (B, L, K), normalised over K.
        alpha: level, a float or a tensor that broadcasts to (B, L, 1).
        dalpha: d alpha / dt, negative, likewise.

    Returns:
        Nats (B, L), in the dtype of the inputs.

    Raises:
        ValueError: if a shape or an id is wrong, or dalpha is positive.

    Example:
        >>> from psidiff.process import Masked, nelbo
        >>> z, x = torch.tensor([[2]]), torch.tensor([[0]])
        >>> log_x = torch.tensor([[[0.5, 0.5, 0.0]]]).log()
        >>> nelbo(Masked(3, mask_id=2), z, x, log_x, alpha=0.5, dalpha=-1.0)  # 2 log 2
        tensor([[1.3863]])
    """
    z, x = as_tokens("z", z, prior.vocab_size), as_tokens("x", x, prior.vocab_size)
    check_shape("x", x, tuple(z.shape))
    check_level("alpha", alpha, tuple(z.shape))
    check_broadcasts("dalpha", dalpha, tuple(z.shape))
    if bool(torch.as_tensor(dalpha > 0).any()):
        raise ValueError("dalpha must not be above 0: alpha falls with t")
    check_shape("log_x_theta", log_x_theta, (*z.shape, prior.vocab_size))
    return integrand(prior, z, x, log_x_theta, alpha, dalpha)


def general(
    prior: Prior, z: Tokens, x: Tokens, log_x_theta: Probs, alpha: Level, dalpha: Level
) -> PerToken:
    """-alpha'/alpha * pi_z/q_z * [KL(q || p) + rho - 1 - log rho],  rho = q_z/p_z

    q and p are the marginals (Eq. 1) of x and of x_theta. For the uniform prior this is Eq. 5.
    KL is summed as q log(q/p) - (q - p), whose terms are all >= 0, with q - p made directly as
    alpha (x - x_theta), so that small alpha costs no digits.
    """
    a, da = _exact(alpha, dalpha)
    a, part = _off_zero(a)
    a, noise, rate, part = (v.to(log_x_theta) for v in (a, 1 - a, -da / a, part))
    pi = prior.probs(like=log_x_theta)
    gap = a * (F.one_hot(x, prior.vocab_size).to(log_x_theta) - log_x_theta.exp())  # q - p
    p = a * log_x_theta.exp() + noise * pi
    q = a * F.one_hot(x, prior.vocab_size).to(log_x_theta) + noise * pi
    log_ratio = _log_ratio(q, p, gap)
    divergence = (q * log_ratio - gap).sum(-1)
    q_z, log_rho = (v.gather(-1, z[..., None]).squeeze(-1) for v in (q, log_ratio))
    noisy = pi[z] > 0
    value = divergence + log_rho.expm1() - log_rho
    weight = rate.squeeze(-1) * pi[z] / torch.where(noisy, q_z, 1)
    value = torch.where(noisy, weight * value, 0)
    return torch.where((pi > 0).all(), value * part.squeeze(-1), value)


integrand = singledispatch(general)
"""The formula for a type of prior: `general`, or a closed form registered for it."""


@integrand.register
def masked(
    prior: Masked, z: Tokens, x: Tokens, log_x_theta: Probs, alpha: Level, dalpha: Level
) -> PerToken:
    """-alpha'/(1 - alpha) * cross-entropy, on the masked tokens"""
    a, da = _exact(alpha, dalpha)
    rate = (-da / torch.where(a < 1, 1 - a, torch.inf)).to(log_x_theta)
    cross_entropy = -log_x_theta.gather(-1, x[..., None])
    masked = torch.as_tensor(z == prior.mask_id)
    return torch.where(masked[..., None], rate * cross_entropy, 0).squeeze(-1)


@integrand.register
def uniform(
    prior: Uniform, z: Tokens, x: Tokens, log_x_theta: Probs, alpha: Level, dalpha: Level
) -> PerToken:
    """Eq. 5 without its cancellations, so that float32 is enough:

    w [c K (e - p_r)/((1-alpha)(1+c p_r)(1+c e)) + coef (K b_r - B) + ne c (b_r - b_i) + const]
    c = K alpha/(1-alpha), b_j = log1p(c p_j), B = sum_j b_j, zeta = 1/(1+c), e = [z = x] = 1-ne
    """
    K = prior.vocab_size
    a, da = (level.squeeze(-1) for level in _exact(alpha, dalpha))
    a, part = _off_zero(a)
    clean = a >= 1  # nothing is noise; the limit stands below
    noise = torch.where(clean, 0.5, 1 - a)
    c = K * torch.where(clean, 0.5, a) / noise
    zeta = 1 / (1 + c)
    if_differs, if_equal = (1 + c) * c.log1p(), -(K - 1) * zeta * c.log1p()  # const
    w, slope = -da / (K * a) * part, -da / K
    scalars = (c, noise, zeta, w, slope, if_differs, if_equal)
    c, noise, zeta, w, slope, if_differs, if_equal = (v.to(log_x_theta) for v in scalars)

    differs = z != x
    p_z, p_x = (log_x_theta.gather(-1, i[..., None]).squeeze(-1).exp() for i in (z, x))
    b_r, b_i = (c * p_z).log1p(), (c * p_x).log1p()
    B = (c[..., None] * log_x_theta.exp()).log1p().sum(-1)
    jump = torch.where(differs, -p_z, (1 - p_z) * zeta) * c * K / (noise * (1 + c * p_z))
    gain = torch.where(differs, K * b_r - B + c * (b_r - b_i), zeta * (K * b_r - B))
    value = jump + gain + torch.where(differs, if_differs, if_equal)
    clean = clean.to(z.device)
    limit = slope * (1 / torch.where(clean, p_x, 1) - 1)
    return torch.where(clean, limit, w * value)


def _log_ratio(q: Tensor, p: Tensor, gap: Tensor) -> Tensor:
    """log(q/p), as log1p((q - p)/p) where they are close; 0 where q is."""
    q, p = torch.where(q > 0, q, 1), torch.where(q > 0, p, 1)
    close = gap.abs() < 0.5 * p
    return torch.where(close, (torch.where(close, gap, 0) / p).log1p(), q.log() - p.log())


def _off_zero(a: Tensor) -> tuple[Tensor, Tensor]:
    """A level whose 1/alpha is a number, and the part of the integrand there that is meant if
    all tokens can be noise: the integrand then goes to 0 with alpha, else to a constant."""
    return a.clamp(min=_LEAST), (a / _LEAST).clamp(max=1)


def _exact(alpha: Level, dalpha: Level) -> tuple[Tensor, Tensor]:
    """Both levels in float64 where that is cheap: 1 - alpha must not lose its digits."""
    both = (alpha, dalpha)
    device = next((v.device for v in both if isinstance(v, Tensor)), torch.device("cpu"))
    like = torch.empty((), dtype=working_dtype(device), device=device)
    a, da = (v.to(like) if isinstance(v, Tensor) else like.new_full((1, 1, 1), v) for v in both)
    return a, da

"""The diffusion transformation operator: which discrete level a Gaussian level becomes.

The argmax of a noisy one-hot vector is uniform-state noise of level alpha = T(alpha_tilde).
Quadrature is the truth and the default; the paper's series and its degree-9 polynomial stand
beside it. All work happens in float64 on the CPU: levels are few.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.special import gammaln, log_ndtr

from ..types import as_count

_STEP = 0.05  # the trapezoid rule converges exponentially here; half of it changes 1e-15
_TERMS = 150  # the paper's truncation of the series
_DEGREE = 9
_FIT_POINTS = 100_000


def diffusion_transform(
    gamma: Tensor,
    vocab_size: int,
    method: str = "quadrature",
    gamma_range: tuple[float, float] = (-3.5, -1.75),
) -> tuple[Tensor, Tensor]:
    """Compute alpha = T(alpha_tilde(gamma)) and d alpha / d gamma, gamma = -log SNR  (Eq. 6)

    The discrete level of the argmax of a noisy one-hot vector. The derivative is the second
    result: no gradient flows through the first.

    Args:
        gamma: levels of the Gaussian process, any shape.
        vocab_size: number of tokens K.
        method: "quadrature" (exact), "series" or "polynomial" (the paper's).
        gamma_range: where the polynomial is fitted; outside it is meaningless.

    Returns:
        alpha and its derivative, both of gamma's shape and device.

    Raises:
        ValueError: if gamma is not finite, or the method is none of the three.

    Example:
        >>> from psidiff.duality import diffusion_transform
        >>> alpha, dalpha = diffusion_transform(torch.tensor([-3.0, 0.0]), vocab_size=5)
        >>> alpha.round(decimals=4)
        tensor([0.9964, 0.3671])
    """
    as_count("vocab_size", vocab_size, least=2)
    gamma = as_gamma(gamma)
    methods: dict[str, Callable[[Tensor, int], tuple[Tensor, Tensor]]] = {
        "quadrature": by_quadrature,
        "series": by_series,
        "polynomial": partial(by_polynomial, gamma_range=gamma_range),
    }
    if method not in methods:
        raise ValueError(
            f"method must be 'quadrature', 'series' or 'polynomial', got {method!r}"
        )
    alpha, dalpha = methods[method](gamma.detach().to("cpu", torch.float64), vocab_size)
    return alpha.to(gamma), dalpha.to(gamma)


def as_gamma(gamma: Tensor) -> Tensor:
    """Levels of the Gaussian process: finite floats."""
    gamma = torch.as_tensor(gamma)
    if not bool(gamma.isfinite().all()):
        raise ValueError(f"gamma must be finite, got {gamma[~gamma.isfinite()][0]:g}")
    return gamma if gamma.is_floating_point() else gamma.to(torch.get_default_dtype())


def by_quadrature(gamma: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """T = K/(K-1) [integral of phi(z - nu) Phi(z)^{K-1} dz - 1/K],  nu = exp(-gamma/2)"""
    y = torch.arange(-260, 261, dtype=torch.float64) * _STEP  # z - nu: phi ends at 13
    nu = (-gamma / 2).exp()
    win = ((vocab_size - 1) * log_ndtr(nu[..., None] + y)).exp()  # Phi(z)^{K-1}
    density = (-(y**2) / 2).exp() * _STEP / math.sqrt(2 * math.pi)
    return _assemble(win @ density, win @ (y * density), nu, vocab_size)


def by_series(gamma: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """T = K/(K-1) [e^{-nu^2/2} sum_n nu^n M_n / n! - 1/K]; I_n = M_{n+1} gives the derivative.

    150 terms are enough down to gamma of about -4.5 (the derivative: -4.3), not below.
    """
    log_moments = _log_moments(vocab_size)
    n = torch.arange(_TERMS, dtype=torch.float64)
    nu = (-gamma / 2).exp()
    log_term = -gamma[..., None] / 2 * n - gammaln(n + 1) - nu[..., None] ** 2 / 2
    p = (log_term + log_moments[:-1]).exp().sum(-1)
    tilted = (log_term + log_moments[1:]).exp().sum(-1)
    return _assemble(p, tilted - nu * p, nu, vocab_size)


def by_polynomial(
    gamma: Tensor, vocab_size: int, gamma_range: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """The least-squares polynomial of degree 9 in t = (gamma - low) / (high - low)."""
    low, high = gamma_range
    if not low < high:
        raise ValueError(f"gamma_range must be (low, high) with low < high, got {gamma_range}")
    fit = _polynomial(vocab_size, float(low), float(high))
    t = ((gamma - low) / (high - low)).numpy()
    return torch.as_tensor(fit(t)), torch.as_tensor(fit.deriv()(t)) / (high - low)


def gamma_at(alpha: float | Tensor, vocab_size: int) -> float | Tensor:
    """Compute the gamma whose discrete level is alpha: the inverse of `diffusion_transform`.

    Args:
        alpha: levels in (0, 1), a float or a tensor of any shape.
        vocab_size: number of tokens K.

    Returns:
        gamma, a float for a float, else of alpha's shape.

    Raises:
        ValueError: if alpha is not inside (0, 1).

    Example:
        >>> from psidiff.duality import diffusion_transform, gamma_at
        >>> gamma = torch.tensor(gamma_at(0.25, 5), dtype=torch.float64)
        >>> round(diffusion_transform(gamma, 5)[0].item(), 6)
        0.25
    """
    as_count("vocab_size", vocab_size, least=2)
    target = torch.as_tensor(alpha, dtype=torch.float64, device="cpu").detach()
    inside = (target > 0) & (target < 1)
    if not bool(inside.all()):
        raise ValueError(f"alpha must be in (0, 1) to have a gamma, got {target[~inside][0]:g}")
    low, high = torch.full_like(target, -12.0), torch.full_like(target, 60.0)
    for _ in range(64):  # T falls with gamma
        middle = (low + high) / 2
        noisier = by_quadrature(middle, vocab_size)[0] < target
        low, high = torch.where(noisier, low, middle), torch.where(noisier, middle, high)
    gamma = (low + high) / 2
    return gamma.to(alpha) if isinstance(alpha, Tensor) else gamma.item()


def _assemble(p: Tensor, slope: Tensor, nu: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """From p = P(argmax = x) and dp/dnu to alpha and d alpha/d gamma = d alpha/dnu (-nu/2)."""
    K = vocab_size
    return (K * p - 1) / (K - 1), -nu / 2 * slope * K / (K - 1)


@lru_cache(maxsize=32)
def _log_moments(vocab_size: int) -> Tensor:
    """log M_n, n = 0 .. 150, M_n = integral of z^n phi(z) Phi(z)^{K-1} dz; M_0 = 1/K."""
    z = torch.arange(-600, 601, dtype=torch.float64)[:, None] * _STEP
    n = torch.arange(_TERMS + 1, dtype=torch.float64)
    log_weight = (vocab_size - 1) * log_ndtr(z) - z**2 / 2 - math.log(2 * math.pi) / 2
    log_size = torch.where(n == 0, 0, n * z.abs().log()) + log_weight
    largest = log_size.amax(0)
    sign = torch.where(n % 2 == 1, z.sign(), 1)
    return largest + ((log_size - largest).exp() * sign).sum(0).log() + math.log(_STEP)


@lru_cache(maxsize=32)
def _polynomial(vocab_size: int, low: float, high: float) -> np.polynomial.Polynomial:
    def alpha(t: np.ndarray) -> np.ndarray:
        return by_quadrature(low + torch.as_tensor(t) * (high - low), vocab_size)[0].numpy()

    exact = np.polynomial.Chebyshev.interpolate(alpha, 200, domain=[0, 1])  # to 1e-13
    grid = np.linspace(0, 1, _FIT_POINTS)
    return np.polynomial.Polynomial.fit(grid, exact(grid), _DEGREE)

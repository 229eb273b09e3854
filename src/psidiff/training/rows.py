"""Losses of single rows with their gradients, for `kernels.linear_loss`.

Each is the loss of `process.nelbo` (or a cross-entropy) and dL/dlogits in closed form.
"""

from __future__ import annotations

from functools import cache, partial, singledispatch

import torch
from torch import Tensor

from ..kernels.linear_loss import RowLoss
from ..process.prior import Masked, Prior, Uniform
from ..types import Tokens


@singledispatch
def nelbo_rows(
    prior: Prior, z: Tokens, x: Tokens, alpha: Tensor, dalpha: Tensor
) -> RowLoss | None:
    """The NELBO of a prior, levels (B, 1) in float64; None where it has no closed form."""
    return None


@nelbo_rows.register
def _uniform(
    prior: Uniform, z: Tokens, x: Tokens, alpha: Tensor, dalpha: Tensor
) -> RowLoss | None:
    """1 - alpha, c, zeta, w and the constants are made in float64, once a sequence."""
    K = prior.vocab_size
    noise = 1 - alpha
    c = K * alpha / noise
    zeta, w = 1 / (1 + c), -dalpha / (K * alpha)
    if_differs, if_equal = (1 + c) * c.log1p(), -(K - 1) * zeta * c.log1p()
    scalars = (c, noise, zeta, w, if_differs, if_equal)
    return RowLoss(uniform_row, (z, x, *(v.float() for v in scalars)))


@nelbo_rows.register
def _masked(
    prior: Masked, z: Tokens, x: Tokens, alpha: Tensor, dalpha: Tensor
) -> RowLoss | None:
    """-alpha'/(1 - alpha) on the masked tokens, nothing on the others."""
    rate = (-dalpha / (1 - alpha)).float()
    return RowLoss(_masked_form(int(prior.mask_id or 0)), (z, x, rate))


def uniform_row(
    logits: Tensor,
    z: Tensor,
    x: Tensor,
    c: Tensor,
    noise: Tensor,
    zeta: Tensor,
    w: Tensor,
    if_differs: Tensor,
    if_equal: Tensor,
) -> tuple[Tensor, Tensor]:
    """L = w [jump + coef (K b_r - B) + ne c (b_r - b_i) + const]

    dL/dl_k = -w coef P_k + [k = r] w P_r A_r - [k = i] w ne c P_i - p_k G,  r = z, i = x
    b = log1p(c p), B = sum b, P = c p/(1 + c p), M = sum P, ne = [r != i]
    A_r = coef K - K/((1 - alpha)(1 + c p_r)) + ne c,  G = w (-coef M + P_r A_r - ne c P_i)
    """
    K = logits.shape[-1]
    p = logits.softmax(-1)
    grown = c[:, None] * p
    b = grown.log1p()
    P = grown / (1 + grown)
    B, M = b.sum(-1), P.sum(-1)
    differs = z != x
    p_r, p_i = (p.gather(-1, k[:, None]).squeeze(-1) for k in (z, x))
    b_r, b_i = (c * p_r).log1p(), (c * p_i).log1p()
    P_r, P_i = c * p_r / (1 + c * p_r), c * p_i / (1 + c * p_i)
    jump = torch.where(differs, -p_r, (1 - p_r) * zeta) * c * K / (noise * (1 + c * p_r))
    gain = torch.where(differs, K * b_r - B + c * (b_r - b_i), zeta * (K * b_r - B))
    loss = w * (jump + gain + torch.where(differs, if_differs, if_equal))

    coef, ne_c = torch.where(differs, 1.0, zeta), torch.where(differs, c, 0.0)
    at_r = P_r * (coef * K - K / (noise * (1 + c * p_r)) + ne_c)
    at_i = ne_c * P_i
    G = -coef * M + at_r - at_i
    k = torch.arange(K, device=logits.device)
    slope = -coef[:, None] * P - p * G[:, None]
    slope = slope + torch.where(k == z[:, None], at_r[:, None], 0.0)
    slope = slope - torch.where(k == x[:, None], at_i[:, None], 0.0)
    return loss, w[:, None] * slope


def cross_entropy_row(logits: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """-log p_x;  dL/dl_k = p_k - [k = x]"""
    log_p = logits.log_softmax(-1)
    k = torch.arange(logits.shape[-1], device=logits.device)
    hit = (k == x[:, None]).to(log_p)
    return -log_p.gather(-1, x[:, None]).squeeze(-1), log_p.exp() - hit


def masked_row(
    logits: Tensor, z: Tensor, x: Tensor, rate: Tensor, mask_id: int
) -> tuple[Tensor, Tensor]:
    """rate * -log p_x where z is the mask; p never holds the mask itself."""
    k = torch.arange(logits.shape[-1], device=logits.device)
    loss, slope = cross_entropy_row(torch.where(k == mask_id, -torch.inf, logits), x)
    rate = torch.where(z == mask_id, rate, 0.0)
    return rate * loss, rate[:, None] * slope


@cache
def _masked_form(mask_id: int) -> partial:
    """One function for each mask, so that it is compiled once."""
    return partial(masked_row, mask_id=mask_id)

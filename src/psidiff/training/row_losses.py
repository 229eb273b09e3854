"""Losses of single rows with their gradients, for `kernels.fused_linear_loss`.

Each is the loss of `process.nelbo` (or a cross-entropy) and dL/dlogits in closed form.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from ..kernels import uniform_nelbo
from ..kernels.fused_linear_loss import Form, RowLoss
from ..process.prior import Masked, Prior, Uniform
from ..types import Tokens


def nelbo_rows(
    prior: Prior, z: Tokens, x: Tokens, alpha: Tensor, dalpha: Tensor
) -> RowLoss | None:
    """The NELBO of a prior, levels (B, 1) in float64; None where it has no closed form.

    Masked: -alpha'/(1 - alpha) on the masked tokens, nothing on the others. Uniform: 1 - alpha,
    c, zeta and w of `uniform_row_loss` are made in float64, once a sequence.
    """
    noise = 1 - alpha
    if isinstance(prior, Masked):
        return RowLoss(_masked_form(int(prior.mask_id or 0)), (z, x, (-dalpha / noise).float()))
    if not isinstance(prior, Uniform):
        return None
    c = prior.vocab_size * alpha / noise
    scalars = (c, noise, 1 / (1 + c), -dalpha / (prior.vocab_size * alpha))
    return RowLoss(_UNIFORM, (z, x, *(v.float() for v in scalars)))


def uniform_row_loss(
    logits: Tensor, z: Tensor, x: Tensor, c: Tensor, noise: Tensor, zeta: Tensor, w: Tensor
) -> tuple[Tensor, Tensor]:
    """L = w [jump + coef (K b_r - B) + ne c (b_r - b_i) + const]

    dL/dl_k = w (-coef P_k - p_k G + [k = r] P_r A_r - [k = i] ne c P_i),  r = z, i = x
    b = log1p(c p), B = sum b, P = c p/(1 + c p), M = sum P, ne = [r != i]
    A_r = coef K - K/((1 - alpha)(1 + c p_r)) + ne c,  G = -coef M + P_r A_r - ne c P_i

    A probability near 1 would cancel in both. So sums leave out the most probable token, 1 - p
    is the sum of the others, d = b - log(1 + c) is -log1p(c (1 - p)/(1 + c p)), and the slope
    of the most probable token is what the others lack to 0. P_k - p_k M cancels where c is
    small; it is the same for P - c p = -c p P.
    """
    K = logits.shape[-1]
    k = torch.arange(K, device=logits.device)
    p = logits.softmax(-1)
    top = logits.argmax(-1)
    is_top, is_r, is_i = (k == token[:, None] for token in (top, z, x))
    grown = c[:, None] * p
    P = grown / (1 + grown) * torch.where(c[:, None] < uniform_nelbo.SMALL, -grown, 1.0)
    others = torch.where(is_top, 0.0, p).sum(-1)  # 1 - p_top
    B, M = (torch.where(is_top, 0.0, v).sum(-1) for v in (grown.log1p(), P))
    p_top, p_r, p_i = (p.gather(-1, v[:, None]).squeeze(-1) for v in (top, z, x))
    b_top, b_r, b_i = ((c * v).log1p() for v in (p_top, p_r, p_i))
    P_r, P_i = (c * v / (1 + c * v) for v in (p_r, p_i))
    P_top = c * p_top / (1 + c * p_top) * torch.where(c < uniform_nelbo.SMALL, -c * p_top, 1.0)
    left_r = torch.where(z == top, others, 1 - p_r)
    left_i = torch.where(x == top, others, 1 - p_i)
    but_r = torch.where(z == top, B, B + b_top - b_r)  # sums of b without r, without i
    but_i = torch.where(x == top, B, B + b_top - b_i)
    d_r, d_i = -(c * left_r / (1 + c * p_r)).log1p(), -(c * left_i / (1 + c * p_i)).log1p()
    differs = z != x
    scale = K / (noise * (1 + c * p_r))
    jump = torch.where(differs, -p_r, left_r * zeta) * c * scale
    if_differs = (K + c) * b_r - but_i - (1 + c) * d_i
    if_equal = zeta * ((K - 1) * d_r - but_r)
    loss = w * (jump + torch.where(differs, if_differs, if_equal))

    alpha = c * noise / K
    coef = torch.where(differs, 1.0, zeta)
    if_differs = alpha * (K * p_r - 1) * scale + c
    if_equal = -alpha * (K * left_r + c + 1) * zeta * scale
    at_r = P_r * torch.where(differs, if_differs, if_equal)
    at_i = torch.where(differs, c * P_i, 0.0)
    G = -coef * (M + P_top) + at_r - at_i
    slope = -coef[:, None] * P - p * G[:, None]
    slope = slope + torch.where(is_r, at_r[:, None], 0.0)
    slope = slope - torch.where(is_i, at_i[:, None], 0.0)
    rest = -coef * M - others * G
    rest = rest + torch.where(z == top, 0.0, at_r) - torch.where(x == top, 0.0, at_i)
    return loss, w[:, None] * torch.where(is_top, -rest[:, None], slope)


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
def _masked_form(mask_id: int) -> Form:
    """One for each mask, so that it is compiled once."""
    return Form(partial(masked_row, mask_id=mask_id))


def _uniform_examples(K: int) -> tuple[Tensor, ...]:
    """Inputs of `uniform_row_loss` from nearly clean to nearly noise; half of them differ."""
    z, x = torch.randint(K, (2, 64, 1), generator=torch.Generator().manual_seed(0))
    x[::2] = z[::2]
    alpha = torch.linspace(0.05, 0.99, 64, dtype=torch.float64)[:, None]
    made = nelbo_rows(Uniform(K), z, x, alpha, -torch.ones_like(alpha))
    assert made is not None
    return tuple(column.flatten() for column in made.columns)


_UNIFORM = Form(uniform_row_loss, uniform_nelbo.uniform_nelbo_triton, _uniform_examples)
NEXT_TOKEN = Form(cross_entropy_row)

"""Sampling and training of uniform-state diffusion the straightforward way, in eager torch.

What published code does, written anew from its description: every step forms tensors over all K
tokens, posteriors in float64, a nucleus by a full sort, losses over the (B, L, K) log-softmax.
`benchmarks/gpu.py` measures it beside psidiff. Which tensors live at the same time is part of
what it measures, so temporaries stay as plain expressions leave them.

Weights are float32; embedding and level are float32, blocks and head run under bfloat16
autocast with a float32 residual stream, and logits come out in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.special import ndtri

from psidiff.duality import diffusion_transform, gamma_at
from psidiff.duality.relaxation import log_mean_tail
from psidiff.models.transformer import Attention
from psidiff.types import SoftTokens

TEMPERATURE = 1e-3
ALPHA_RANGE = (0.945, 0.049)  # at K = 50,258 these are gamma from -3.55 to -1.85


def transformer_logits(network: Any, z: Any, alpha: Tensor) -> Tensor:
    """bfloat16 logits (B, L, K) of ids, soft tokens or probabilities z; alpha is (B, 1, 1)."""
    x = network.vocab_embed(z)
    condition = network.condition(x, alpha, None)
    cos, sin = (v.bfloat16() for v in network.rotary_emb(x.shape[1], x.device))
    with torch.autocast(x.device.type, torch.bfloat16):
        for block in network.blocks:
            x = block(x, condition, Attention((cos, sin)))
        return network.head(network.output_layer.hidden(x, condition))


def nucleus(log_x: Tensor, p: float) -> Tensor:
    """log x_theta of the most probable tokens up to mass p, the crossing one kept; in place."""
    ordered, order = log_x.sort(-1, descending=True)
    mass = ordered.softmax(-1).cumsum(-1)
    drop = mass > p
    drop[..., 1:] = drop[..., :-1].clone()
    drop[..., 0] = False
    dropped = drop.scatter(-1, order, drop)
    x = log_x.masked_fill_(dropped, -torch.inf).exp()
    return (x / x.sum(-1, keepdim=True)).log()


def posterior(x: Tensor, z: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """q_{s|t}(. | z, x) with z as a one-hot vector; at alpha_s = 1 it is q_{0|t}."""
    K = x.shape[-1]
    one_hot = F.one_hot(z, K).to(alpha_t.dtype)
    survival = alpha_t / alpha_s
    top = (
        (K * alpha_t) * x * one_hot
        + (survival - alpha_t) * one_hot
        + (alpha_s - alpha_t) * x
        + (1 - survival) * (1 - alpha_s) / K
    )
    return top / (K * alpha_t * x.gather(-1, z[..., None]) + 1 - alpha_t)


def psi_posterior(
    x: Tensor, z: Tensor, alpha_s: Tensor, alpha_t: Tensor, kappa: float
) -> Tensor:
    """kappa q_{s|t} + (1 - kappa) [alpha_s q_{0|t} + (1 - alpha_s) / K]"""
    forth = posterior(x, z, alpha_s, alpha_t)
    corrector = _renoised(posterior(x, z, torch.ones_like(alpha_s), alpha_t), alpha_s)
    return kappa * forth + (1 - kappa) * corrector


def draw(probs: Tensor) -> Tensor:
    """A token a row: the winner of an exponential race over all K."""
    race = 1e-10 - (torch.rand_like(probs) + 1e-10).log()
    return (probs / race).argmax(-1)


@torch.no_grad()
def sampling_step(
    logits_of: Callable[[Tensor, Tensor], Tensor],
    z: Tensor,
    alpha_s: float,
    alpha_t: float,
    kappa: float | None,
    top_p: float | None,
) -> Tensor:
    """z_s from z_t; kappa None: ancestral, which never forms the corrector."""
    level_s, level_t = (
        torch.full((len(z), 1, 1), a, dtype=torch.float32, device=z.device)
        for a in (alpha_s, alpha_t)
    )
    log_x = logits_of(z, level_t).log_softmax(-1).double()
    if top_p is not None:
        log_x = nucleus(log_x, top_p)
    x = log_x.exp()
    if kappa is None:
        return draw(posterior(x, z, level_s, level_t))
    return draw(psi_posterior(x, z, level_s, level_t, kappa))


def usdm_loss(log_x: Tensor, z: Tensor, x: Tensor, alpha: Tensor, dalpha: Tensor) -> Tensor:
    """The NELBO integrand (B, L) of uniform-state diffusion; levels are (B, 1).

    (a'/(K a)) [K/xb_z - K/xbt_z + c (sum_j log xbt_j - K log xbt_z)
                + [z != x] (K a/(1-a)) log(xbt_x/xbt_z) - off],  zeta = (1-a)/(K a + 1-a)
    xb = K a x + 1-a, xbt the same of x_theta, c = zeta if z = x else 1
    off = ((K-1) zeta [z = x] - [z != x] / zeta) log zeta
    """
    K = log_x.shape[-1]
    xbt = log_x.exp() * (K * alpha)[..., None] + 1 - alpha[..., None]
    xbt_z = xbt.gather(-1, z[..., None]).squeeze(-1)
    xbt_x = xbt.gather(-1, x[..., None]).squeeze(-1)
    sum_log = xbt.log().sum(-1)
    same = (z == x).to(log_x.dtype)
    xb_z = K * alpha * same + 1 - alpha
    zeta = (1 - alpha) / (K * alpha + 1 - alpha)
    c = zeta * same + (1 - same)
    off = ((K - 1) * zeta * same - (1 - same) / zeta) * zeta.log()
    jump = (1 - same) * K * alpha / (1 - alpha) * (xbt_x / xbt_z).log()
    inside = K / xb_z - K / xbt_z + c * (sum_log - K * xbt_z.log()) + jump - off
    return dalpha / (K * alpha) * inside


@dataclass
class Noised:
    """What a network reads, z, and the levels (B, 1).

    latents: what it was made of; it lives until the step ends, as in a step that is one
    function.
    """

    read: Any
    z: Tensor
    alpha: Tensor
    dalpha: Tensor
    latents: tuple[Tensor, ...] = field(default=())


def exact(tokens: Tensor, vocab_size: int) -> Noised:
    """z_t ~ q_t on the log-linear schedule, t stratified."""
    t = _stratified(tokens)
    alpha = 1 - (1 - 1e-3) * t
    noise = torch.randint(vocab_size, tokens.shape, device=tokens.device)
    z = torch.where(torch.rand(tokens.shape, device=tokens.device) < alpha, tokens, noise)
    return Noised(z, z, alpha, torch.full_like(alpha, -(1 - 1e-3)))


def dense(tokens: Tensor, vocab_size: int) -> Noised:
    """All K Gaussian latents; the network reads softmax(w / temperature) @ E."""
    gamma, alpha, dalpha = _gaussian_levels(tokens, vocab_size)
    signal, sigma = (-gamma).sigmoid().sqrt()[..., None], gamma.sigmoid().sqrt()[..., None]
    one_hot = F.one_hot(tokens, vocab_size)
    w = signal * one_hot + sigma * torch.randn(one_hot.shape, device=tokens.device)
    logits = w * (1 / TEMPERATURE)
    return Noised(logits.softmax(-1), w.argmax(-1), alpha, dalpha, (one_hot, w, logits))


def sparse(tokens: Tensor, vocab_size: int, top_k: int = 2) -> Noised:
    """The k largest latents by order statistics in float64, their ids by Floyd's algorithm.

    The clean value takes the k-th place if it is larger, without sorting again, and z_t is the
    clean token if it is kept at all: so the published code has it.
    """
    gamma, alpha, dalpha = _gaussian_levels(tokens, vocab_size)
    signal, sigma = (-gamma).sigmoid().sqrt()[..., None], gamma.sigmoid().sqrt()[..., None]
    count = vocab_size - 1
    left = count - torch.arange(top_k, device=tokens.device, dtype=torch.float64)
    u = torch.rand((*tokens.shape, top_k), device=tokens.device, dtype=torch.float64)
    values = -ndtri(-((u.log() / left).cumsum(-1)).expm1()) * sigma.double()
    clean = (signal + sigma * torch.randn((*tokens.shape, 1), device=tokens.device)).double()
    ids = _floyd(tokens, count, top_k)
    kept = clean > values[..., -1:]
    cutoff = values[..., -1:] / TEMPERATURE
    tail = log_mean_tail(cutoff, sigma.double() / TEMPERATURE)
    tail = tail + (vocab_size - top_k - 1 + kept.double()).log()
    values = torch.cat((values[..., :-1], torch.where(kept, clean, values[..., -1:])), -1)
    z = torch.where(kept[..., 0], tokens, ids[..., 0])
    ids = torch.cat((ids[..., :-1], torch.where(kept, tokens[..., None], ids[..., -1:])), -1)
    extra = torch.where(kept, -torch.inf, clean / TEMPERATURE)
    scaled = values / TEMPERATURE
    log_z = torch.cat((scaled, extra, tail), -1).logsumexp(-1, keepdim=True)
    return Noised(SoftTokens(ids, (scaled - log_z).exp().float(), z), z, alpha, dalpha)


class Training:
    """AdamW, clipping at 1 and an average, over one network."""

    def __init__(self, network: nn.Module, decay: float = 0.9999) -> None:
        self.network, self.decay, self.updates = network.train(), decay, 0
        self.parameters = list(network.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-4, weight_decay=0.0)
        self.shadow = [p.detach().clone() for p in self.parameters]

    def step(
        self,
        objective: Callable[[Tensor, int], Noised],
        logits_of: Callable[[Any, Tensor], Tensor],
        tokens: Tensor,
        vocab_size: int,
    ) -> Tensor:
        """Forward, backward, clip, AdamW, average: the mean loss."""
        noised = objective(tokens, vocab_size)
        log_x = logits_of(noised.read, noised.alpha[..., None]).float().log_softmax(-1)
        if bool(log_x.isnan().any()):
            raise ValueError("the network returned NaN")
        loss = usdm_loss(log_x, noised.z, tokens, noised.alpha, noised.dalpha).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._average()
        return loss.detach()

    @torch.no_grad()
    def _average(self) -> None:
        self.updates += 1
        rate = 1 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        for average, parameter in zip(self.shadow, self.parameters, strict=True):
            average.sub_(rate * (average - parameter))


def _renoised(x: Tensor, alpha: Tensor) -> Tensor:
    """alpha x + (1 - alpha) / K"""
    return alpha * x + (1 - alpha) / x.shape[-1]


def _stratified(tokens: Tensor) -> Tensor:
    """One t a sequence (B, 1), between 1e-3 and 1."""
    count = len(tokens)
    place = torch.arange(count, device=tokens.device)
    u = (torch.rand(count, device=tokens.device) + place) / count
    return (1e-3 + (1 - 1e-3) * u)[:, None]


def _gaussian_levels(tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """gamma uniform in its range, alpha by the degree-9 polynomial, d alpha/dt; (B, 1) each."""
    low, high = _gamma_range(vocab_size)
    gamma = low + (high - low) * _stratified(tokens)
    alpha, slope = diffusion_transform(gamma, vocab_size, "polynomial", (low, high))
    return gamma, alpha, slope * (high - low)


@cache
def _gamma_range(vocab_size: int) -> tuple[float, float]:
    low, high = (float(gamma_at(alpha, vocab_size)) for alpha in ALPHA_RANGE)
    return low, high


def _floyd(tokens: Tensor, count: int, k: int) -> Tensor:
    """k different ids of [0, K) without `tokens`: a uniform set, by Floyd's algorithm."""
    chosen: list[Tensor] = []
    for j in range(count - k, count):
        pick = torch.randint(j + 1, tokens.shape, device=tokens.device)
        for before in chosen:
            pick = torch.where(pick == before, j, pick)
        chosen.append(pick)
    ids = torch.stack(chosen, -1)
    return ids + (ids >= tokens[..., None])

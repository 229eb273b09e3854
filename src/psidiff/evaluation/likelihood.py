"""How likely data is: -log p(x), or a bound on it from which nothing is left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..process.nelbo import nelbo
from ..process.prior import Prior
from ..process.schedule import NoiseSchedule
from ..types import Dataset, as_count
from .levels import LEAST_LEVEL, falling
from .metric_result import MetricResult
from .rowwise import Chosen, Loss, OnBatch, Part, measured, seeded, stratified

PROTOCOLS = ("exact", "released")
_RELEASED_T_MIN = 1e-3


@dataclass(frozen=True)
class Likelihood:
    """Nats a token, and the same in other units; of a diffusion model an upper bound."""

    nats_per_token: MetricResult
    tokens: int

    @property
    def bits_per_token(self) -> MetricResult:
        return self.per(self.tokens, "token")

    @property
    def perplexity(self) -> MetricResult:
        """exp(nats a token); its error to first order."""
        nats = self.nats_per_token
        value = math.exp(nats.value)
        return MetricResult(
            "perplexity", value, value * (nats.stderr or 0.0), "", nats.protocol
        )

    def per(self, count: int, unit: str) -> MetricResult:
        """Bits a unit, of which the same data has `count`: characters, bytes, pixels."""
        nats = self.nats_per_token
        scale = self.tokens / as_count("count", count) / math.log(2)
        error = scale * (nats.stderr or 0.0)
        return MetricResult("nll", scale * nats.value, error, f"bits/{unit}", nats.protocol)


@torch.no_grad()
def likelihood(
    denoiser: Any,
    prior: Prior | None,
    schedule: NoiseSchedule,
    data: Dataset,
    *,
    sequences: int | None = None,
    draws: int = 1,
    protocol: str = "exact",
    batch_size: int = 32,
    seed: int = 0,
    device: torch.device | str = "cpu",
    bos_id: int | None = None,
    on_batch: OnBatch | None = None,
) -> Likelihood:
    """The NELBO (Eq. 4) of so many rows, spread over the data (None: all of them).

    exact     alpha falls from 1 to 0 as 1 - t^3 (`falling`), so no term is missing at either
              end. Every row is looked at `draws` times.
    released  as published numbers were made: t in [.001, 1] on the model's schedule, the mean
              of the integrand, stratified in each batch; no terms for the ends.

    prior None: `denoiser(tokens)` gives the logits of a network that reads `bos_id`, then the
    row from left to right; -log p(x) is then exact. All chance is a function of the seed and of
    the number of the row and the draw, so that models are compared on common random numbers.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be {' or '.join(PROTOCOLS)}, got {protocol!r}")
    rows = Chosen(data, sequences, as_count("batch_size", batch_size), device, on_batch)
    draws, seed = as_count("draws", draws), as_count("seed", seed, least=0)
    times = stratified(rows.count, draws, seed)
    loss: Loss
    levels: dict[str, Any] = {}
    if prior is None:
        loss, draws = _left_to_right(denoiser, bos_id), 1
    elif protocol == "exact":
        least = max(float(schedule.alpha(1.0)), LEAST_LEVEL)
        loss = _bound(denoiser, prior, *falling(times), least, seed)
        levels = {"alpha": "1 - t^3", "least_alpha_asked": least}
    else:
        times = _released_times(rows.count, draws, rows.batch_size, seed)
        alpha, slope = schedule.alpha(times), schedule.dalpha(times)
        loss = _bound(denoiser, prior, alpha, slope, LEAST_LEVEL, seed)
        levels = {"schedule": str(schedule), "batch_size": rows.batch_size}
    sums = rows.sums(loss, draws) / torch.tensor([draws, 1])
    about = {"protocol": protocol, "draws": draws, **levels}
    return Likelihood(measured(sums, times[:, 0], prior, seed, about), int(sums[:, 1].sum()))


def _released_times(count: int, draws: int, batch_size: int, seed: int) -> Tensor:
    """t = t_min + (1 - t_min) (i + U_i)/n for row i of a batch of n."""
    number = torch.arange(count)
    first = number // batch_size * batch_size
    size = (count - first).clamp(max=batch_size)
    u = torch.rand(count, draws, dtype=torch.float64, generator=seeded(seed, 1))
    place = ((number - first)[:, None] + u) / size[:, None]
    return _RELEASED_T_MIN + (1 - _RELEASED_T_MIN) * place


def _bound(
    denoiser: Any, prior: Prior, alpha: Tensor, slope: Tensor, least: float, seed: int
) -> Loss:
    """The integrand at levels (count, draws); the denoiser is asked at `least` or above."""

    def loss(part: Part, draw: int) -> Tensor:
        a, da = (level[part.places, draw, None, None] for level in (alpha, slope))
        z = part.corrupted(prior, a, seed, draw)
        log_x = part.ask(denoiser, z, a.clamp(min=least))
        return nelbo(prior, z, part.x, log_x, a, da)

    return loss


def _left_to_right(network: Any, bos_id: int | None) -> Loss:
    """-log p(x_l | x before l)"""
    if bos_id is None:
        raise ValueError("bos_id is missing: name the token that the network reads first")

    def loss(part: Part, draw: int) -> Tensor:
        start = torch.full_like(part.x[:, :1], bos_id)
        log_p = network(torch.cat((start, part.x[:, :-1]), 1)).float().log_softmax(-1)
        return -log_p.gather(-1, part.x[..., None]).squeeze(-1)

    return loss

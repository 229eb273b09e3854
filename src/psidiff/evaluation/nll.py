"""The NLL of a dataset: exact for autoregressive networks, an upper bound for diffusion.

All likelihoods are `sum_over_tokens`; what differs is where sequences come from, what noise
they get, and how the sums are averaged. `sequence_nll` has those of sequences of any lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ..distributed import Processes
from ..process.nelbo import nelbo
from ..process.prior import Prior
from ..process.schedule import NoiseSchedule
from ..types import Dataset, Probs, Tokens, as_count, at_least_float32, check_choice
from .metric_result import UNKNOWN, MetricResult, exp_of
from .token_sums import EvalBatch, EvaluationSubset, OnBatch, TokenValues, sum_over_tokens

MIN_ALPHA = 1e-9  # denoisers take -log alpha; the sampler asks no lower either
_RELEASED_T_MIN = 1e-3

Noise = Callable[[EvalBatch], tuple[Tokens, Tensor, Tensor]]
"""A batch -> z_t (n, L), alpha and its slope, (n, 1, 1) or (n, L, 1) in float64."""


def next_token_values(
    network: Callable[[Tensor], Tensor], device: torch.device | str
) -> TokenValues:
    """-log p(x_l | x before l), whether x_l is not the most likely token, and 1; the first
    token is only read. A causal network never sees the padding on the right."""

    def values(batch: EvalBatch) -> Tensor:
        x = batch.tokens.to(device)
        log_p = at_least_float32(network(x[:, :-1])).log_softmax(-1)
        nats = -log_p.gather(-1, x[:, 1:, None]).squeeze(-1)
        misses = (log_p.argmax(-1) != x[:, 1:]).to(nats)
        return F.pad(torch.stack((nats, misses, torch.ones_like(nats))), (1, 0))

    return values


# Diffusion: a bound at random levels of noise


def cubic_alpha(t: Tensor) -> tuple[Tensor, Tensor]:
    """alpha = 1 - t^3 and its slope: from 1 to 0, so that no term is missing at either end.

    The bound does not depend on how alpha falls, but its variance does: with 1 - t it would not
    be finite; 1 - t^3 did best on rows of text (docs/log.md), 1 - t^2 is about as good.
    """
    return 1 - t**3, -3 * t**2


def nelbo_values(
    denoiser: Any, prior: Prior, noise: Noise, min_alpha: float, device: torch.device | str
) -> TokenValues:
    """The integrand of the NELBO (Eq. 4), and 1; `min_alpha` is the least level asked."""

    def values(batch: EvalBatch) -> Tensor:
        z, alpha, dalpha = noise(batch)
        z, x = z.to(device), batch.tokens.to(device)
        log_x = predict(denoiser, batch, z, alpha.clamp(min=min_alpha))
        nats = nelbo(prior, z, x, log_x, alpha, dalpha)
        return torch.stack((nats, torch.ones_like(nats)))

    return values


def predict(denoiser: Any, batch: EvalBatch, z: Tokens, alpha: Tensor) -> Probs:
    """log x_theta; only a denoiser of padded sequences need take the argument for padding."""
    both = (batch.labels, batch.attention_mask)
    labels, real = (None if value is None else value.to(z.device) for value in both)
    return denoiser(z, alpha.float().to(z.device), labels, *(() if real is None else (real,)))


def min_alpha_of(schedule: NoiseSchedule) -> float:
    """The least level that a denoiser of this schedule was trained at."""
    return max(float(schedule.alpha(1.0)), MIN_ALPHA)


def stratify(count: int, draws: int, seed: int) -> Tensor:
    """One number in each of count * draws equal parts of [0, 1): (count, draws).

    The draws of a row are spread over the whole range; chance says which row is where.
    """
    order = torch.randperm(count, generator=generator_for(seed, 0))[:, None]
    u = torch.rand(count, draws, dtype=torch.float64, generator=generator_for(seed, 1))
    return (torch.arange(draws) + (order + u) / count) / draws


def generator_for(*numbers: int) -> Generator:
    """A generator whose state is a function of these numbers."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return Generator().manual_seed(int(state[0]) >> 1)


def noise_rows(
    prior: Prior, batch: EvalBatch, alpha: Tensor, numbers: Tensor, seed: int
) -> Tokens:
    """z_t ~ q_t(. | x) with random numbers of the seed, the row's number in the data and the
    draw: neither batches nor other rows change them."""
    u = torch.empty(batch.tokens.shape, dtype=torch.float64)
    bits = torch.empty(batch.tokens.shape, dtype=torch.int64)
    places = zip(numbers[batch.rows].tolist(), batch.draws.tolist(), strict=True)
    for i, (number, draw) in enumerate(places):
        generator = generator_for(seed, 2, number, draw)
        u[i].uniform_(generator=generator)
        bits[i].random_(-(2**63), None, generator=generator)
    return torch.where(u < alpha[..., 0], batch.tokens, prior.from_bits(bits))


# The likelihood of a dataset


@dataclass(frozen=True)
class Likelihood:
    """The NLL of a dataset in several units; of a diffusion model an upper bound.

    Args:
        nats_per_token: with its standard error.
        tokens: how many were scored.
    Example:
        >>> print(Likelihood(MetricResult("nll", 2.0, 0.1, "nats/token"), 300).bits_per_token)
        nll 2.8854 ± 0.1443 bits/token
    """

    nats_per_token: MetricResult
    tokens: int

    @property
    def bits_per_token(self) -> MetricResult:
        return self.per(self.tokens, "token")

    @property
    def perplexity(self) -> MetricResult:
        """exp(nats a token); its error to first order."""
        return exp_of("perplexity", self.nats_per_token)

    def per(self, count: int, unit: str) -> MetricResult:
        """Bits a unit, of which the same data has `count`: characters, bytes, pixels."""
        nats = self.nats_per_token
        scale = self.tokens / as_count("count", count) / math.log(2)
        stderr = scale * (nats.stderr or 0.0)
        return MetricResult("nll", scale * nats.value, stderr, f"bits/{unit}", nats.protocol)


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
    group: Processes | None = None,
    on_batch: OnBatch | None = None,
) -> Likelihood:
    """Estimate the NELBO (Eq. 4) of a dataset, or its exact NLL by an autoregressive network.

    Random numbers are a function of the seed, the number of the row and the draw, so models are
    compared on common random numbers.

    Args:
        denoiser: (z, alpha, labels=None) -> log x_theta (B, L, K). With prior None: a causal
            network, ids (B, L) -> logits (B, L, K), that reads `bos_id` first.
        prior: of the noise; None for an autoregressive network.
        schedule: the model's; its least alpha is the least that the denoiser is called with.
        data: sequences of one length.
        sequences: how many of them, spread over the data; None: all.
        draws: of (t, z_t) for each sequence.
        protocol: "exact": alpha falls from 1 to 0 (`cubic_alpha`), no term is missing at either
            end. "released": as published numbers were made, t in [.001, 1] on the model's
            schedule, stratified in each batch; no terms for the ends.
        batch_size: sequences in a forward pass.
        seed: of the random numbers.
        device: where the denoiser is.
        bos_id: the token that an autoregressive network reads first.
        group: processes that share the batches.
        on_batch: called with the passes done and their number.
    Returns:
        Nats a token with a standard error over sequences.
    Raises:
        ValueError: if an option is out of range, or bos_id is missing.
    Example:
        >>> import psidiff
        >>> from psidiff.experiment.held_out import held_out
        >>> model = psidiff.load("digits", "cpu")
        >>> known = (model.denoiser, model.prior, model.schedule, held_out("digits", model))
        >>> print(likelihood(*known, sequences=8).nats_per_token)  # doctest: +ELLIPSIS
        nll 1... ± 0... nats/token
    """
    check_choice("protocol", protocol, ("exact", "released"))
    draws, seed = as_count("draws", draws), as_count("seed", seed, least=0)
    batch_size = as_count("batch_size", batch_size)
    if prior is None and bos_id is None:
        raise ValueError("bos_id is missing: name the token that the network reads first")
    draws = 1 if prior is None else draws
    subset = EvaluationSubset(data, sequences, bos_id if prior is None else None)
    strata, about = stratify(subset.count, draws, seed), {"protocol": protocol, "draws": draws}
    if prior is None:
        values = next_token_values(denoiser, device)
    else:
        if protocol == "exact":
            levels, least = cubic_alpha(strata), min_alpha_of(schedule)
            about |= {"alpha": "1 - t^3", "least_alpha_asked": least}
        else:
            strata = _released_times(subset.count, draws, batch_size, seed)
            levels, least = (schedule.alpha(strata), schedule.dalpha(strata)), MIN_ALPHA
            about |= {"schedule": str(schedule), "batch_size": batch_size}
        noise = row_noise(prior, *levels, subset.numbers, seed)
        values = nelbo_values(denoiser, prior, noise, least, device)
    sums = sum_over_tokens(
        subset,
        values,
        3 if prior is None else 2,
        draws,
        batch_size,
        group=group,
        on_batch=on_batch,
    )
    tokens = sums[-1, :, 0]
    nats = ratio_estimate(sums[0].mean(-1), tokens, strata[:, 0], prior, seed, about)
    return Likelihood(nats, int(tokens.sum()))


def _released_times(count: int, draws: int, batch_size: int, seed: int) -> Tensor:
    """t = t_min + (1 - t_min) (i + U_i)/n for row i of a batch of n."""
    number = torch.arange(count)
    first = number // batch_size * batch_size
    size = (count - first).clamp(max=batch_size)
    u = torch.rand(count, draws, dtype=torch.float64, generator=generator_for(seed, 1))
    place = ((number - first)[:, None] + u) / size[:, None]
    return _RELEASED_T_MIN + (1 - _RELEASED_T_MIN) * place


def row_noise(prior: Prior, alpha: Tensor, dalpha: Tensor, numbers: Tensor, seed: int) -> Noise:
    """Noise at levels (rows, draws), for rows of these numbers in a dataset."""

    def noise(batch: EvalBatch) -> tuple[Tokens, Tensor, Tensor]:
        a, da = (level[batch.rows, batch.draws, None, None] for level in (alpha, dalpha))
        return noise_rows(prior, batch, a, numbers, seed), a, da

    return noise


def ratio_estimate(
    nats: Tensor,
    tokens: Tensor,
    strata: Tensor,
    prior: Prior | None,
    seed: int,
    about: dict[str, Any],
) -> MetricResult:
    """Nats a token of sequences (count,): a ratio of sums, and its error to first order.

    Rows that lie next to each other in the strata (count,) differ by chance alone, so half of
    their squared difference is what a row adds to the variance.
    """
    order = strata.argsort()
    nats, tokens = nats[order], tokens[order]
    mean = nats.sum() / tokens.sum()
    steps = (nats - mean * tokens).diff()
    count, stderr = len(nats), UNKNOWN
    if count > 1:
        variance = count / (count - 1) * (steps**2).sum() / 2
        stderr = (variance.sqrt() / tokens.sum()).item()
    protocol = {
        **about,
        "sequences": count,
        "tokens": int(tokens.sum()),
        "seed": seed,
        "prior": None if prior is None else str(prior),
    }
    return MetricResult("nll", mean.item(), stderr, "nats/token", protocol)

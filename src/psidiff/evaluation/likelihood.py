"""How likely data is: -log p(x), or a bound on it from which nothing is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ..process.nelbo import nelbo
from ..process.posterior import psi
from ..process.prior import Prior
from ..process.schedule import NoiseSchedule
from ..sampling.plan import Step
from ..types import Dataset, Level, PerToken, Probs, Rows, Tokens, as_count, working_dtype
from .law import kappa_of
from .measure import Measure

OnBatch = Callable[[int, int], None]
PROTOCOLS = ("exact", "released")
_RELEASED_T_MIN = 1e-3
_LEAST_LEVEL = 1e-9  # denoisers take -log alpha; the sampler asks no lower either
_CHUNK = 2**22  # probabilities in memory at a time


@dataclass(frozen=True)
class Likelihood:
    """Nats a token, and the same in other units; of a diffusion model an upper bound."""

    nats_per_token: Measure
    tokens: int

    @property
    def bits_per_token(self) -> Measure:
        return self.per(self.tokens, "token")

    @property
    def perplexity(self) -> Measure:
        """exp(nats a token); its error to first order."""
        nats = self.nats_per_token
        value = math.exp(nats.value)
        return Measure("perplexity", value, value * (nats.error or 0.0), "", nats.protocol)

    def per(self, count: int, unit: str) -> Measure:
        """Bits a unit, of which the same data has `count`: characters, bytes, pixels."""
        nats = self.nats_per_token
        scale = self.tokens / as_count("count", count) / math.log(2)
        error = scale * (nats.error or 0.0)
        return Measure("nll", scale * nats.value, error, f"bits/{unit}", nats.protocol)


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

    exact     alpha falls from 1 to 0, so no term is missing at either end. The bound does not
              depend on how it falls: as 1 - t^3, since 1 - t would have no finite variance.
              Every row is looked at `draws` times.
    released  as published numbers were made: t in [.001, 1] on the model's schedule, the mean
              of the integrand, stratified in each batch; no terms for the ends.

    prior None: `denoiser(tokens)` gives the logits of a network that reads `bos_id`, then the
    row from left to right; -log p(x) is then exact. All chance is a function of the seed and of
    the number of the row and the draw, so that models are compared on common random numbers.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be {' or '.join(PROTOCOLS)}, got {protocol!r}")
    rows = _Chosen(data, sequences, as_count("batch_size", batch_size), device, on_batch)
    draws, seed = as_count("draws", draws), as_count("seed", seed, least=0)
    times = stratified(rows.count, draws, seed)
    loss: Loss
    if prior is None:
        loss, draws = _left_to_right(denoiser, bos_id), 1
    elif protocol == "exact":
        least = max(float(schedule.alpha(1.0)), _LEAST_LEVEL)
        loss = _bound(denoiser, prior, 1 - times**3, -3 * times**2, least, seed)
    else:
        times = _released_times(rows.count, draws, rows.batch_size, seed)
        alpha, slope = schedule.alpha(times), schedule.dalpha(times)
        loss = _bound(denoiser, prior, alpha, slope, _LEAST_LEVEL, seed)
    sums = rows.sums(loss, draws) / torch.tensor([draws, 1])
    about = {"protocol": protocol, "draws": draws, "schedule": str(schedule)}
    if protocol == "released" and prior is not None:
        about["batch_size"] = rows.batch_size
    return Likelihood(_measure(sums, times[:, 0], prior, seed, about), int(sums[:, 1].sum()))


@torch.no_grad()
def psi_nelbo(
    denoiser: Any,
    prior: Prior,
    steps: Sequence[Step],
    data: Dataset,
    *,
    sequences: int | None = None,
    draws: int = 1,
    steps_drawn: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    device: torch.device | str = "cpu",
    on_batch: OnBatch | None = None,
) -> Measure:
    """The bound on -log p(x) of a sampler itself, in nats a token (App. "NELBO"):

    sum over steps of E_{z_t ~ q_t(.|x)} KL(Psi_{s|t}(. | z_t, x) || Psi^theta_{s|t}(. | z_t))
    + KL(q_1(. | x) || pi)

    The last step goes to alpha_s = 1, where its KL is the reconstruction term -log p(x | z_t).
    steps_drawn: so many steps, drawn anew for each row and draw, stand for all of them.
    """
    _check_plan(steps)
    rows = _Chosen(data, sequences, as_count("batch_size", batch_size), device, on_batch)
    draws, seed = as_count("draws", draws), as_count("seed", seed, least=0)
    if steps_drawn is None:
        places = stratified(rows.count, 1, seed)
        numbers = torch.arange(len(steps)).repeat(draws).expand(rows.count, -1)
    else:
        places = stratified(rows.count, draws * as_count("steps_drawn", steps_drawn), seed)
        numbers = (places * len(steps)).long()
    loss = _step_divergence(denoiser, prior, steps, numbers, seed)
    evaluations = numbers.shape[1]
    sums = rows.sums(loss, evaluations) * torch.tensor([len(steps) / evaluations, 1])
    kappas = [kappa_of(step) for step in steps]
    about = {
        "protocol": "psi",
        "draws": draws,
        "steps": len(steps),
        "steps_drawn": steps_drawn,
        "kappa": [min(kappas), max(kappas)],
        "alpha": [steps[0].alpha_t, steps[-1].alpha_t],
    }
    return _measure(sums, places[:, 0], prior, seed, about)


def psi_divergence(
    prior: Prior,
    z: Tokens,
    x: Tokens,
    log_x_theta: Probs,
    alpha_s: Level,
    alpha_t: Level,
    kappa: float | PerToken,
) -> PerToken:
    """KL(Psi_{s|t}(. | z_t, x) || Psi^theta_{s|t}(. | z_t)), summed over all K tokens.

    The terms are p log(p/q) - p + q, none of them below 0.
    """
    clean = F.one_hot(x, prior.vocab_size).to(log_x_theta)
    p, q = (
        psi(prior, z, each, alpha_s, alpha_t, kappa).probs(prior, z, each)
        for each in (clean, log_x_theta.exp())
    )
    log_ratio = torch.where(p > 0, p, 1).log() - torch.where(p > 0, q, 1).log()
    return (p * log_ratio - p + q).sum(-1)


def stratified(count: int, draws: int, seed: int) -> Tensor:
    """One number in each of count * draws equal parts of [0, 1): (count, draws).

    The draws of a row are spread over the whole range; chance says which row is where.
    """
    order = torch.randperm(count, generator=_seeded(seed, 0))[:, None]
    u = torch.rand(count, draws, dtype=torch.float64, generator=_seeded(seed, 1))
    return (torch.arange(draws) + (order + u) / count) / draws


def _released_times(count: int, draws: int, batch_size: int, seed: int) -> Tensor:
    """t = t_min + (1 - t_min) (i + U_i)/n for row i of a batch of n."""
    number = torch.arange(count)
    first = number // batch_size * batch_size
    size = (count - first).clamp(max=batch_size)
    u = torch.rand(count, draws, dtype=torch.float64, generator=_seeded(seed, 1))
    place = ((number - first)[:, None] + u) / size[:, None]
    return _RELEASED_T_MIN + (1 - _RELEASED_T_MIN) * place


@dataclass(frozen=True)
class _Part:
    """Some of the chosen rows: their places among these, their numbers in the data."""

    places: slice
    numbers: Tensor
    rows: Rows
    device: torch.device | str

    def corrupted(self, prior: Prior, alpha: Tensor, seed: int, draw: int) -> Tokens:
        """z_t ~ q_t(. | x): `corrupt` with random numbers that belong to each row by itself."""
        x = self.rows.tokens
        u = torch.empty(x.shape, dtype=torch.float64)
        bits = torch.empty(x.shape, dtype=torch.int64)
        for i, number in enumerate(self.numbers.tolist()):
            generator = _seeded(seed, 2, number, draw)
            u[i].uniform_(generator=generator)
            bits[i].random_(-(2**63), None, generator=generator)
        return torch.where(u < alpha[..., 0], x, prior.from_bits(bits)).to(self.device)

    def ask(self, denoiser: Any, z: Tokens, alpha: Tensor) -> Probs:
        """log x_theta; only a denoiser that knows padded rows need know of padding."""
        labels, real = (None if v is None else v.to(self.device) for v in self.rows[1:])
        padding = () if real is None else (real,)
        return denoiser(z, alpha.float().to(self.device), labels, *padding)

    @property
    def x(self) -> Tokens:
        return self.rows.tokens.to(self.device)


Loss = Callable[[_Part, int], Tensor]
"""(rows, number of the draw) -> nats of each token, (B, L)."""


class _Chosen:
    """Rows spread over a dataset, met in batches."""

    def __init__(
        self,
        data: Dataset,
        sequences: int | None,
        batch_size: int,
        device: torch.device | str,
        on_batch: OnBatch | None,
    ) -> None:
        total = as_count("the number of sequences in the data", len(data))
        wanted = total if sequences is None else as_count("sequences", sequences)
        self.count = min(wanted, total)
        self.numbers = torch.arange(self.count) * total // self.count
        self.data, self.batch_size, self.device = data, batch_size, device
        self.on_batch = on_batch

    def sums(self, loss: Loss, draws: int) -> Tensor:
        """Nats, over all draws, and tokens of each row: (count, 2)."""
        sums = torch.zeros(self.count, 2, dtype=torch.float64)
        for first in range(0, self.count, self.batch_size):
            places = slice(first, min(first + self.batch_size, self.count))
            rows = self.data.rows(self.numbers[places])
            real = torch.ones_like(rows.tokens) if rows.real is None else rows.real
            part = _Part(places, self.numbers[places], rows, self.device)
            for draw in range(draws):
                nats = torch.where(real.bool(), loss(part, draw).cpu().double(), 0.0)
                sums[places, 0] += nats.sum(-1)
            sums[places, 1] = real.sum(-1).double()
            if self.on_batch is not None:
                self.on_batch(places.stop, self.count)
        return sums


def _bound(
    denoiser: Any, prior: Prior, alpha: Tensor, slope: Tensor, least: float, seed: int
) -> Loss:
    """The integrand at levels (count, draws); the denoiser is asked at `least` or above."""

    def loss(part: _Part, draw: int) -> Tensor:
        a, da = (level[part.places, draw, None, None] for level in (alpha, slope))
        z = part.corrupted(prior, a, seed, draw)
        log_x = part.ask(denoiser, z, a.clamp(min=least))
        return nelbo(prior, z, part.x, log_x, a, da)

    return loss


def _left_to_right(network: Any, bos_id: int | None) -> Loss:
    """-log p(x_l | x before l)"""
    if bos_id is None:
        raise ValueError("bos_id is missing: name the token that the network reads first")

    def loss(part: _Part, draw: int) -> Tensor:
        start = torch.full_like(part.x[:, :1], bos_id)
        log_p = network(torch.cat((start, part.x[:, :-1]), 1)).float().log_softmax(-1)
        return -log_p.gather(-1, part.x[..., None]).squeeze(-1)

    return loss


def _step_divergence(
    denoiser: Any, prior: Prior, steps: Sequence[Step], numbers: Tensor, seed: int
) -> Loss:
    """The KL of the steps that are numbered (count, draws), a few rows of K at a time.

    Each carries its share of the prior's term, so that all of them together have it once.
    """
    plan = [(step.alpha_s, step.alpha_t, kappa_of(step)) for step in steps]
    levels, start = torch.tensor(plan, dtype=torch.float64), _start(prior, steps[0].alpha_t)
    size = max(_CHUNK // prior.vocab_size, 1)

    def loss(part: _Part, draw: int) -> Tensor:
        s, t, kappa = levels[numbers[part.places, draw]].T[..., None, None]  # (B, 1, 1), each
        z = part.corrupted(prior, t, seed, draw)
        log_x = part.ask(denoiser, z, t.clamp(min=_LEAST_LEVEL))
        dtype = working_dtype(z.device)
        s, t, kappa = (v.to(z.device, dtype).expand(*z.shape, 1) for v in (s, t, kappa))
        flat = (v.flatten(0, 1).split(size) for v in (z, part.x, log_x, s, t, kappa))
        pieces = [[v[None] for v in piece] for piece in zip(*flat, strict=True)]
        found = [
            psi_divergence(prior, z, x, log_x.to(dtype), s, t, kappa[..., 0])
            for z, x, log_x, s, t, kappa in pieces
        ]
        return torch.cat(found, 1).view(z.shape).cpu() + start(part.rows) / len(steps)

    return loss


def _start(prior: Prior, alpha: float) -> Callable[[Rows], Tensor]:
    """KL(q_1(. | x) || pi): the sampler starts at pi, not at q_1."""
    pi = prior.probs(like=torch.zeros((), dtype=torch.float64))
    q = alpha + (1 - alpha) * pi  # of x itself; all others have (1 - alpha) pi
    others = (1 - pi) * math.log1p(-alpha) * (1 - alpha) if alpha < 1 else 0 * pi
    table = q * (q / pi).log() + others if alpha > 0 else 0 * pi

    def nats(rows: Rows) -> Tensor:
        found = table[rows.tokens]
        if bool((found if rows.real is None else found[rows.real]).isinf().any()):
            raise ValueError(
                f"the plan starts at alpha = {alpha:g}, where tokens can be clean, but {prior} "
                "never draws them: the bound is infinite unless its schedule has eps=0"
            )
        return found

    return nats


def _check_plan(steps: Sequence[Step]) -> None:
    """What a bound needs: every step begins where the last one ended, and all are draws."""
    if not steps or steps[-1].alpha_s != 1:
        raise ValueError("a plan has a likelihood if its last step goes to alpha_s = 1")
    for before, after in pairwise(steps):
        if before.alpha_s != after.alpha_t:
            raise ValueError(
                f"a step to alpha {before.alpha_s:g} is followed by one from "
                f"{after.alpha_t:g}: a plan with gaps has no likelihood"
            )
    if any(step.greedy for step in steps):
        raise ValueError("a greedy step has no likelihood: plan with last='sample'")


def _measure(
    sums: Tensor, places: Tensor, prior: Prior | None, seed: int, about: dict[str, Any]
) -> Measure:
    """A ratio of sums, and its error to first order.

    Rows that lie next to each other in the stratified places differ by chance alone, so half of
    their squared difference is what a row adds to the variance.
    """
    nats, tokens = sums[places.argsort()].unbind(-1)
    mean = nats.sum() / tokens.sum()
    steps = (nats - mean * tokens).diff()
    count = len(nats)
    error = math.inf  # of a single row nobody knows
    if count > 1:
        variance = count / (count - 1) * (steps**2).sum() / 2
        error = (variance.sqrt() / tokens.sum()).item()
    protocol = {
        **about,
        "sequences": count,
        "tokens": int(tokens.sum()),
        "seed": seed,
        "prior": None if prior is None else str(prior),
    }
    return Measure("nll", mean.item(), error, "nats/token", protocol)


def _seeded(*numbers: int) -> Generator:
    """A generator whose state is a function of these numbers."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return Generator().manual_seed(int(state[0]) >> 1)

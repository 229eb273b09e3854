"""Nats of rows chosen from a dataset, each met with random numbers of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from ..process.prior import Prior
from ..types import Dataset, Probs, Rows, Tokens, as_count
from .metric_result import UNKNOWN, MetricResult

OnBatch = Callable[[int, int], None]
"""Is told how many passes over a row are done, and of how many."""


def stratified(count: int, draws: int, seed: int) -> Tensor:
    """One number in each of count * draws equal parts of [0, 1): (count, draws).

    The draws of a row are spread over the whole range; chance says which row is where.
    """
    order = torch.randperm(count, generator=seeded(seed, 0))[:, None]
    u = torch.rand(count, draws, dtype=torch.float64, generator=seeded(seed, 1))
    return (torch.arange(draws) + (order + u) / count) / draws


@dataclass(frozen=True)
class Part:
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
            generator = seeded(seed, 2, number, draw)
            u[i].uniform_(generator=generator)
            bits[i].random_(-(2**63), None, generator=generator)
        return torch.where(u < alpha[..., 0], x, prior.from_bits(bits)).to(self.device)

    def ask(self, denoiser: Any, z: Tokens, alpha: Tensor) -> Probs:
        """log x_theta; only a denoiser that knows padded rows need know of padding."""
        labels, real = (None if v is None else v.to(self.device) for v in self.rows[1:3])
        padding = () if real is None else (real,)
        return denoiser(z, alpha.float().to(self.device), labels, *padding)

    @property
    def x(self) -> Tokens:
        return self.rows.tokens.to(self.device)


Loss = Callable[[Part, int], Tensor]
"""(rows, number of the draw) -> nats of each token, (B, L)."""


class Chosen:
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
            part = Part(places, self.numbers[places], rows, self.device)
            for draw in range(draws):
                nats = torch.where(real.bool(), loss(part, draw).cpu().double(), 0.0)
                sums[places, 0] += nats.sum(-1)
                if self.on_batch is not None:
                    done = first * draws + (places.stop - first) * (draw + 1)
                    self.on_batch(done, self.count * draws)
            sums[places, 1] = real.sum(-1).double()
        return sums


def measured(
    sums: Tensor, places: Tensor, prior: Prior | None, seed: int, about: dict[str, Any]
) -> MetricResult:
    """A ratio of sums, and its error to first order.

    Rows that lie next to each other in the stratified places differ by chance alone, so half of
    their squared difference is what a row adds to the variance.
    """
    nats, tokens = sums[places.argsort()].unbind(-1)
    mean = nats.sum() / tokens.sum()
    steps = (nats - mean * tokens).diff()
    count = len(nats)
    error = UNKNOWN
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
    return MetricResult("nll", mean.item(), error, "nats/token", protocol)


def seeded(*numbers: int) -> Generator:
    """A generator whose state is a function of these numbers."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return Generator().manual_seed(int(state[0]) >> 1)

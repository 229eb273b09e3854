"""A bound on -log p of whole sequences, each of its own length, with its error.

The difference of two sequences matters more than either: those of one group meet the same times
and, from the left, the same noise, so that most of the chance cancels.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from ..process.nelbo import nelbo
from ..process.posterior import corrupt
from ..process.prior import Prior
from ..process.schedule import NoiseSchedule
from ..types import as_count, as_ids
from .levels import LEAST_LEVEL, falling
from .ragged import Piece, Sequences, in_batches, joined, marks_of

Times = Callable[[Generator], Tensor]
"""When to look at a row, (draws,) in (0, 1]."""


class Bound(NamedTuple):
    """Nats of a sequence, summed over its tokens, and their standard error over draws."""

    nats: float
    error: float


def joint_nll(
    denoiser: Any,
    prior: Prior,
    schedule: NoiseSchedule,
    rows: Sequences,
    *,
    draws: int = 1024,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
    scored: Sequences | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
) -> list[Bound]:
    """A bound on -log p(x) of each sequence, no term left out: `joint_draws`, averaged."""
    values = joint_draws(
        denoiser,
        prior,
        schedule,
        rows,
        draws=draws,
        seed=seed,
        groups=groups,
        scored=scored,
        batch_size=batch_size,
        device=device,
    )
    return [estimate(each) for each in values]


@torch.no_grad()
def joint_draws(
    denoiser: Any,
    prior: Prior,
    schedule: NoiseSchedule,
    rows: Sequences,
    *,
    draws: int = 1024,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
    scored: Sequences | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """sum_l nelbo_l(z_t, x) at `draws` random t, (draws,) for each sequence (Eq. 4).

    alpha falls from 1 to 0 as 1 - t^3 (`falling`), so no term is missing at either end. Half as
    many equal parts of [0, 1] hold two draws each, side by side.

    groups   sequences with equal labels share times and noise; None: each by itself
    scored   True at the tokens that count, (L_i,) each. The others are given: clean, at level
             1, and free of charge. The bound is then on -log p(scored | given)

    All chance is a function of the seed, the group (by its repr; or else the tokens), the draw
    and the position: order, batches and what else is asked change nothing but rounding.
    """
    if as_count("draws", draws, least=2) % 2:
        raise ValueError(f"draws must be even, two for each part of time, got {draws}")
    asked = _Asked(prior, rows, scored, groups, seed)
    found = [torch.zeros(draws, dtype=torch.float64) for _ in rows]

    def times(generator: Generator) -> Tensor:
        part = torch.arange(draws // 2)[:, None]
        u = torch.rand(draws // 2, 2, dtype=torch.float64, generator=generator)
        return ((part + u) / (draws // 2)).flatten()

    mixed = _takes_padding(denoiser)
    for pieces, batch in asked.batches(times, draws, batch_size, mixed):
        log_x = batch.ask(denoiser, schedule, device)
        z, x = batch.z.to(device), batch.x.to(device)
        alpha, dalpha = (level[..., None] for level in falling(batch.t))
        nats = nelbo(prior, z, x, log_x, alpha, dalpha).cpu().double()
        sums = torch.where(batch.counted, nats, 0.0).sum(-1)
        for piece, part in zip(pieces, sums.split([len(p) for p in pieces]), strict=True):
            found[piece.row][piece.draws] = part
    return found


def estimate(values: Tensor) -> Bound:
    """The mean of stratified draws, or of the differences of two sequences of one group.

    Two draws of the same part of time differ by chance alone: (f - f')^2/4 is, without bias,
    the variance of their mean.
    """
    pairs = values.double().view(-1, 2)
    mean = pairs.mean().item()
    if not math.isfinite(mean):
        return Bound(mean, math.inf)
    spread = (pairs.diff(dim=-1) ** 2).sum().sqrt() / 2
    return Bound(mean, (spread / len(pairs)).item())


@torch.no_grad()
def greedy_in_one_pass(
    denoiser: Any,
    prior: Prior,
    schedule: NoiseSchedule,
    rows: Sequences,
    scored: Sequences,
    *,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
) -> list[bool]:
    """Whether, with pure noise at the scored tokens, x_theta is largest at each of them.

    One draw of the noise and one pass, as in the released code: not the mode of p, which no
    few passes can find.
    """
    asked = _Asked(prior, rows, scored, groups, seed)
    found, last = [True] * len(rows), torch.ones(1, dtype=torch.float64)
    for pieces, batch in asked.batches(
        lambda generator: last, 1, batch_size, _takes_padding(denoiser)
    ):
        guess = batch.ask(denoiser, schedule, device).argmax(-1).cpu()
        right = ((guess == batch.x) | ~batch.counted).all(-1)
        for piece, each in zip(pieces, right.tolist(), strict=True):
            found[piece.row] = each
    return found


class _Noisy(NamedTuple):
    """Draws of rows: tokens x, their noise z, and when, (n, 1), or (n, L) with 0 where given.

    counted is True at tokens that are scored, real at those that are not padding.
    """

    x: Tensor
    z: Tensor
    t: Tensor
    counted: Tensor
    real: Tensor

    def ask(self, denoiser: Any, schedule: NoiseSchedule, device: torch.device | str) -> Tensor:
        """log x_theta, never below the least level that the denoiser knows."""
        least = max(float(schedule.alpha(1.0)), LEAST_LEVEL)
        alpha = falling(self.t)[0].clamp(min=least)[..., None]
        padding = () if bool(self.real.all()) else (None, self.real.to(device))
        return denoiser(self.z.to(device), alpha.float().to(device), *padding)


class _Asked:
    """Sequences, what of them is scored, and where their chance comes from."""

    def __init__(
        self,
        prior: Prior,
        rows: Sequences,
        scored: Sequences | None,
        groups: Sequence[Hashable] | None,
        seed: int,
    ) -> None:
        if groups is not None and len(groups) != len(rows):
            raise ValueError(f"there are {len(groups)} groups for {len(rows)} rows")
        self.rows = [as_ids("rows", row.cpu(), prior.vocab_size) for row in rows]
        self.marks, self.partly = marks_of(rows, scored), scored is not None
        self.prior, self.groups = prior, groups
        self.seed = as_count("seed", seed, least=0)

    def batches(
        self, times: Times, draws: int, batch_size: int, mixed: bool
    ) -> Iterator[tuple[list[Piece], _Noisy]]:
        """Every draw of every row that has something to score."""
        lengths = [len(mark) if bool(mark.any()) else 0 for mark in self.marks]
        # the draws of a row are met one after another, so one row is enough to remember
        noisy = lru_cache(maxsize=1)(lambda row: self._noisy(row, times))
        for pieces in in_batches(lengths, draws, batch_size, mixed):
            parts = [_Noisy(*(v[p.draws] for v in noisy(p.row))) for p in pieces]
            yield pieces, _Noisy(*(joined(list(each)) for each in zip(*parts, strict=True)))

    def _noisy(self, number: int, times: Times) -> _Noisy:
        """One z_t for each time, on the CPU: the numbers are the same on every device."""
        row, mark = self.rows[number], self.marks[number]
        label = row.tolist() if self.groups is None else self.groups[number]
        digest = hashlib.blake2b(repr((self.seed, label)).encode(), digest_size=8).digest()
        generator = Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        t = times(generator)[:, None]
        if self.partly:
            t = torch.where(mark, t, 0.0)
        x, counted = row.expand(len(t), -1), mark.expand(len(t), -1)
        z = corrupt(self.prior, x, falling(t)[0][..., None], generator)
        return _Noisy(x, z, t, counted, torch.ones_like(counted))


def _takes_padding(denoiser: Any) -> bool:
    """Whether a denoiser, and the network in it, has a fourth argument `mask`."""
    call = getattr(denoiser, "forward", denoiser)
    if "mask" not in inspect.signature(call).parameters:
        return False
    inside = getattr(denoiser, "network", None)
    return inside is None or _takes_padding(inside)

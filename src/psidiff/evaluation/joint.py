"""-log p of whole sequences, each of its own length: the score of an answer, and its error.

The difference of two sequences matters more than either: those of one group meet the same times
and, from the left, the same noise, so that most of the chance cancels.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ..process.nelbo import nelbo
from ..process.posterior import corrupt
from ..process.prior import Prior
from ..process.schedule import NoiseSchedule
from ..types import as_count, as_ids

_LEAST_LEVEL = 1e-9  # denoisers take -log alpha
Sequences = Sequence[Tensor]
"""Token ids, or marks of them, (L_i,) each."""
Times = Callable[[Generator], Tensor]
"""When to look at a row, (draws,) in (0, 1]."""


class Scored(NamedTuple):
    """Nats of a sequence, summed over its tokens, and their standard error over draws."""

    nats: float
    error: float


class Chained(NamedTuple):
    """Exact nats of a sequence, and whether each scored token was the likeliest."""

    nats: float
    greedy: bool


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
) -> list[Scored]:
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

    alpha = 1 - t^2 falls from 1 to 0, so nothing is missing at the ends, and the variance is
    finite at t = 0. Half as many equal parts of [0, 1] hold two draws each, side by side.

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
        alpha, dalpha = (1 - batch.t**2)[..., None], (-2 * batch.t)[..., None]
        nats = nelbo(prior, z, x, log_x, alpha, dalpha).cpu().double()
        sums = torch.where(batch.counted, nats, 0.0).sum(-1)
        for piece, part in zip(pieces, sums.split([len(p) for p in pieces]), strict=True):
            found[piece.row][piece.draws] = part
    return found


def estimate(values: Tensor) -> Scored:
    """The mean of stratified draws, or of the differences of two sequences of one group.

    Two draws of the same part of time differ by chance alone: (f - f')^2/4 is, without bias,
    the variance of their mean.
    """
    pairs = values.double().view(-1, 2)
    mean = pairs.mean().item()
    if not math.isfinite(mean):
        return Scored(mean, math.inf)
    spread = (pairs.diff(dim=-1) ** 2).sum().sqrt() / 2
    return Scored(mean, (spread / len(pairs)).item())


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


@torch.no_grad()
def chain_nll(
    network: Any,
    bos_id: int,
    rows: Sequences,
    *,
    scored: Sequences | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
) -> list[Chained]:
    """-log p(x) = -sum_l log p(x_l | x before l), of a network that reads `bos_id` first."""
    marks = _marks(rows, scored)
    found = [Chained(0.0, True)] * len(rows)
    for pieces in _batches([len(row) for row in rows], 1, batch_size, mixed=True):
        x = _joined([rows[p.row][None].long() for p in pieces]).to(device)
        counted = _joined([marks[p.row][None] for p in pieces])
        start = torch.full_like(x[:, :1], bos_id)  # a causal network never sees the padding
        log_p = network(torch.cat((start, x[:, :-1]), 1)).float().log_softmax(-1)
        nats = -log_p.gather(-1, x[..., None]).squeeze(-1).cpu().double()
        sums = torch.where(counted, nats, 0.0).sum(-1)
        right = ((log_p.argmax(-1) == x).cpu() | ~counted).all(-1)
        for piece, total, each in zip(pieces, sums.tolist(), right.tolist(), strict=True):
            found[piece.row] = Chained(total, each)
    return found


@dataclass(frozen=True)
class _Piece:
    """Some draws of one row."""

    row: int
    draws: slice

    def __len__(self) -> int:
        return self.draws.stop - self.draws.start


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
        least = max(float(schedule.alpha(1.0)), _LEAST_LEVEL)
        alpha = (1 - self.t**2).clamp(min=least)[..., None]
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
        self.marks, self.partly = _marks(rows, scored), scored is not None
        self.prior, self.groups = prior, groups
        self.seed = as_count("seed", seed, least=0)

    def batches(
        self, times: Times, draws: int, batch_size: int, mixed: bool
    ) -> Iterator[tuple[list[_Piece], _Noisy]]:
        """Every draw of every row that has something to score."""
        lengths = [len(mark) if bool(mark.any()) else 0 for mark in self.marks]
        # the draws of a row are met one after another, so one row is enough to remember
        noisy = lru_cache(maxsize=1)(lambda row: self._noisy(row, times))
        for pieces in _batches(lengths, draws, batch_size, mixed):
            parts = [_Noisy(*(v[p.draws] for v in noisy(p.row))) for p in pieces]
            yield pieces, _Noisy(*(_joined(list(each)) for each in zip(*parts, strict=True)))

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
        z = corrupt(self.prior, x, (1 - t**2)[..., None], generator)
        return _Noisy(x, z, t, counted, torch.ones_like(counted))


def _batches(
    lengths: Sequence[int], draws: int, batch_size: int, mixed: bool
) -> Iterator[list[_Piece]]:
    """All draws of all rows, at most `batch_size` at a time, the short ones first.

    Unless lengths may be mixed, a batch has one of them. Rows of length 0 are left out.
    """
    batch: list[_Piece] = []
    room = as_count("batch_size", batch_size)
    for row in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i]):
        if batch and not mixed and lengths[row] != lengths[batch[-1].row]:
            yield batch
            batch, room = [], batch_size
        first = 0
        while first < draws:
            last = min(first + room, draws)
            batch.append(_Piece(row, slice(first, last)))
            first, room = last, room - (last - first)
            if not room:
                yield batch
                batch, room = [], batch_size
    if batch:
        yield batch


def _joined(blocks: list[Tensor]) -> Tensor:
    """Blocks (n_i, L_i) as one, padded on the right with zeros: tokens, clean, not real."""
    longest = max(block.shape[1] for block in blocks)
    return torch.cat([F.pad(block, (0, longest - block.shape[1])) for block in blocks])


def _marks(rows: Sequences, scored: Sequences | None) -> list[Tensor]:
    if scored is None:
        return [torch.ones(len(row), dtype=torch.bool) for row in rows]
    for row, mark in zip(rows, scored, strict=True):
        if row.shape != mark.shape:
            raise ValueError(
                f"scored must mark the tokens of its row: {len(mark)} marks, {len(row)} tokens"
            )
    return [mark.bool().cpu() for mark in scored]


def _takes_padding(denoiser: Any) -> bool:
    """Whether a denoiser, and the network in it, has a fourth argument `mask`."""
    call = getattr(denoiser, "forward", denoiser)
    if "mask" not in inspect.signature(call).parameters:
        return False
    inside = getattr(denoiser, "network", None)
    return inside is None or _takes_padding(inside)

"""What a step learns from: which sequences, their times, and what of them is given.

All of it is a function of the seed and the step: there is nothing to save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor

from ..types import PerToken


@dataclass(frozen=True)
class Batch:
    """Sequences to learn from.

    Args:
        tokens: clean token ids, (B, L).
        times: (B,) in (0, 1], from `stratified_times`.
        labels: (B,), or None.
        given: (B, L), True at tokens that are shown clean and cost nothing, which trains a
            network for `sample(given=...)`; or None.
        real: (B, L), False at padding, which is neither seen nor counted; or None.

    Example:
        >>> from psidiff.training import Batch
        >>> given = torch.tensor([[True, False, False]])
        >>> batch = Batch(torch.zeros(1, 3, dtype=torch.int64), torch.ones(1), given=given)
        >>> batch.mean(torch.tensor([[0.0, 1.0, 3.0]]))  # over what is not given
        tensor(2.)
    """

    tokens: Any  # (B, L)
    times: Any  # (B,)
    labels: Any = None  # (B,) or None
    given: Any = None  # (B, L) or None
    real: Any = None  # (B, L) or None

    def mean(self, loss: PerToken) -> Tensor:
        """The mean over the tokens that are to be learnt."""
        mask = self.loss_mask()
        return loss.mean() if mask is None else loss.sum() / mask.sum()

    def loss_mask(self) -> Tensor | None:
        """Tokens that are neither given nor padding, (B, L); None: all."""
        if self.given is None or self.real is None:
            return self.real if self.given is None else ~self.given
        return self.real & ~self.given

    def weights(self) -> Tensor:
        """What each token counts in `mean`, (B, L)."""
        mask = self.loss_mask()
        if mask is None:
            return torch.full_like(self.tokens, 1 / self.tokens.numel(), dtype=torch.float32)
        return mask / mask.sum()

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; its times stay where levels are made, in float64."""
        return self._each(lambda held: held.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Where a GPU can fetch it while it works on the step before."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        held = {name: getattr(self, name) for name in ("tokens", "labels", "given", "real")}
        return replace(self, **{n: change(v) for n, v in held.items() if v is not None})


def stratified_times(
    count: int,
    generator: Generator | None = None,
    rank: int = 0,
    world_size: int = 1,
    t_min: float = 1e-3,
) -> Tensor:
    """Draw one time for each of `count` sequences, spread evenly over the batch of all
    processes.

    u_i = (i + U_i)/n over the n = count * world_size sequences; process r holds i = r, r +
    world_size, ...: each sees the whole range. Give every process the same generator state.

    Args:
        count: sequences of this process.
        generator: None: torch's global generator.
        rank: number of this process.
        world_size: number of processes.
        t_min: the smallest time.

    Returns:
        Times (count,) in [t_min, 1], float64.

    Example:
        >>> from psidiff.training import stratified_times
        >>> t = stratified_times(4, t_min=0.0)
        >>> (t * 4).floor().tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    total = count * world_size
    u = torch.rand(total, dtype=torch.float64, generator=generator)
    return between(u, total, t_min)[rank::world_size]


def between(u: Tensor, total: int, t_min: float) -> Tensor:
    """One number in each of `total` equal parts of [t_min, 1]."""
    place = (torch.arange(total, dtype=torch.float64, device=u.device) + u) / total
    return t_min + (1 - t_min) * place


def random_spans(
    shape: tuple[int, int], share: float, generator: Generator | None = None
) -> Tensor:
    """Choose given tokens: in a share of the sequences a random span, or all but one.

    Args:
        shape: (B, L).
        share: of the sequences that have given tokens at all, in [0, 1].
        generator: None: torch's global generator.

    Returns:
        Booleans (B, L); at least one token of every sequence is not given.

    Example:
        >>> from psidiff.training import random_spans
        >>> random_spans((2, 6), share=1.0).all(-1)
        tensor([False, False])
    """
    batch, length = shape
    chosen, inside = torch.rand(2, batch, 1, generator=generator).unbind(0)
    cuts = torch.randint(0, length + 1, (batch, 2), generator=generator).sort(-1).values
    place = torch.arange(length)
    span = (place >= cuts[:, :1]) & (place < cuts[:, 1:])
    given = torch.where(inside < 0.5, span, ~span) & (chosen < share)
    return given & ~given.all(-1, keepdim=True)


def seeded(*parts: int) -> Generator:
    """A generator whose state is a function of these numbers."""
    return Generator().manual_seed(derive_seed(*parts))


def derive_seed(*parts: int) -> int:
    """63 bits from any whole numbers."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Order:
    """The order of the data: rows shuffled anew in every epoch, without end.

    It is a function of the seed, so a checkpoint has nothing of it to save.

    Args:
        count: number of rows.
        seed: of the shuffles.

    Example:
        >>> from psidiff.training import Order
        >>> Order(count=4, seed=0).rows(first=4, number=4).sort().values  # the second epoch
        tensor([0, 1, 2, 3])
    """

    count: int
    seed: int

    def rows(self, first: int, number: int) -> Tensor:
        """Which rows stand at places first, first + 1, ... of that endless list."""
        parts = []
        while number > 0:
            epoch, place = divmod(first, self.count)
            part = _shuffled(self.count, self.seed, epoch)[place : place + number]
            parts.append(part)
            first, number = first + len(part), number - len(part)
        return torch.cat(parts)


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=seeded(seed, 0, epoch))

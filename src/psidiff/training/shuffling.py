"""The order of the data as a function of the seed and the step: there is nothing to save."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Generator, Tensor


def seeded(*parts: int) -> Generator:
    """A generator whose state is a function of these numbers."""
    return Generator().manual_seed(seed_of(*parts))


def seed_of(*parts: int) -> int:
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

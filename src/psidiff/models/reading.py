"""A causal transformer that remembers what it has read: keys and values of every block."""

from __future__ import annotations

import torch
from torch import Tensor


class Past:
    """Keys and values (B, heads, l, d) of the places that a block has read, in one buffer."""

    def __init__(self, room: int) -> None:
        self.room, self.seen = room, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add those of new places: all keys, all values, and which of them each new place
        sees, (l, L); None: all of them."""
        if self._keys is None or self._values is None:
            shape = (*k.shape[:2], self.room, k.shape[3])
            self._keys, self._values = k.new_empty(shape), v.new_empty(shape)
        new = k.shape[2]
        first, self.seen = self.seen, self.seen + new
        self._keys[:, :, first : self.seen] = k
        self._values[:, :, first : self.seen] = v
        mask = None
        if new > 1:
            mask = torch.ones(new, self.seen, dtype=torch.bool, device=k.device).tril(first)
        return self._keys[:, :, : self.seen], self._values[:, :, : self.seen], mask

"""The denoiser on the rows that need it: whole sequences by micro-batch, the head by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..process.prior import Prior
from ..types import Levels, Tokens, at_least_float32, check_answer
from .filters import RowFilter, find_cache, head_of, hidden_of
from .guidance import Guidance, Guided

LEAST_LEVEL = 1e-9  # denoisers take -log alpha; a plan may start at alpha = 0 all the same
_CHUNK = {"cpu": 2**20, "cuda": 2**24}
"""Logits in memory at a time, by device, beyond what the denoiser itself returns."""
_FIXED_ROWS = 32  # of the head at a time, with a micro-batch

Where = tuple[Tensor, Tensor]  # indices into (B, L)


@dataclass
class Network:
    """Forward passes and head rows, and how many of each there were."""

    denoiser: Any
    prior: Prior
    labels: Tensor | None
    given: Tensor | None  # (B, L), True where the token is known
    guidance: Guidance | None
    row_filter: RowFilter
    micro_batch: int | None
    passes: int = 0
    head_rows: int = 0

    def rows(
        self,
        z: Tokens,
        t: float,
        alpha: float,
        needed: Tensor,
        pair: bool = False,
        known: Tensor | None = None,
    ) -> Iterator[tuple[Where, tuple[Tensor, ...]]]:
        """Filtered logits of the needed positions, chunk by chunk, and where they belong.

        One tensor (N, K), guided on x if at all; with `pair` the conditional and the
        unconditional one. known: positions that count as given in this pass.
        """
        given = self.given if known is None else known
        denoiser, passes = self.denoiser, 1
        if self.guidance is not None:
            weight = self.guidance.at(t)
            denoiser, passes = Guided(self.denoiser, weight), 1 if weight in (0, 1) else 2
        for sequences in self._batches(needed.any(1).nonzero()[:, 0]):
            cache = find_cache(self.denoiser)
            before = cache.passes if cache else 0
            hidden = self._forward(denoiser, z, alpha, sequences, given)
            self.passes += cache.passes - before if cache else len(sequences) * passes
            which, position = needed[sequences].nonzero(as_tuple=True)
            most = _CHUNK.get(z.device.type, _CHUNK["cpu"])
            size = max(most // self.prior.vocab_size, 1)
            if self.micro_batch is not None:
                size = min(size, _FIXED_ROWS)
            for i in range(0, len(which), size):
                chunk = which[i : i + size], position[i : i + size]
                count, states = len(chunk[0]), self._filled(hidden[chunk], size)
                logits = denoiser.heads(states) if pair else (head_of(denoiser, states),)
                self.head_rows += count * passes
                where = sequences[chunk[0]], chunk[1]
                yield (
                    where,
                    tuple(self.row_filter(self.checked(each[:count])) for each in logits),
                )

    def _filled(self, states: Tensor, size: int) -> Tensor:
        """With a micro-batch the head, too, always sees one shape."""
        if self.micro_batch is None or len(states) == size:
            return states
        return torch.cat((states, states[-1:].expand(size - len(states), -1)))

    def _batches(self, sequences: Tensor) -> list[Tensor]:
        if not len(sequences):
            return []
        return list(sequences.split(self.micro_batch or len(sequences)))

    def _forward(
        self, denoiser: Any, z: Tokens, alpha: float, sequences: Tensor, given: Tensor | None
    ) -> Tensor:
        """Hidden states of some sequences; a short micro-batch is filled up, then cut."""
        count = len(sequences)
        if self.micro_batch is not None and count < self.micro_batch:
            fill = sequences[-1:].expand(self.micro_batch - count)
            sequences = torch.cat((sequences, fill))
        level: Any = max(alpha, LEAST_LEVEL)
        if given is not None:
            one = torch.full((1, 1, 1), level, device=z.device)
            level = self.level(one, given[sequences])
        labels = None if self.labels is None else self.labels[sequences]
        hidden = hidden_of(denoiser, z[sequences], level, labels)
        if not isinstance(hidden, Tensor) or hidden.shape[:-1] != z[sequences].shape:
            kind = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise ValueError(
                f"the denoiser got tokens of shape {tuple(z[sequences].shape)} and answered "
                f"with {kind}; it should give (B, L, K)"
            )
        return hidden[:count]

    def level(self, alpha: Tensor, given: Tensor) -> Tensor | Levels:
        """alpha (1, 1, 1), and 1 where tokens are given."""
        levels = Levels(alpha.expand(len(given), 1, 1), given)
        knows = getattr(self.denoiser, "knows_levels", False) and self.guidance is None
        return levels if knows else levels.of_each()

    def checked(self, logits: Tensor) -> Tensor:
        """K wide, at least float32, and without the mask."""
        check_answer(logits, self.prior.vocab_size)
        return self.prior.without_mask(at_least_float32(logits))


def weights_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """exp(l - max) (N, K), and its sum (N, 1): x_theta without dividing."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True)
    if not bool(total.isfinite().all()):
        raise ValueError("the denoiser returned NaN, or a row in which no token is possible")
    return weights, total

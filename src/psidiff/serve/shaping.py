"""What a request does to rows of logits before tokens are drawn from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..sampling.filters import RowFilter, chain

Bias = tuple[tuple[int, float], ...]  # token ids, and what is added to their logits


@dataclass(frozen=True)
class Shaping:
    """Bias, then as in `chain`. Equal ones shape rows together."""

    bias: Bias = ()
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    nucleus: str = "keep"
    processor: RowFilter | None = None

    @classmethod
    def of(cls, bias: Bias, options: Mapping[str, Any]) -> Shaping:
        """From the options of a request; what the filters refuse is said at once."""
        names = ("temperature", "top_k", "top_p", "min_p", "nucleus", "processor")
        shaping = cls(bias, **{name: options[name] for name in names if name in options})
        assert shaping._chain is not None
        return shaping

    def __call__(self, logits: Tensor) -> Tensor:
        return self._chain(biased(logits, self.bias))

    @cached_property
    def _chain(self) -> RowFilter:
        return chain(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.nucleus,
            self.processor,
        )


def biased(logits: Tensor, bias: Bias) -> Tensor:
    """l_j + b_j"""
    if not bias:
        return logits
    ids, values = zip(*bias, strict=True)
    added = torch.tensor(values, dtype=logits.dtype, device=logits.device)
    at = torch.tensor(ids, device=logits.device)
    return logits.index_add(-1, at, added.expand(*logits.shape[:-1], -1))

"""What a request does to rows of logits before tokens are drawn from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..sampling.filters import RowFilter, chain, head_of, hidden_of
from ..types import at_least_float32, has_head

Bias = tuple[tuple[int, float], ...]  # token ids, and what is added to their logits


@dataclass(frozen=True)
class Shaping:
    """Bias, then temperature, top-k, top-p and min-p. Equal ones shape rows together."""

    bias: Bias = ()
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    nucleus: str = "keep"

    @classmethod
    def of(cls, bias: Bias, options: Mapping[str, Any]) -> Shaping:
        """From the options of a request; what the filters refuse is said at once."""
        names = ("temperature", "top_k", "top_p", "min_p", "nucleus")
        shaping = cls(bias, **{name: options[name] for name in names if name in options})
        assert shaping._chain is not None
        return shaping

    def rows(self, logits: Tensor) -> Tensor:
        return self._chain(biased(logits, self.bias))

    @cached_property
    def _chain(self) -> RowFilter:
        return chain(self.temperature, self.top_k, self.top_p, self.min_p, self.nucleus)


def biased(logits: Tensor, bias: Bias) -> Tensor:
    """l_j + b_j"""
    if not bias:
        return logits
    ids, values = zip(*bias, strict=True)
    added = torch.tensor(values, dtype=logits.dtype, device=logits.device)
    at = torch.tensor(ids, device=logits.device)
    return logits.index_add(-1, at, added.expand(*logits.shape[:-1], -1))


class Biased(nn.Module):
    """A denoiser, or an autoregressive network, with a bias on its logits."""

    def __init__(self, denoiser: Any, bias: Bias) -> None:
        super().__init__()
        self.denoiser, self.bias = denoiser, bias
        if has_head(denoiser):
            self.hidden, self.head = self._hidden, self._head

    def forward(self, *arguments: Any) -> Tensor:
        return biased(at_least_float32(self.denoiser(*arguments)), self.bias)

    def _hidden(self, z: Any, alpha: Any, labels: Any = None) -> Tensor:
        return hidden_of(self.denoiser, z, alpha, labels)

    def _head(self, rows: Tensor) -> Tensor:
        return biased(at_least_float32(head_of(self.denoiser, rows)), self.bias)

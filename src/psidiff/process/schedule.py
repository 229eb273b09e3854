"""Noise schedules: alpha_t, how much of the clean token is left at time t."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

Number = TypeVar("Number", float, Tensor)


@runtime_checkable
class NoiseSchedule(Protocol):
    """alpha falls from 1 at t = 0 (clean) to about 0 at t = 1 (noise). Floats or tensors."""

    def alpha(self, t: Number) -> Number: ...

    def dalpha(self, t: Number) -> Number:
        """d alpha / dt, negative."""
        ...

    def time(self, alpha: Number) -> Number:
        """The t at which alpha is reached."""
        ...


@dataclass(frozen=True)
class LogLinear:
    """alpha = 1 - (1 - eps) t"""

    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def alpha(self, t: Number) -> Number:
        return 1 - (1 - self.eps) * t

    def dalpha(self, t: Number) -> Number:
        return 0 * t - (1 - self.eps)

    def time(self, alpha: Number) -> Number:
        return (1 - alpha) / (1 - self.eps)


@dataclass(frozen=True)
class Cosine:
    """alpha = 1 - cos(pi/2 (1 - (1 - eps) t)), with its true derivative"""

    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def alpha(self, t: Number) -> Number:
        half = math.pi / 4 * (1 - (1 - self.eps) * t)
        return 2 * _apply(math.sin, torch.sin, half) ** 2  # 1 - cos without the cancellation

    def dalpha(self, t: Number) -> Number:
        angle = math.pi / 2 * (1 - (1 - self.eps) * t)
        return -(1 - self.eps) * math.pi / 2 * _apply(math.sin, torch.sin, angle)

    def time(self, alpha: Number) -> Number:
        angle = 2 * _apply(math.asin, torch.asin, (alpha / 2) ** 0.5)
        return (1 - 2 / math.pi * angle) / (1 - self.eps)


def _apply(
    on_float: Callable[[float], float], on_tensor: Callable[[Tensor], Tensor], value: Number
) -> Number:
    return on_tensor(value) if isinstance(value, Tensor) else on_float(value)


def _check_eps(eps: float) -> None:
    if not 0 <= eps < 1:
        raise ValueError(f"eps must be in [0, 1), got {eps:g}")

"""Noise schedules: alpha_t, how much of the clean token is left at time t."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ..registry import Registry

Number = TypeVar("Number", float, Tensor)


@runtime_checkable
class NoiseSchedule(Protocol):
    """Protocol of noise schedules: alpha_t, how much of the clean token is left at time t.

    alpha falls from 1 at t = 0 (clean) to about 0 at t = 1 (noise). Every method takes a float
    or a tensor and returns the same kind.

    Example:
        >>> from psidiff.process import LogLinear, NoiseSchedule
        >>> isinstance(LogLinear(), NoiseSchedule)
        True
    """

    def alpha(self, t: Number) -> Number: ...

    def dalpha(self, t: Number) -> Number:
        """d alpha / dt, negative."""
        ...

    def time(self, alpha: Number) -> Number:
        """The t at which alpha is reached."""
        ...


@dataclass(frozen=True)
class _Shortened:
    """A schedule that stops short of alpha = 0, by `eps`."""

    eps: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 <= self.eps < 1:
            raise ValueError(f"eps must be in [0, 1), got {self.eps:g}")


@dataclass(frozen=True)
class LogLinear(_Shortened):
    """alpha = 1 - (1 - eps) t

    Args:
        eps: alpha at t = 1.

    Example:
        >>> from psidiff.process import LogLinear
        >>> LogLinear(eps=0.0).alpha(0.25)
        0.75
    """

    def alpha(self, t: Number) -> Number:
        """Compute alpha_t = 1 - (1 - eps) t.

        Args:
            t: time in [0, 1], a float or a tensor.

        Returns:
            The share of clean tokens left at t.

        Example:
            >>> LogLinear().alpha(1.0)
            0.001...
        """
        return 1 - (1 - self.eps) * t

    def dalpha(self, t: Number) -> Number:
        """Compute d alpha / dt = -(1 - eps).

        Args:
            t: time in [0, 1], a float or a tensor.

        Returns:
            The derivative, negative, of the kind and shape of t.

        Example:
            >>> LogLinear().dalpha(0.5)
            -0.999
        """
        return 0 * t - (1 - self.eps)

    def time(self, alpha: Number) -> Number:
        """Compute the time at which alpha is reached: the inverse of `alpha`.

        Args:
            alpha: level in (0, 1], a float or a tensor.

        Returns:
            t = (1 - alpha) / (1 - eps)

        Example:
            >>> LogLinear(eps=0.0).time(0.75)
            0.25
        """
        return (1 - alpha) / (1 - self.eps)


@dataclass(frozen=True)
class Cosine(_Shortened):
    """alpha = 1 - cos(pi/2 (1 - (1 - eps) t)), with its true derivative

    Args:
        eps: how far the schedule stops short of alpha = 0: t is scaled by 1 - eps.

    Example:
        >>> from psidiff.process import Cosine
        >>> round(Cosine().alpha(0.5), 4)
        0.2934
    """

    def alpha(self, t: Number) -> Number:
        """Compute alpha_t = 1 - cos(pi/2 (1 - (1 - eps) t)).

        Args:
            t: time in [0, 1], a float or a tensor.

        Returns:
            The share of clean tokens left at t.

        Example:
            >>> Cosine().alpha(torch.tensor([0.0, 0.5])).round(decimals=4)
            tensor([1.0000, 0.2934])
        """
        half = math.pi / 4 * (1 - (1 - self.eps) * t)
        return 2 * _apply(math.sin, torch.sin, half) ** 2  # 1 - cos without the cancellation

    def dalpha(self, t: Number) -> Number:
        """Compute d alpha / dt.

        Args:
            t: time in [0, 1], a float or a tensor.

        Returns:
            The derivative, negative, of the kind and shape of t.

        Example:
            >>> round(Cosine().dalpha(0.5), 4)
            -1.1105
        """
        angle = math.pi / 2 * (1 - (1 - self.eps) * t)
        return -(1 - self.eps) * math.pi / 2 * _apply(math.sin, torch.sin, angle)

    def time(self, alpha: Number) -> Number:
        """Compute the time at which alpha is reached: the inverse of `alpha`.

        Args:
            alpha: level in (0, 1], a float or a tensor.

        Returns:
            The t with alpha(t) = alpha.

        Example:
            >>> round(Cosine().time(Cosine().alpha(0.3)), 6)
            0.3
        """
        angle = 2 * _apply(math.asin, torch.asin, (alpha / 2) ** 0.5)
        return (1 - 2 / math.pi * angle) / (1 - self.eps)


def _apply(
    on_float: Callable[[float], float], on_tensor: Callable[[Tensor], Tensor], value: Number
) -> Number:
    return on_tensor(value) if isinstance(value, Tensor) else on_float(value)


SCHEDULES = Registry("schedule", NoiseSchedule)
SCHEDULES.register("loglinear", "loglinear", "loglinear:1e-5")(LogLinear)
SCHEDULES.register("cosine", "cosine", "cosine:1e-5")(Cosine)

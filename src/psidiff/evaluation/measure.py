"""A number that says how it was made and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measure:
    """`value` with its standard error (None: exact), and the protocol that made it.

    The protocol is plain data: what was averaged over, which judge, how many draws, which seed.
    Two measures with unequal protocols are not comparable.
    """

    name: str
    value: float
    error: float | None = None
    unit: str = ""
    protocol: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sure = "" if self.error is None else f" ± {_short(self.error)}"
        return f"{self.name} {_short(self.value)}{sure}{' ' * bool(self.unit)}{self.unit}"

    @property
    def interval(self) -> tuple[float, float]:
        """95%, by the normal distribution."""
        half = 1.96 * (self.error or 0.0)
        return self.value - half, self.value + half


def mean_of(
    name: str, values: Sequence[float], unit: str = "", protocol: dict[str, Any] | None = None
) -> Measure:
    """The mean of independent values, and its standard error."""
    count = len(values)
    if not count:
        raise ValueError(f"there is nothing to take the mean of: {name} needs samples")
    mean = math.fsum(values) / count
    spread = math.fsum((v - mean) ** 2 for v in values)
    error = math.sqrt(spread / (count * (count - 1))) if count > 1 else None
    return Measure(name, mean, error, unit, protocol or {})


def ratio_of(
    name: str,
    tops: Sequence[float | int],
    bottoms: Sequence[float | int],
    unit: str = "",
    protocol: dict[str, Any] | None = None,
) -> Measure:
    """r = sum_i a_i / sum_i b_i, and sqrt(n / (n - 1) sum_i (a_i - r b_i)^2) / sum_i b_i."""
    total, n = math.fsum(bottoms), len(bottoms)
    if not total:
        raise ValueError(f"there is nothing to measure: {name} needs samples that hold some")
    ratio = math.fsum(tops) / total
    spread = math.fsum((a - ratio * b) ** 2 for a, b in zip(tops, bottoms, strict=True))
    error = math.sqrt(spread * n / (n - 1)) / total if n > 1 else None
    return Measure(name, ratio, error, unit, protocol or {})


def check_some(samples: Any, name: str) -> None:
    if not len(samples):
        raise ValueError(f"there are no samples to measure: {name} needs at least one")


def _short(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"

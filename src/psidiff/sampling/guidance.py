"""Classifier-free guidance: towards what a label says, away from what all say.

On x (the default) the logits are combined and the three-way mixture is unchanged; on
posteriors the two distributions over z_s are multiplied, as in the paper (Eq. 10).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..process.posterior import Mixture
from ..registry import NUMBER, format_number
from ..types import as_number, check_choice
from .kappa import check_window

WeightRule = Callable[[float], float]
_SIGNED = rf"-?{NUMBER}"
_WORDS = re.compile(
    rf"(?:ramp:({_SIGNED})(?:\^({NUMBER}))?|({_SIGNED})(?:@({NUMBER})-({NUMBER}))?)(?:,(.*))?"
)
_LARGEST = 1e6  # of a weight: far larger ones leave no number of the logits


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: p_cond^weight p_uncond^(1 - weight).

    Args:
        weight: a number, or a function of the time t; 1 is the conditional model alone.
        on: "x", the denoiser's distribution, or "posterior", that of z_s.

    Example:
        >>> from psidiff.sampling import Guidance
        >>> Guidance(2.0).at(0.5)
        2.0
    """

    weight: float | WeightRule
    on: str = "x"

    def __post_init__(self) -> None:
        check_choice("what guidance acts on", self.on, ("x", "posterior"))
        if not callable(self.weight):
            as_number("the weight of guidance", self.weight)

    def at(self, t: float) -> float:
        weight = float(self.weight(t) if callable(self.weight) else self.weight)
        if not abs(weight) <= _LARGEST:
            raise ValueError(f"guidance has the weight {weight:g}, beyond {_LARGEST:g}")
        return weight


@dataclass(frozen=True)
class Ramp:
    """A weight of guidance: 1 + (largest - 1)(1 - t)^power, weak in noise and strong at the
    end.

    Args:
        largest: the weight at t = 0.
        power: how late it rises.

    Example:
        >>> from psidiff.sampling import Ramp
        >>> Ramp(3.0)(0.5)
        2.0
    """

    largest: float
    power: float = 1.0

    def __call__(self, t: float) -> float:
        return 1 + (self.largest - 1) * (1 - t) ** self.power


@dataclass(frozen=True)
class Interval:
    """A weight of guidance: `weight` while t_off <= t <= t_on, and 1 (conditional only)
    outside.

    Args:
        weight: inside.
        t_on: the largest time inside.
        t_off: the smallest.

    Example:
        >>> from psidiff.sampling import Interval
        >>> Interval(2.0, t_on=0.6, t_off=0.1)(0.9)
        1.0
    """

    weight: float
    t_on: float = 1.0
    t_off: float = 0.0

    def __post_init__(self) -> None:
        check_window(self.t_on, self.t_off)

    def __call__(self, t: float) -> float:
        return self.weight if self.t_off <= t <= self.t_on else 1.0


def parse_guidance(text: str, on: str = "x") -> Guidance:
    """Classifier-free guidance from words.

    Args:
        text: 2 (the weight), ramp:3, ramp:3^2 (its power), or 2@.1-.6 (t from .1 to .6); with
            ",posterior" at the end it acts on posteriors.
        on: "x" or "posterior", where the text does not say.

    Returns:
        The `Guidance`.

    Raises:
        ValueError: the words are no guidance.

    Example:
        >>> from psidiff.sampling import parse_guidance
        >>> parse_guidance("ramp:3").at(0.5)
        2.0
    """
    text = str(text).strip()
    match = _WORDS.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no guidance; these are: 2, 2@.1-.6, ramp:3, ramp:3^2")
    largest, power, weight, t_off, t_on, acts_on = match.groups()
    rule: float | WeightRule
    if largest:
        rule = Ramp(float(largest), float(power or 1))
    elif t_off:
        rule = Interval(float(weight), float(t_on), float(t_off))
    else:
        rule = float(weight)
    return Guidance(rule, on if acts_on is None else acts_on)


def format_guidance(guidance: Guidance) -> str:
    """The words that `parse_guidance` reads; a rule of one's own by its repr."""
    weight: Any = guidance.weight
    if isinstance(weight, Interval):
        window = f"{format_number(weight.t_off)}-{format_number(weight.t_on)}"
        words = f"{format_number(weight.weight)}@{window}"
    elif isinstance(weight, Ramp):
        words = f"ramp:{format_number(weight.largest)}^{format_number(weight.power)}"
    else:
        words = repr(weight) if callable(weight) else format_number(weight)
    return words if guidance.on == "x" else f"{words},{guidance.on}"


def combine(conditional: Tensor, unconditional: Tensor, weight: float) -> Tensor:
    """weight l_c + (1 - weight) l_u; impossible where either is.

    A row that nothing survives in falls back to the conditional one.
    """
    ruled_out = conditional.isneginf() | unconditional.isneginf()
    mixed = weight * conditional + (1 - weight) * unconditional
    mixed = mixed.masked_fill(ruled_out, -torch.inf)
    return torch.where(ruled_out.all(-1, keepdim=True), conditional, mixed)


def guided_posterior(
    mixtures: Sequence[Mixture], xs: Sequence[Tensor], pi: Tensor, z: Tensor, weight: float
) -> Tensor:
    """The normalised product of the two posteriors (Eq. 10), rows (N, K)."""
    log_p = []
    for mixture, x in zip(mixtures, xs, strict=True):
        drawn = mixture.predict[:, None] * x + mixture.renoise[:, None] * pi
        log_p.append(drawn.scatter_add(-1, z[:, None], mixture.keep[:, None].to(x)).log())
    return combine(log_p[0], log_p[1], weight).softmax(-1)

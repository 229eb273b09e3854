"""kappa_t: how much of a step predicts (1), and how much re-noises what it predicted (0).

A rule is a callable (t, alpha_s, alpha_t) -> kappa. It may return a function of the loop's
memory instead of a number (Confidence), may replace the levels of the plan (Loop), or all of
it (LoopReleased).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from ..process.schedule import NoiseSchedule
from ..registry import NUMBER, Registry, format_number
from ..types import check_choice, check_unit


@dataclass(frozen=True)
class Memory:
    """What the loop remembers of each token, for rules that look at it.

    Args:
        confidence: x_theta's probability of the token when it was predicted, (B, L); +inf where
            nothing was predicted yet or the token is masked again.

    Example:
        >>> from psidiff.sampling import Confidence, Memory
        >>> rule = Confidence(0.5)(0.5, 0.6, 0.5)
        >>> rule(Memory(torch.tensor([[0.9, 0.1, torch.inf]]))).argmin()  # the least sure
        tensor(1)
    """

    confidence: Tensor


KappaValue = float | Callable[[Memory], Tensor]
Point = tuple[float, float, float]  # t, alpha, kappa


@runtime_checkable
class Kappa(Protocol):
    """Protocol of kappa rules: rule(t, alpha_s, alpha_t) -> kappa, or a function of a `Memory`.

    Optional: `levels(num_steps, schedule)`, the N + 1 levels alpha to walk, or
    `points(num_steps, schedule)`, N + 1 times (t, alpha, kappa), the last kappa without use.

    Example:
        >>> from psidiff.process import LogLinear
        >>> from psidiff.sampling import Kappa, plan
        >>> def late(t, alpha_s, alpha_t):
        ...     return 0.5 if t < 0.4 else 1.0
        >>> isinstance(late, Kappa), [step.kappa for step in plan(3, LogLinear(), late)]
        (True, [1.0, 1.0, 0.5, 1.0])
    """

    def __call__(self, t: float, alpha_s: float, alpha_t: float) -> KappaValue: ...


@dataclass(frozen=True)
class Constant:
    """`kappa` while t_off <= t <= t_on, and 1 (ancestral) outside.

    Args:
        kappa: in [0, 1].
        t_on: the largest time at which it holds.
        t_off: the smallest.

    Example:
        >>> from psidiff.sampling import Constant
        >>> Constant(0.95, t_on=0.5, t_off=0.1)(0.3, 0.8, 0.7)
        0.95
    """

    kappa: float
    t_on: float = 1.0
    t_off: float = 0.0

    def __post_init__(self) -> None:
        check_unit("kappa", self.kappa)
        check_window(self.t_on, self.t_off)

    def __call__(self, t: float, alpha_s: float, alpha_t: float) -> float:
        return self.kappa if self.t_off <= t <= self.t_on else 1.0


@dataclass(frozen=True)
class _Remasking:
    """A rule that remasks at a rate sigma_t, with a strength eta in [0, 1]."""

    eta: float

    def __post_init__(self) -> None:
        check_unit("eta", self.eta)


@dataclass(frozen=True)
class Cap(_Remasking):
    """sigma_t = min(eta, sigma_max)  (Eq. "cap")

    Args:
        eta: largest remasking rate, in [0, 1].
        clipped: False allows what ReMDM does and Psi does not: sigma above 1 - alpha_s, that is
            kappa < 0. Only the masked prior can follow it.

    Example:
        >>> from psidiff.sampling import Cap
        >>> round(Cap(0.1)(0.5, 0.6, 0.5), 6)  # 1 - .1/(1 - .6)
        0.75
    """

    clipped: bool = True

    def __call__(self, t: float, alpha_s: float, alpha_t: float) -> float:
        sigma = min(self.eta, max_remasking(alpha_s, alpha_t))
        return from_remasking(sigma, alpha_s, self.clipped)


@dataclass(frozen=True)
class Rescale(_Remasking):
    """sigma_t = eta sigma_max, the paper's equation.

    Args:
        eta: share of the largest remasking rate, in [0, 1].
        clipped: as for `Cap`.

    Example:
        >>> from psidiff.sampling import Rescale
        >>> round(Rescale(0.1)(0.5, 0.6, 0.5), 6)  # sigma_max = .4/.5
        0.8
    """

    clipped: bool = True

    def __call__(self, t: float, alpha_s: float, alpha_t: float) -> float:
        sigma = self.eta * max_remasking(alpha_s, alpha_t)
        return from_remasking(sigma, alpha_s, self.clipped)


@dataclass(frozen=True)
class RescaleReleased(_Remasking):
    """sigma_t = eta min(eta, (1 - alpha_s)/alpha_t): as released, and as published.

    Args:
        eta: in [0, 1].

    Example:
        >>> from psidiff.sampling import RescaleReleased
        >>> round(RescaleReleased(0.1)(0.5, 0.6, 0.5), 6)
        0.975
    """

    def __call__(self, t: float, alpha_s: float, alpha_t: float) -> float:
        sigma = self.eta * min(self.eta, max_remasking(alpha_s, alpha_t))
        return from_remasking(sigma, alpha_s)


@dataclass(frozen=True)
class Loop(_Remasking):
    """Rise to alpha_on, stay there from t_on to t_off with sigma = eta, then rise to 1.

    alpha is piecewise linear in t from the schedule's alpha(1); kappa = 1 off the plateau.

    Args:
        eta: remasking rate on the plateau, in [0, 1].
        t_on: where the plateau begins.
        t_off: where it ends, below t_on.
        alpha_on: its level, in (0, 1).
        linear: what is piecewise linear, "alpha", or "t", the schedule's own time.

    Example:
        >>> from psidiff.process import LogLinear
        >>> from psidiff.sampling import Loop
        >>> [round(alpha, 3) for alpha in Loop(0.02).levels(4, LogLinear())]
        [0.001, 0.5, 0.9, 0.9, 1.0]
    """

    t_on: float = 0.55
    t_off: float = 0.05
    alpha_on: float = 0.9
    linear: str = "alpha"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("linear", self.linear, ("alpha", "t"))
        if not (0 < self.t_off < self.t_on < 1 and 0 < self.alpha_on < 1):
            raise ValueError(
                "Loop needs 0 < t_off < t_on < 1 and alpha_on in (0, 1), got "
                f"t_off={self.t_off:g}, t_on={self.t_on:g}, alpha_on={self.alpha_on:g}"
            )

    def __call__(self, t: float, alpha_s: float, alpha_t: float) -> float:
        on_plateau = self.t_off < t <= self.t_on
        return from_remasking(self.eta, self.alpha_on) if on_plateau else 1.0

    def levels(self, num_steps: int, schedule: NoiseSchedule) -> tuple[float, ...]:
        start = float(schedule.alpha(1.0))
        if start >= self.alpha_on:
            raise ValueError(
                f"Loop's alpha_on must be above the schedule's alpha(1) = {start:g}, "
                f"got {self.alpha_on:g}"
            )

        def walk(t: float, start: float, on: float, end: float) -> float:
            if t > self.t_on:
                return _clamped(start + (on - start) * (1 - t) / (1 - self.t_on), start, on)
            return (
                on if t > self.t_off else _clamped(end - t * (end - on) / self.t_off, on, end)
            )

        times = linear_times(num_steps)
        if self.linear == "alpha":
            return tuple(walk(t, start, self.alpha_on, 1.0) for t in times)
        on = float(schedule.time(self.alpha_on))
        return tuple(float(schedule.alpha(walk(t, 1.0, on, 0.0))) for t in times)


@dataclass(frozen=True)
class ConstantReleased:
    """`kappa` from t_on to t_off and 1 outside, t counted in points of the grid: as released.

    Of the N + 1 points, the first 1 - t_on have kappa = 1, and the next t_on - t_off, each
    rounded, half to even, have `kappa`. It differs from `Constant` by a step at each end.

    Args:
        kappa: in [0, 1].
        t_on: the share of the points from which on it holds, counted from the data.
        t_off: the share at which it ends.

    Example:
        >>> from psidiff.process import LogLinear
        >>> from psidiff.sampling import ConstantReleased, plan
        >>> steps = plan(8, LogLinear(), ConstantReleased(0.95, t_on=0.5, t_off=0.1))
        >>> [step.kappa for step in steps]
        [1.0, 1.0, 1.0, 1.0, 0.95, 0.95, 0.95, 0.95, 1.0]
    """

    kappa: float
    t_on: float = 1.0
    t_off: float = 0.0

    def __post_init__(self) -> None:
        Constant(self.kappa, self.t_on, self.t_off)

    def __call__(self, t: float, alpha_s: float, alpha_t: float) -> float:
        return Constant(self.kappa, self.t_on, self.t_off)(t, alpha_s, alpha_t)

    def points(self, num_steps: int, schedule: NoiseSchedule) -> tuple[Point, ...]:
        high, middle = _window(num_steps, self.t_on, self.t_off)
        return tuple(
            (t, float(schedule.alpha(t)), self.kappa if high <= i < high + middle else 1.0)
            for i, t in enumerate(linear_times(num_steps))
        )


@dataclass(frozen=True)
class LoopReleased(_Remasking):
    """`Loop` as released and as published: t is piecewise linear, and both joints come twice.

    The plateau is at the schedule's time of alpha_on were its eps 0. The parts are shares of
    the N + 1 points, rounded; the last point of the plateau has kappa = 1.

    Args:
        eta: remasking rate on the plateau, in [0, 1].
        t_on: where the plateau begins.
        t_off: where it ends, below t_on.
        alpha_on: its level, in (0, 1).

    Example:
        >>> from psidiff.process import LogLinear
        >>> from psidiff.sampling import LoopReleased, plan
        >>> [round(step.t, 3) for step in plan(8, LogLinear(), LoopReleased(0.02))]
        [1.0, 0.7, 0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    """

    t_on: float = 0.55
    t_off: float = 0.05
    alpha_on: float = 0.9

    def __post_init__(self) -> None:
        Loop(self.eta, self.t_on, self.t_off, self.alpha_on)

    def __call__(self, t: float, alpha_s: float, alpha_t: float) -> float:
        return Loop(self.eta, self.t_on, self.t_off, self.alpha_on)(t, alpha_s, alpha_t)

    def points(self, num_steps: int, schedule: NoiseSchedule) -> tuple[Point, ...]:
        high, middle = _window(num_steps, self.t_on, self.t_off)
        high = max(high, 1)  # the first point is all noise
        middle = min(middle, num_steps + 1 - high)
        whole = replace(cast(Any, schedule), eps=0.0) if hasattr(schedule, "eps") else schedule
        on = float(whole.time(self.alpha_on))
        rest = num_steps + 1 - high - middle
        times = (*_between(1.0, on, high), *[on] * middle, *_between(on, 1e-5, rest))
        alphas = [float(schedule.alpha(t)) for t in times]
        inside = range(high, high + middle - 1)
        return tuple(
            (t, alpha, from_remasking(self.eta, alphas[i + 1]) if i in inside else 1.0)
            for i, (t, alpha) in enumerate(zip(times, alphas, strict=True))
        )


@dataclass(frozen=True)
class Confidence:
    """sigma_l = eta w_l sigma_max, w = softmax over the predicted tokens of -(confidence).

    Tokens that x_theta was unsure of when it predicted them return to noise first; tokens not
    predicted yet have kappa = 1. It looks at values, so it does not keep the marginals.

    Args:
        eta: at least 0.

    Example:
        >>> from psidiff.sampling import Confidence, Memory
        >>> kappa = Confidence(0.5)(0.5, 0.6, 0.5)(Memory(torch.tensor([[0.5, torch.inf]])))
        >>> kappa
        tensor([[0., 1.]])
    """

    eta: float

    def __post_init__(self) -> None:
        if not 0 <= self.eta < math.inf:
            raise ValueError(f"eta must be >= 0 and finite, got {self.eta:g}")

    def __call__(self, t: float, alpha_s: float, alpha_t: float) -> Callable[[Memory], Tensor]:
        scale = 1 - from_remasking(max_remasking(alpha_s, alpha_t), alpha_s, clipped=False)

        def kappa(memory: Memory) -> Tensor:
            share = memory.confidence.neg().softmax(-1).nan_to_num(0.0)  # no token predicted: 0
            return (1 - self.eta * scale * share).clamp(0, 1)

        return kappa


@dataclass(frozen=True)
class ForwardBackward:
    """sigma_t = (alpha_s - alpha_t)/alpha_t (Campbell et al.); negative kappa is clipped.

    Example:
        >>> from psidiff.sampling import ForwardBackward
        >>> round(ForwardBackward()(0.5, 0.6, 0.5), 6)  # 1 - .2/.4
        0.5
    """

    def __call__(self, t: float, alpha_s: float, alpha_t: float) -> float:
        return from_remasking(_divide(alpha_s - alpha_t, alpha_t), alpha_s)


@dataclass(frozen=True)
class DFM:
    """sigma_t = b_t (alpha_s - alpha_t)/alpha_t, b_t = 10 t^(1/4) (1-t)^(1/4) (Gat et al.)

    Example:
        >>> from psidiff.sampling import DFM
        >>> DFM()(1.0, 0.1, 0.0)  # b = 0 at both ends
        1.0
    """

    def __call__(self, t: float, alpha_s: float, alpha_t: float) -> float:
        b = 10 * (t * (1 - t)) ** 0.25
        return from_remasking(b * _divide(alpha_s - alpha_t, alpha_t) if b else 0.0, alpha_s)


@dataclass(frozen=True)
class LeftToRight:
    """The rule of autoregressive models: one token after the other, without a plan.

    Args:
        t: as for every rule.
        alpha_s: as for every rule.
        alpha_t: as for every rule.

    Returns:
        Nothing: a plan that asks it is refused.

    Raises:
        ValueError: always.

    Example:
        >>> from psidiff.sampling import LEFT_TO_RIGHT, Sampler
        >>> str(Sampler(LEFT_TO_RIGHT, top_p=0.9))
        'left-to-right top_p=.9'
    """

    def __call__(self, t: float, alpha_s: float, alpha_t: float) -> float:
        raise ValueError("left-to-right is for autoregressive models, which have no plan")


LEFT_TO_RIGHT = LeftToRight()


def max_remasking(alpha_s: float, alpha_t: float) -> float:
    """sigma_max = min(1, (1 - alpha_s)/alpha_t)"""
    return min(1.0, _divide(1 - alpha_s, alpha_t))


def from_remasking(sigma: float, alpha_s: float, clipped: bool = True) -> float:
    """kappa_t = 1 - sigma_t/(1 - alpha_s) (App. "Recovering Predictor-Corrector Methods")

    Clipped to [0, 1]; 1 at alpha_s = 1, where predictor and corrector are the same.
    """
    if alpha_s >= 1 or sigma == 0:
        return 1.0
    kappa = 1 - sigma / (1 - alpha_s)
    return max(kappa, 0.0) if clipped else kappa


def linear_times(num_steps: int) -> tuple[float, ...]:
    """N + 1 times from 1 to 1e-5."""
    return tuple(1 + (1e-5 - 1) * i / num_steps for i in range(num_steps + 1))


def _between(first: float, last: float, count: int) -> list[float]:
    """`count` numbers from the first to the last; one is the first."""
    shares = [i / max(count - 1, 1) for i in range(count)]
    return [(1 - share) * first + share * last for share in shares]  # exact at both ends


def _clamped(value: float, one: float, other: float) -> float:
    """A number that rounding took beyond an end of its interval, in either order."""
    return min(max(value, min(one, other)), max(one, other))


def _window(num_steps: int, t_on: float, t_off: float) -> tuple[int, int]:
    """How many of the N + 1 points lie before t_on, and how many between t_on and t_off."""
    high, middle = (
        round(round(share * (num_steps + 1), 9)) for share in (1 - t_on, t_on - t_off)
    )
    return high, middle


def check_window(t_on: float, t_off: float) -> None:
    if not 0 <= t_off <= t_on <= 1:
        raise ValueError(f"need 0 <= t_off <= t_on <= 1, got t_off={t_off:g}, t_on={t_on:g}")


def _divide(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.inf if part > 0 else 0.0


KAPPAS = Registry("kappa rule", Callable)
KAPPAS.register("ancestral")(Constant(1.0))
KAPPAS.register("fb")(ForwardBackward())
KAPPAS.register("dfm")(DFM())
KAPPAS.register("constant", "constant:.95@.1-.5")(Constant)
KAPPAS.register("constant-released", "constant-released:.95")(ConstantReleased)
KAPPAS.register("cap", "cap:.01")(Cap)
KAPPAS.register("rescale", "rescale:.05")(Rescale)
KAPPAS.register("rescale-released", "rescale-released:.05")(RescaleReleased)
KAPPAS.register("loop", "loop:.02@.05-.55")(Loop)
KAPPAS.register("loop-released", "loop-released:.02")(LoopReleased)
KAPPAS.register("confidence", "confidence:.05")(Confidence)
KAPPAS.register("left-to-right")(LEFT_TO_RIGHT)
_INTERVAL = re.compile(rf"(.+)@({NUMBER})-({NUMBER})")


def parse_kappa(text: str, **unsaid: Any) -> Kappa:
    """A rule from words.

    Args:
        text: ancestral, fb, dfm, cap:.01, constant:.95@.1-.5 (t from .1 to .5),
            loop:.02@.05-.55, loop:.02,alpha_on=.8, or FILE.py:NAME of a file that was imported.
        unsaid: parameters for rules that have them and words that leave them out.

    Returns:
        The rule, a callable (t, alpha_s, alpha_t).

    Raises:
        ValueError: the words are no rule; the sentence lists the rules.

    Example:
        >>> from psidiff.sampling import parse_kappa
        >>> parse_kappa("constant:.95@.1-.5")
        Constant(kappa=0.95, t_on=0.5, t_off=0.1)
    """
    text = str(text).strip()
    if (match := _INTERVAL.fullmatch(text)) is None:
        return KAPPAS.parse(text, **unsaid)
    rule, t_off, t_on = match.groups()
    name = rule.partition(":")[0]
    if not {"t_on", "t_off"} <= set(KAPPAS.parameters(rule)):
        raise ValueError(f"{text!r} is no kappa rule: {name} holds at all times, without @")
    if re.search(r"\bt[_-](on|off)\s*=", rule):
        raise ValueError(f"{text!r} is no kappa rule: it says its interval twice")
    return KAPPAS.parse(rule, t_on=float(t_on), t_off=float(t_off), **unsaid)


def format_kappa(rule: Kappa) -> str:
    """The shortest words for a rule."""
    names = {Constant: "constant", ConstantReleased: "constant-released"}
    if isinstance(rule, Constant | ConstantReleased) and (rule.t_on, rule.t_off) != (1.0, 0.0):
        interval = f"{format_number(rule.t_off)}-{format_number(rule.t_on)}"
        return f"{names[type(rule)]}:{format_number(rule.kappa)}@{interval}"
    return KAPPAS.format(rule)

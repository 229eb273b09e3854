"""The plan: all that is known before the loop runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ..process.prior import Masked, Prior
from ..process.schedule import NoiseSchedule
from ..registry import nearest
from ..types import as_count, as_number, check_alpha_order, check_choice
from .kappa import Kappa, KappaValue, linear_times

GRIDS = ("linear", "alpha", "quadratic")


@dataclass(frozen=True)
class Step:
    """A step from level alpha_t up to alpha_s.

    Args:
        t: time before the step, which guidance looks at.
        alpha_t: level before the step.
        alpha_s: level after it, at least alpha_t.
        kappa: in [0, 1], or a function of a `Memory`.
        greedy: take the most probable token instead of sampling.

    Example:
        >>> from psidiff.sampling import Step
        >>> Step(t=0.5, alpha_t=0.5, alpha_s=1.0)
        Step(t=0.5, alpha_t=0.5, alpha_s=1.0, kappa=1.0, greedy=False)
    """

    t: float
    alpha_t: float
    alpha_s: float
    kappa: KappaValue = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        for name in ("t", "alpha_t", "alpha_s", "kappa"):
            value = getattr(self, name)
            if not callable(value):
                object.__setattr__(self, name, as_number(f"a step's {name}", value))
        check_alpha_order(self.alpha_s, self.alpha_t)


def plan(
    num_steps: int | None,
    schedule: NoiseSchedule,
    kappa: Kappa,
    grid: str | Sequence[float] = "linear",
    last: str = "sample",
) -> tuple[Step, ...]:
    """Compute the steps of a sampler before it runs.

    Args:
        num_steps: number of steps N; None if grid is a sequence.
        schedule: the noise schedule.
        kappa: rule (t, alpha_s, alpha_t) -> kappa; 1 is ancestral sampling.
        grid: "linear", N equal gaps from t = 1 to t = 1e-5; "alpha", gaps of equal rise in
            alpha; "quadratic", gaps equal in the root of t, which are small near the data; or
            any falling sequence of times, whose length then gives the number of steps.
        last: "sample", or "greedy" for the most probable tokens in the last step.

    Returns:
        N + 1 `Step`s, from noise to data: the last removes the noise left at the grid's end.

    Raises:
        ValueError: if the grid does not fall, or an argument is out of range.

    Example:
        >>> from psidiff.process import LogLinear
        >>> from psidiff.sampling import Cap, plan
        >>> steps = plan(128, LogLinear(), Cap(0.02))
        >>> len(steps), steps[-1].alpha_s
        (129, 1.0)
    """
    if isinstance(schedule, type) or not callable(getattr(schedule, "alpha", None)):
        raise ValueError(f"schedule must be an object such as LogLinear(), got {schedule!r}")
    if not callable(kappa) or isinstance(kappa, type):
        raise ValueError(
            f"kappa must be a rule such as Cap(0.01), got {kappa!r}; parse_kappa reads words"
        )
    check_choice("last", last, ("sample", "greedy"))
    times = _times(num_steps, grid, schedule)
    if grid != "linear" and sets_levels(kappa):
        raise ValueError(f"{type(kappa).__name__} sets its own levels and takes no other grid")
    steps_of = _cached_steps if _is_value(schedule) and _is_value(kappa) else _steps
    return steps_of(times, schedule, kappa, last == "greedy")


@lru_cache(maxsize=8)
def causal_plan(length: int) -> tuple[Step, ...]:
    """A step for each position, left to right."""
    return tuple(Step(1 - i / length, i / length, (i + 1) / length) for i in range(length))


def last_change(prior: Prior | None, steps: Sequence[Step]) -> int:
    """The step from which on a token that is no mask stays; never, but for masks."""
    if not isinstance(prior, Masked):
        return len(steps) + 1
    return max((i + 1 for i, step in enumerate(steps) if step.kappa != 1), default=0)


def sets_levels(kappa: Kappa) -> bool:
    """Whether a rule walks levels of its own, and so takes no grid of others."""
    return hasattr(kappa, "levels") or hasattr(kappa, "points")


def _is_value(each: Any) -> bool:
    """Whether equal ones do the same, so that what they gave may be kept."""
    return is_dataclass(each) and type(each).__hash__ not in (None, object.__hash__)


def _steps(
    times: tuple[float, ...], schedule: NoiseSchedule, kappa: Kappa, greedy: bool
) -> tuple[Step, ...]:
    """A step from each time to the next, and the last."""
    points = _points(times, schedule, kappa)
    steps = [
        Step(t, alpha_t, alpha_s, kappa_t)
        for (t, alpha_t, kappa_t), (_, alpha_s, _) in pairwise(points)
    ]
    t, alpha, _ = points[-1]
    return (*steps, Step(t, alpha, 1.0, 1.0, greedy=greedy))


def _points(
    times: tuple[float, ...], schedule: NoiseSchedule, kappa: Any
) -> list[tuple[float, float, KappaValue]]:
    """t, alpha and kappa at the times; a rule may set the last two, or all three."""
    if hasattr(kappa, "points"):
        return list(kappa.points(len(times) - 1, schedule))
    if hasattr(kappa, "levels"):
        alphas = tuple(kappa.levels(len(times) - 1, schedule))
    else:
        alphas = tuple(float(schedule.alpha(t)) for t in times)
    ends = pairwise(zip(times, alphas, strict=True))
    points = [(t, alpha_t, kappa(t, alpha_s, alpha_t)) for (t, alpha_t), (_, alpha_s) in ends]
    return [*points, (times[-1], alphas[-1], 1.0)]


# A server makes the same plan for many requests.
_cached_steps: Callable[..., tuple[Step, ...]] = lru_cache(maxsize=8)(_steps)


def _times(
    num_steps: int | None, grid: str | Sequence[float], schedule: NoiseSchedule
) -> tuple[float, ...]:
    if isinstance(grid, str):
        check_grid(grid)
        return _spaced(linear_times(as_count("num_steps", num_steps)), grid, schedule)
    times = tuple(float(t) for t in grid)
    falls = all(s <= t for t, s in pairwise(times))
    if not times or not falls or not 0 <= times[-1] <= times[0] <= 1:
        raise ValueError(f"grid must fall from at most 1 to at least 0, got {list(times)[:8]}")
    if num_steps not in (None, len(times) - 1, len(times)):
        raise ValueError(
            f"the grid has {len(times) - 1} gaps and a last step, but num_steps is {num_steps}"
        )
    return times


def check_grid(grid: str) -> None:
    """A grid by name."""
    if grid not in GRIDS:
        names, near = ", ".join(GRIDS), nearest(grid, GRIDS)
        raise ValueError(f"grid must be {names}, or falling times, got {grid!r}{near}")


def _spaced(times: tuple[float, ...], grid: str, schedule: NoiseSchedule) -> tuple[float, ...]:
    """As many times from the first to the last, spaced as the grid says."""
    (first, *_, last), gaps = times, len(times) - 1
    if grid == "linear":
        return times
    if grid == "quadratic":
        ends = first**0.5, last**0.5
    else:
        ends = float(schedule.alpha(first)), float(schedule.alpha(last))
    inner = [ends[0] + (ends[1] - ends[0]) * i / gaps for i in range(1, gaps)]
    inner = [u**2 if grid == "quadratic" else float(schedule.time(u)) for u in inner]
    return (first, *(min(max(t, last), first) for t in inner), last)

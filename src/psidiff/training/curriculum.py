"""The curriculum: which objective at which step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from .objective import Objective, RelaxedNelbo


@dataclass(frozen=True)
class Phase:
    """A part of a training with one objective.

    Args:
        objective: what is minimised.
        until: the step at which the phase ends; None: never.

    Example:
        >>> from psidiff.process import LogLinear, Uniform
        >>> from psidiff.training import Nelbo, Phase
        >>> Phase(Nelbo(Uniform(5), LogLinear())).until is None
        True
    """

    objective: Objective
    until: int | None = None


@dataclass(frozen=True)
class Curriculum:
    """Objectives by step: phases, one after the other.

    The paper's has soft tokens for the first half of training, then the exact loss.

    Args:
        phases: `Phase`s in order; the last, and only that, has no end.

    Example:
        >>> from psidiff.process import LogLinear, Uniform
        >>> from psidiff.training import Curriculum, Nelbo, RelaxedNelbo
        >>> exact = Nelbo(Uniform(5), LogLinear())
        >>> curriculum = Curriculum.relaxed(RelaxedNelbo(5), exact, steps=100)
        >>> curriculum.at(99) is exact, curriculum.at(100) is exact
        (False, True)
    """

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        ends = [phase.until for phase in self.phases]
        if not ends or ends[-1] is not None or None in ends[:-1]:
            raise ValueError("a curriculum's last phase, and only that, has no end")
        if any(a is not None and b is not None and a >= b for a, b in pairwise(ends)):
            raise ValueError(f"the ends of a curriculum's phases must rise, got {ends}")

    @classmethod
    def relaxed(
        cls,
        soft: RelaxedNelbo,
        exact: Objective,
        steps: int,
        final_temperature: float | None = None,
        stages: int = 100,
    ) -> Curriculum:
        """`soft` for so many steps, then `exact`.

        With a final temperature the soft one's goes there, evenly in log10, in `stages` stages.
        """
        if final_temperature is None or final_temperature == soft.temperature:
            return cls((Phase(soft, steps), Phase(exact)))
        if not final_temperature > 0:
            raise ValueError(f"final_temperature must be above 0, got {final_temperature:g}")
        ratio = final_temperature / soft.temperature
        count = min(stages, steps)
        warm = tuple(
            Phase(
                replace(soft, temperature=soft.temperature * ratio ** (i / max(count - 1, 1))),
                steps * (i + 1) // count,
            )
            for i in range(count)
        )
        return cls((*warm, Phase(exact)))

    def at(self, step: int) -> Objective:
        """The objective of a step, counted from 0."""
        return next(p.objective for p in self.phases if p.until is None or step < p.until)

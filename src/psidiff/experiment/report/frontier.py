"""Rules against ancestral sampling at equal entropy, whatever top-p or temperature gave it.

Ancestral sampling with several top-p or temperatures is a line of quality against entropy.
Another cell is compared with the point of that line at its own entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

from .formatting import counted, short, short_name, stated
from .results import Cell, finite


@dataclass(frozen=True)
class Match:
    """A cell, and what ancestral sampling between two of its settings has at its entropy.

    quality, error: of ancestral sampling there. gain, doubt: by how much the cell is better,
    and the standard error of that.
    """

    cell: Cell
    ends: tuple[Cell, Cell]
    quality: float
    error: float
    gain: float
    doubt: float

    @classmethod
    def of(cls, cell: Cell, low: Cell, high: Cell) -> Match:
        """On the line between the two; the error has those of the two and, times the slope,
        those of the entropies."""
        apart = _entropy(high) - _entropy(low)
        share = (_entropy(cell) - _entropy(low)) / apart
        slope = (high.quality.value - low.quality.value) / apart
        quality = low.quality.value + share * apart * slope
        own = ((1 - share) * (low.quality.stderr or 0.0), share * (high.quality.stderr or 0.0))
        moved = ((1 - share) * _spread(low), share * _spread(high), _spread(cell))
        error = math.hypot(*own, *(slope * each for each in moved))
        gain = quality - cell.quality.value
        gain = gain if cell.about["better"] == "low" else -gain
        doubt = math.hypot(error, cell.quality.stderr or 0.0)
        return cls(cell, (low, high), quality, error, gain, doubt)

    def settled(self, among: int) -> bool:
        """Better by more than chance gives the best of so many (Bonferroni, 95%); one sample
        alone has no error to tell."""
        alone = min(c.about["samples"] for c in (self.cell, *self.ends)) < 2
        return not alone and self.gain > NormalDist().inv_cdf(1 - 0.025 / among) * self.doubt


def matches(cells: Sequence[Cell]) -> list[Match]:
    """Of cells at one number of steps: those whose entropy ancestral sampling reaches, too."""
    known = [c for c in cells if None not in (finite(c.entropy), finite(c.quality))]
    line = sorted((c for c in known if c.ancestral), key=_entropy)
    found = []
    for cell in (c for c in known if not c.ancestral):
        for low, high in pairwise(line):
            least, most = _entropy(low), _entropy(high)
            if least < most and least <= _entropy(cell) <= most:
                found.append(Match.of(cell, low, high))
                break
    return found


def at_equal_entropy(cells: Sequence[Cell]) -> str | None:
    """The best of the cells at one number of steps, in a sentence; of those ahead, if any are.

    None where ancestral sampling has no two entropies, or nothing else was run.
    """
    line = {_entropy(c) for c in cells if c.ancestral and finite(c.entropy) is not None}
    if len(line) < 2 or all(c.ancestral for c in cells):
        return None
    place = f"{cells[0].model}, {cells[0].at}, at equal entropy: "
    found = matches(cells)
    if not found:
        ends = f"{short(min(line))} to {short(max(line))}"
        return f"{place}no rule has one that ancestral sampling reaches ({ends})"
    ahead = [match for match in found if match.settled(len(found))]
    best = max(ahead or found, key=lambda match: match.gain)
    cell = best.cell
    low, high = (end.setting for end in sorted(best.ends, key=lambda c: c.place))
    told = (
        f"{cell.name} ({short_name(cell.quality)} {stated(cell.quality)} against "
        f"{short(best.quality, best.error or None)} by ancestral between {low} and {high}; "
        f"entropy {short(_entropy(cell))}; better by {short(best.gain, best.doubt or None)}"
    )
    if ahead:
        return f"{place}{told}; {len(ahead)} of {counted(len(found), 'setting')} ahead)"
    return f"{place}no rule beats ancestral by more than the errors; first is {told})"


def _entropy(cell: Cell) -> float:
    assert cell.entropy is not None
    return cell.entropy.value


def _spread(cell: Cell) -> float:
    """The error of its entropy."""
    assert cell.entropy is not None
    return finite(cell.entropy.stderr) or 0.0

"""What the cells of a comparison say, in sentences: who is best, and whom to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

from .formatting import between, format_metric, join_words, pluralize, short, short_name
from .results import TOLERANCE, Cell, Records, ancestral_of, finite, grouped, read


def summary(cells: Sequence[Cell]) -> str:
    """What the cells of a model say."""
    quality, better = short_name(cells[0].quality), cells[0].about["better"]
    if len({c.name for c in cells}) == 1:
        values = join_words([f"{format_metric(c.quality)} at {c.at}" for c in cells])
        told = f"With {cells[0].name}, {quality} ({better} is better) is {values}."
    else:
        firsts = [_first(at) for at in grouped(cells, lambda c: c.steps).values()]
        places = grouped(firsts, lambda first: first[0])
        finds = [f"{n} at {join_words([place for _, place in at])}" for n, at in places.items()]
        told = f"By {quality} ({better} is better) the best sampler is {'; '.join(finds)}."
    sentences = [told, _moved(cells), f"Each cell: {how_made(cells)}.", _unlike(cells)]
    return " ".join(filter(None, sentences))


def _first(at: Sequence[Cell]) -> tuple[str, str]:
    """The best of the cells at a number of steps, and by how much it is."""
    best = max(at, key=lambda c: c.score)
    rest = [c for c in at if c is not best]
    found = f"{best.at} ({format_metric(best.quality)}"
    if not rest:
        return best.name, f"{found})"
    rival = ancestral_of(best, rest) or max(rest, key=lambda c: c.score)
    tie = "" if best.beats(rival) else ": within the errors"
    whose = rival.kappa if rival.setting == best.setting else rival.name
    return best.name, f"{found}, {whose} {format_metric(rival.quality)}{tie})"


def _moved(cells: Sequence[Cell]) -> str:
    """How far the entropy is from ancestral sampling's at the same steps.

    Where there is none, or where top-p or temperature vary and move it themselves: from that
    of real data, if it is known.
    """
    entropy, real = cells[0].entropy, cells[0].real(cells[0].entropy)
    known = real is not None and (cells[0].setting or not any(c.ancestral for c in cells))
    moves = []
    for cell in cells:
        usual = real if known else _usual_entropy(cell, cells)
        if usual and finite(cell.entropy) is not None and (known or not cell.ancestral):
            moves.append((finite(cell.entropy) / usual - 1, cell))
    if entropy is None or not moves:
        return ""
    than = f"real data's {short(real)}" if known else "ancestral sampling's"
    if real is not None and not known:
        than += f" (real data: {short(real)})"
    most, where = max(moves, key=lambda move: abs(move[0]))
    if abs(most) <= TOLERANCE:
        return f"The {short_name(entropy)} stays within {abs(most):.1%} of {than}."
    side = "below" if most < 0 else "above"
    furthest = f"{where.name} at {where.at} is the furthest, {abs(most):.1%} {side}"
    return f"The {short_name(entropy)} moves: {furthest} {than}."


def how_made(cells: Sequence[Cell]) -> str:
    """What a cell is: samples, seed and judge."""
    about = [c.about for c in cells]
    samples, length, seed = (between([a[k] for a in about]) for k in _MADE)
    fixed = "" if cells[0].setting else cells[0].settings
    protocol = cells[0].quality.protocol
    judge = [f"{w} {protocol[w]}" for w in ("judge", "features") if protocol.get(w)]
    made = f"{pluralize(samples, 'sample')} of {pluralize(length, 'token')}"
    return ", ".join(filter(None, [made, fixed, f"seed {seed}", *judge]))


_MADE = ("samples", "length", "seed")


def _unlike(cells: Sequence[Cell]) -> str:
    """A warning where the cells do not compare: in a protocol, words say how, numbers what."""
    hows = [
        {k: v for k, v in c.quality.protocol.items() if isinstance(v, str)}
        | {k: c.about[k] for k in _MADE}
        for c in cells
    ]
    keys = dict.fromkeys(key for how in hows for key in how)
    unlike = [key for key in keys if len({str(how.get(key)) for how in hows}) > 1]
    if not unlike:
        return ""
    return f"Beware: the cells were not measured alike; they differ in {join_words(unlike)}."


def recommend(records: Records, tolerance: float = TOLERANCE) -> list[str]:
    """For each number of steps the best kappa rule of those that keep the entropy.

    The entropy must be within `tolerance`, relative, of ancestral sampling's at the same steps,
    top-p and temperature: a better judgement bought with less variety is none. Where these two
    vary, each setting has its own sentence, for the same reason; and the rules are compared
    with ancestral sampling of any setting that has their entropy (`matches`).
    """
    if tolerance < 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    cells = read(records)
    groups = grouped(cells, lambda cell: (cell.model, cell.steps, cell.setting))
    wider = grouped(cells, lambda cell: (cell.model, cell.steps))
    across = [_at_equal_entropy(group) for group in wider.values()]
    return [*(_advice(group, tolerance) for group in groups.values()), *filter(None, across)]


def _advice(cells: Sequence[Cell], tolerance: float) -> str:
    one, ancestral = cells[0], ancestral_of(cells[0], cells)
    usual = _usual_entropy(one, cells)
    place = f"{one.model}, {one.at}{', ' * bool(one.setting)}{one.setting}: "
    if ancestral is None and usual is None:
        return f"{place}no rule can be named, without ancestral sampling or real data's entropy"
    kept = [c for c in cells if _keeps(c, usual, tolerance)]
    if not kept:
        within = f"within {100 * tolerance:g}% of real data's {short(usual)}"
        return f"{place}no rule has an entropy {within}"
    best, first = max(kept, key=lambda c: c.score), max(cells, key=lambda c: c.score)
    told = f"{short_name(one.quality)} {format_metric(best.quality)}"
    lost = f"; {first.kappa} has {format_metric(first.quality)}, but not this entropy"
    lost = lost if first not in kept and first.beats(best) else ""
    if ancestral is None:
        return f"{place}{best.kappa} ({told}{_entropies(best, usual)} of real data{lost})"
    if best.ancestral:
        others = "no other rule was run" if len(cells) == 1 else "no rule does better"
        return f"{place}ancestral ({told}; {others}{lost})"
    told += f" against {format_metric(ancestral.quality)} by ancestral"
    told += f"{_entropies(best, usual)}{lost}"
    if best.beats(ancestral):
        return f"{place}{best.kappa} ({told})"
    tie = "no rule beats ancestral by more than the errors; first is"
    return f"{place}{tie} {best.kappa} ({told})"


def _usual_entropy(cell: Cell, cells: Sequence[Cell]) -> float | None:
    """That of ancestral sampling; without such a cell, of real data."""
    ancestral = ancestral_of(cell, cells)
    if ancestral is None:
        return cell.real(cell.entropy)
    return finite(ancestral.entropy)


def _keeps(cell: Cell, usual: float | None, tolerance: float) -> bool:
    if cell.ancestral or usual is None:  # images and puzzles may have no entropy
        return True
    entropy = math.nan if cell.entropy is None else cell.entropy.value
    return abs(entropy - usual) <= tolerance * abs(usual)


def _entropies(cell: Cell, usual: float | None) -> str:
    if cell.entropy is None or usual is None:
        return "; no entropy was measured"
    return f"; entropy {short(cell.entropy.value)} against {short(usual)}"


# At equal entropy, whatever top-p or temperature gave it: ancestral sampling with several of
# these is a line of quality against entropy, and another cell is compared with the point of
# that line at its own entropy.


@dataclass(frozen=True)
class EntropyMatch:
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
    def of(cls, cell: Cell, low: Cell, high: Cell) -> EntropyMatch:
        """On the line between the two; the error has those of the two and, times the slope,
        those of the entropies."""
        apart = finite(high.entropy) - finite(low.entropy)
        share = (finite(cell.entropy) - finite(low.entropy)) / apart
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


def matches(cells: Sequence[Cell]) -> list[EntropyMatch]:
    """Of cells at one number of steps: those whose entropy ancestral sampling reaches, too."""
    known = [c for c in cells if None not in (finite(c.entropy), finite(c.quality))]
    line = sorted((c for c in known if c.ancestral), key=lambda c: finite(c.entropy))
    found = []
    for cell in (c for c in known if not c.ancestral):
        for low, high in pairwise(line):
            least, most = finite(low.entropy), finite(high.entropy)
            if least < most and least <= finite(cell.entropy) <= most:
                found.append(EntropyMatch.of(cell, low, high))
                break
    return found


def _at_equal_entropy(cells: Sequence[Cell]) -> str | None:
    """The best of the cells at one number of steps, in a sentence; of those ahead, if any are.

    None where ancestral sampling has no two entropies, or nothing else was run.
    """
    line = {finite(c.entropy) for c in cells if c.ancestral} - {None}
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
        f"{cell.name} ({short_name(cell.quality)} {format_metric(cell.quality)} against "
        f"{short(best.quality, best.error or None)} by ancestral between {low} and {high}; "
        f"entropy {short(finite(cell.entropy))}; "
        f"better by {short(best.gain, best.doubt or None)}"
    )
    if ahead:
        return f"{place}{told}; {len(ahead)} of {pluralize(len(found), 'setting')} ahead)"
    return f"{place}no rule beats ancestral by more than the errors; first is {told})"


def _spread(cell: Cell) -> float:
    """The error of its entropy."""
    assert cell.entropy is not None
    return finite(cell.entropy.stderr) or 0.0

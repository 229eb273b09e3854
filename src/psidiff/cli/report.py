"""The report of a comparison: what the records of its cells say, as table, figures and page."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..evaluation.measure import Measure

Records = Sequence[Mapping[str, Any]]
SETTLED = 1.96  # a difference counts if it is as many times its own standard error


@dataclass(frozen=True, eq=False)
class Cell:
    """A record, read; `setting` says what of top-p and temperature varies within its model."""

    about: Mapping[str, Any]
    measures: dict[str, Measure]
    setting: str = ""

    @property
    def model(self) -> str:
        return self.about["cell"]["model"]

    @property
    def steps(self) -> int:
        return self.about["cell"]["steps"]

    @property
    def kappa(self) -> str:
        return self.about["cell"]["kappa"]

    @property
    def name(self) -> str:
        return f"{self.kappa}, {self.setting}" if self.setting else self.kappa

    @property
    def ancestral(self) -> bool:
        return self.kappa == "ancestral"

    @property
    def quality(self) -> Measure:
        return self.measures[self.about["quality"]]

    @property
    def entropy(self) -> Measure | None:
        return self.measures.get(self.about.get("entropy") or "")

    @property
    def score(self) -> float:
        """Quality, made so that more is better."""
        value = self.quality.value if self.about["better"] == "high" else -self.quality.value
        return value if math.isfinite(value) else -math.inf

    def real(self, measure: Measure | None) -> float | None:
        """The value of a measure on real data."""
        value = (self.about.get("reference") or {}).get(measure.name if measure else "")
        return float(value) if isinstance(value, (int, float)) else None

    def beats(self, other: Cell) -> bool:
        """Whether it is better by more than the errors; one sample alone has none to tell."""
        sure = math.hypot(self.quality.error or 0.0, other.quality.error or 0.0)
        alone = min(self.about["samples"], other.about["samples"]) < 2
        return not alone and self.score - other.score > SETTLED * sure


# --- records ---


def read(records: Records) -> list[Cell]:
    """Cells in the order of model, steps, kappa, top-p and temperature."""
    if not records:
        raise ValueError("there are no records to report on: psidiff compare makes them")
    for record in records:
        if record.get("format_version") != 1:
            raise ValueError(f"format_version must be 1, got {record.get('format_version')}")
    cells = []
    for model, ours in _grouped(records, lambda record: record["cell"]["model"]).items():
        judged = sorted({record["quality"] for record in ours})
        if len(judged) > 1:
            raise ValueError(f"{model} is judged by {_listed(judged)}: report them apart")
        varied = [w for w in _SETTINGS if len({r["cell"].get(w) for r in ours}) > 1]
        cells += [_cell(record, varied) for record in ours]
    return sorted(cells, key=_order)


_SETTINGS = {"top_p": "top-p", "temperature": "temperature"}


def _cell(record: Mapping[str, Any], varied: Sequence[str]) -> Cell:
    measures = {m["name"]: _measure(m) for m in record["measures"]}
    if record["quality"] not in measures:
        raise ValueError(f"{record['sampler']} has no measure {record['quality']!r}")
    return Cell(record, measures, _settings(record, varied))


def _measure(found: Mapping[str, Any]) -> Measure:
    value, error = found["value"], found.get("error")
    return Measure(
        found["name"],
        math.nan if value is None else float(value),
        None if error is None or not math.isfinite(error) else float(error),
        found.get("unit") or "",
        found.get("protocol") or {},
    )


def _settings(record: Mapping[str, Any], which: Sequence[str], absent: str = "no ") -> str:
    """top-p 0.9, temperature 0.8; what is not set is left out if absent is empty."""
    given = [(_SETTINGS[w], record["cell"].get(w)) for w in which]
    words = [f"{n} {v:g}" if v is not None else absent and absent + n for n, v in given]
    return ", ".join(filter(None, words))


def _order(cell: Cell) -> tuple[Any, ...]:
    given = [cell.about["cell"].get(w) for w in _SETTINGS]
    return (cell.model, cell.steps, cell.kappa, [math.inf if g is None else g for g in given])


def _grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _by_model(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    return _grouped(cells, lambda cell: cell.model)


def _best(cells: Sequence[Cell]) -> set[Cell]:
    """The best of each model and number of steps, where there is a choice."""
    groups = _grouped(cells, lambda cell: (cell.model, cell.steps)).values()
    return {max(g, key=lambda c: c.score) for g in groups if len({c.score for c in g}) > 1}


def _ancestral_of(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """Ancestral sampling at the same steps, top-p and temperature."""
    place = (cell.model, cell.steps, cell.setting)
    alike = (c for c in cells if c.ancestral and (c.model, c.steps, c.setting) == place)
    return next(alike, None)


# --- words ---


def short(value: float | int | None, error: float | None = None) -> str:
    """Three digits; with an error as many as that one allows."""
    if value is None or not math.isfinite(value):
        return "–"
    if not error and value == round(value):
        return f"{value:,.0f}"
    lead = math.floor(math.log10(abs(error or value)))
    digits = 2 - lead if not error else (error < 2 * 10**lead) - lead
    digits = min(max(digits, 0), 6)
    return f"{value:,.{digits}f}" + (f" ± {error:,.{digits}f}" if error else "")


def _value(measure: Measure | None) -> str:
    return "–" if measure is None else short(measure.value, measure.error)


def _listed(words: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _protocol(protocols: Sequence[Mapping[str, Any]]) -> str:
    """Protocols in words; where they differ, between what and what."""
    keys = dict.fromkeys(key for p in protocols for key in p)
    return ", ".join(
        f"{key.replace('_', ' ')} {_between([p[key] for p in protocols if key in p])}"
        for key in sorted(keys, key="error".__eq__)  # how sure, last
    )


def _between(values: Sequence[Any]) -> str:
    kinds = list(dict.fromkeys(map(_word, values)))
    if len(kinds) > 1 and all(type(v) in (int, float) for v in values):
        return f"{_word(min(values))} to {_word(max(values))}"
    return _listed(kinds, "or")


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, (int, float)):
        return short(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " to ".join(map(_word, value)) if len(value) == 2 else _listed(list(value))
    return str(value)


def _summary(cells: Sequence[Cell]) -> str:
    """What the cells of a model say."""
    quality, better = cells[0].quality.name, cells[0].about["better"]
    finds = [_find(at, quality) for at in _grouped(cells, lambda c: c.steps).values()]
    finds[0] += f" ({better} is better)"
    told = "; ".join(finds).capitalize() + "."
    return " ".join(filter(None, [told, _moved(cells), _made(cells), _unlike(cells)]))


def _find(at: Sequence[Cell], quality: str) -> str:
    """Which of the cells of a number of steps is best, and by how much."""
    best = max(at, key=lambda c: c.score)
    start = f"at {best.steps} steps {best.name} has "
    rest = [c for c in at if c is not best]
    if not rest:
        return f"{start}{quality} {_value(best.quality)}"
    rival = _ancestral_of(best, rest) or max(rest, key=lambda c: c.score)
    found = f"{start}the best {quality}, {_value(best.quality)} against "
    found += f"{_value(rival.quality)} by {rival.name}"
    return found if best.beats(rival) else f"{found}, which is within the errors"


def _moved(cells: Sequence[Cell]) -> str:
    """Whether the entropy is ancestral sampling's, or else that of the data."""
    entropy = cells[0].entropy
    if entropy is None:
        return ""
    real, moves = cells[0].real(entropy), []
    for cell in cells:
        usual = _usual_entropy(cell, cells)
        if usual and cell.entropy and not cell.ancestral:
            moves.append((cell.entropy.value / usual - 1, cell))
    told = "" if real is None else f" (real data: {short(real)})"
    if not moves:
        return ""
    than = "ancestral sampling's" if any(c.ancestral for c in cells) else "that of real data"
    most, where = max(moves, key=lambda m: abs(m[0]))
    if abs(most) <= 0.03:
        return f"The {entropy.name} stays within {abs(most):.1%} of {than}{told}."
    away = f"{abs(most):.1%} {'below' if most < 0 else 'above'} {than}"
    return (
        f"The {entropy.name} moves: {where.name} at {where.steps} steps is {away}, "
        f"the furthest of all{told}."
    )


def _made(cells: Sequence[Cell]) -> str:
    """Samples, seed and judge."""
    about = [c.about for c in cells]
    samples, length, seed = (_between([a[k] for a in about]) for k in _MADE)
    told = f"Each cell is {samples} samples of {length} tokens, seed {seed}"
    protocol = cells[0].quality.protocol
    by = next((f"{w} {protocol[w]}" for w in ("judge", "features") if protocol.get(w)), "")
    return f"{told}, by the {by}." if by else f"{told}."


_MADE = ("samples", "length", "seed")


def _unlike(cells: Sequence[Cell]) -> str:
    """A warning where the cells do not compare: in a protocol, words say how, numbers what."""
    hows = [{k: v for k, v in c.quality.protocol.items() if type(v) is str} for c in cells]
    hows = [{**how, **{k: c.about[k] for k in _MADE}} for how, c in zip(hows, cells, strict=True)]
    keys = dict.fromkeys(key for how in hows for key in how)
    unlike = [key for key in keys if len({str(how.get(key)) for how in hows}) > 1]
    if not unlike:
        return ""
    return f"Beware: the cells were not measured alike; they differ in {_listed(unlike)}."


# --- recommendations ---


def recommend(records: Records, tolerance: float = 0.03) -> list[str]:
    """For each number of steps the best kappa rule of those that keep the entropy.

    The entropy must be within `tolerance`, relative, of ancestral sampling's at the same steps,
    top-p and temperature: a better judgement bought with less variety is none. Where these two
    vary, each setting has its own sentence, for the same reason.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    groups = _grouped(read(records), lambda cell: (cell.model, cell.steps, cell.setting))
    return [_advice(group, tolerance) for group in groups.values()]


def _advice(cells: Sequence[Cell], tolerance: float) -> str:
    one = cells[0]
    place = f"{one.model}, {one.steps} steps{', ' * bool(one.setting)}{one.setting}: "
    ancestral = _ancestral_of(one, cells)
    if ancestral is None and _usual_entropy(one, cells) is None:
        return f"{place}no rule can be named, without ancestral sampling or real data's entropy"
    kept = [c for c in cells if _keeps(c, cells, tolerance)]
    if not kept:
        usual = short(_usual_entropy(one, cells))
        return f"{place}no rule has an entropy within {tolerance:.0%} of real data's {usual}"
    best, first = max(kept, key=lambda c: c.score), max(cells, key=lambda c: c.score)
    told = f"{one.quality.name} {_value(best.quality)}"
    lost = f"; {first.kappa} has {_value(first.quality)}, but not this entropy"
    lost = lost if first not in kept and first.beats(best) else ""
    if ancestral is None:
        usual = _entropies(best, _usual_entropy(best, cells), " of real data")
        return f"{place}{best.kappa} ({told}{usual}{lost})"
    if best.ancestral:
        others = "no other rule was run" if len(cells) == 1 else "no rule does better"
        return f"{place}ancestral ({told}; {others}{lost})"
    told += f" against {_value(ancestral.quality)} by ancestral"
    told += _entropies(best, _usual_entropy(best, cells)) + lost
    if best.beats(ancestral):
        return f"{place}{best.kappa} ({told})"
    return f"{place}no rule beats ancestral by more than the errors; first is {best.kappa} ({told})"


def _usual_entropy(cell: Cell, cells: Sequence[Cell]) -> float | None:
    """That of ancestral sampling; without such a cell, of real data."""
    ancestral = _ancestral_of(cell, cells)
    if ancestral is None:
        return cell.real(cell.entropy)
    return ancestral.entropy.value if ancestral.entropy else None


def _keeps(cell: Cell, cells: Sequence[Cell], tolerance: float) -> bool:
    usual = _usual_entropy(cell, cells)
    if cell.ancestral or usual is None:  # images and puzzles may have no entropy
        return True
    return cell.entropy is not None and abs(cell.entropy.value - usual) <= tolerance * abs(usual)


def _entropies(cell: Cell, usual: float | None, whose: str = "") -> str:
    if cell.entropy is None or usual is None:
        return "; no entropy was measured"
    return f"; entropy {short(cell.entropy.value)} against {short(usual)}{whose}"


# --- table ---


def table(records: Records, bold: str = "{}") -> list[list[str]]:
    """A head, then a row a cell; `bold` is how the best of a number of steps is written."""
    cells = read(records)
    best = _best(cells)
    rows = [[_shown(value) for value in _row(cell)] for cell in cells]
    for cell, row in zip(cells, rows, strict=True):
        if cell in best:
            row[_QUALITY] = bold.format(row[_QUALITY])
    return [_head(cells), *rows]


_QUALITY = 3  # its column


def markdown(records: Records) -> str:
    """The table in Markdown, the best in bold."""
    head, *rows = (
        [word.replace("|", "\\|").replace("\n", " ") for word in row]
        for row in table(records, "**{}**")
    )
    rule = ["---", "--:", "---", *["--:"] * 2, "---", *["--:"] * 4]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def _head(cells: Sequence[Cell]) -> list[str]:
    qualities = {f"{c.quality.name} ({c.about['better']} is better)" for c in cells}
    entropies = {c.entropy.name for c in cells if c.entropy}
    quality = qualities.pop() if len(qualities) == 1 else "quality"
    entropy = entropies.pop() if len(entropies) == 1 else "entropy"
    costs = ["NFE", "tokens a pass", "seconds", "MiB"]
    return ["model", "steps", "sampler", quality, entropy, "other measures", *costs]


def _row(cell: Cell) -> list[Any]:
    about, apart = cell.about, (cell.quality, cell.entropy)
    others = [f"{m.name} {_value(m)}" for m in cell.measures.values() if m not in apart]
    settings = _settings(about, list(_SETTINGS), absent="")
    sampler = ", ".join(filter(None, [cell.kappa, settings]))
    costs = [about.get(k) for k in ("nfe", "tokens_per_pass", "seconds", "peak_memory_mib")]
    return [cell.model, cell.steps, sampler, *apart, ", ".join(others), *costs]


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return _value(value) if isinstance(value, Measure) else short(value)


def _key(value: Any) -> Any:
    """What a column is sorted by."""
    value = value.value if isinstance(value, Measure) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- figures ---


class Theme(NamedTuple):
    """The colours of a figure; those of samplers differ in hue and lightness."""

    ink: str
    soft: str
    line: str
    paper: str
    samplers: tuple[str, ...]


LIGHT = Theme(
    *("#20262d", "#5f6771", "#e4e2dd", "#ffffff"),
    ("#0072b2", "#c04f00", "#007a5a", "#aa3377", "#8a6500", "#5a52b5"),
)
DARK = Theme(
    *("#dde1e6", "#a3acb7", "#333941", "#1b1f24"),
    ("#56b4e9", "#f0874a", "#2fc79a", "#e58bc0", "#e0b84a", "#a9a2f5"),
)
_MARKS = "osD^vPXph"


class Picture(NamedTuple):
    """A figure of a model, and where in it (from the left, from the top) each cell is."""

    name: str
    alt: str
    png: bytes
    points: list[tuple[Cell, float, float]]


def figures(records: Records, folder: Path) -> list[Path]:
    """quality-MODEL.png and, where there is an entropy, frontier-MODEL.png of each model."""
    pictures = list(_pictures(read(records), LIGHT))
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (folder / picture.name).write_bytes(picture.png)
    return [folder / picture.name for picture in pictures]


def _pictures(cells: Sequence[Cell], theme: Theme) -> Iterator[Picture]:
    for ours in _by_model(cells).values():
        for frontier in (False, True):
            seen = [c for c in ours if None not in (_x(c, frontier), _key(c.quality))]
            if seen:
                yield _picture(sorted(seen, key=_first_ancestral), theme, frontier)


def _first_ancestral(cell: Cell) -> tuple[Any, ...]:
    return (not cell.ancestral, *_order(cell)[2:], cell.steps)


def _x(cell: Cell, frontier: bool) -> float | None:
    return _key(cell.entropy) if frontier else float(cell.about["nfe"])


def _picture(cells: Sequence[Cell], theme: Theme, frontier: bool) -> Picture:
    """Quality against NFE, the entropy at each point; or against entropy, the steps there."""
    figure, ax = _axes(cells, theme, frontier)
    colours = _colours(cells, theme)
    lines = _grouped(cells, lambda cell: cell.name)
    for mark, (name, line) in zip(_MARKS * len(lines), lines.items(), strict=False):
        x, y = [_x(c, frontier) for c in line], [c.quality.value for c in line]
        errors = {"yerr": [c.quality.error or 0.0 for c in line]}
        if frontier:
            errors["xerr"] = [(c.entropy and c.entropy.error) or 0.0 for c in line]
        look = {"color": colours[name], "marker": mark, "ms": 6, "lw": 1.6}
        ax.errorbar(x, y, **errors, **look, mec=theme.paper, mew=0.8, elinewidth=0.9)
    real = _mark_real(ax, cells, theme, frontier)
    _name_lines(figure, ax, lines, colours)
    labels = [(_x(c, frontier), c.quality.value, _tag(c, frontier), colours[c.name]) for c in cells]
    _label(ax, [*labels, *real], theme, lines.values(), frontier)
    width, height = figure.canvas.get_width_height()
    spots = ax.transData.transform([(x, y) for x, y, _, _ in labels]) / (width, height)
    points = [(c, float(x), float(1 - y)) for c, (x, y) in zip(cells, spots, strict=True)]
    file = io.BytesIO()
    figure.savefig(file, format="png")
    kind, against = ("frontier", "entropy") if frontier else ("quality", "NFE")
    name = f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '-', cells[0].model)}.png"
    alt = f"{cells[0].quality.name} of {cells[0].model} against {against}, a line a sampler"
    return Picture(name, alt, file.getvalue(), points)


def _tag(cell: Cell, frontier: bool) -> str:
    if frontier:
        return str(cell.steps)
    return short(cell.entropy.value) if cell.entropy else ""


def _colours(cells: Sequence[Cell], theme: Theme) -> dict[str, str]:
    """Of each sampler by its name: ancestral grey, the others in turn."""
    names = list(dict.fromkeys(c.name for c in sorted(cells, key=_first_ancestral)))
    grey = {c.name for c in cells if c.ancestral}
    others = [name for name in names if name not in grey]
    in_turn = {n: theme.samplers[i % len(theme.samplers)] for i, n in enumerate(others)}
    return {name: in_turn.get(name, theme.soft) for name in names}


def _axes(cells: Sequence[Cell], theme: Theme, frontier: bool) -> tuple[Any, Any]:
    """Empty axes with their words."""
    try:
        mpl: Any = import_module("matplotlib")
        made, ticker = import_module("matplotlib.figure"), import_module("matplotlib.ticker")
        agg = import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        words = "the figures need matplotlib: pip install 'psidiff[compare]'"
        raise ValueError(words) from error
    height = max(4.2, 1.4 + 0.18 * len({c.name for c in cells}))
    with mpl.rc_context({"text.parse_math": False, "font.size": 9.5}):
        figure = made.Figure(figsize=(6.2, height), dpi=200, layout="constrained")
        agg.FigureCanvasAgg(figure)
        figure.set(facecolor=theme.paper)
        ax = figure.subplots()
        one, about = cells[0], cells[0].about
        quality, entropy = one.quality, one.entropy.name if one.entropy else ""
        against = entropy if frontier else "NFE"
        figure.suptitle(
            f"{one.model}: {quality.name} against {against}",
            **{"x": 0.015, "ha": "left", "fontsize": 11, "weight": "bold", "color": theme.ink},
        )
        notes = ["at the points: " + ("steps" if frontier else entropy)]
        notes = notes if frontier or entropy else []
        notes += [_settings(about, list(_SETTINGS), absent="")] if not one.setting else []
        notes += [f"{about['samples']} samples of {about['length']} tokens"]
        ax.set_title(" · ".join(filter(None, notes)), loc="left", fontsize=8.5, color=theme.soft)
        unit = f", {quality.unit}" if quality.unit else ""
        ax.set_ylabel(f"{quality.name}{unit} ({about['better']} is better)", color=theme.ink)
        unit = one.entropy.unit if one.entropy and frontier else ""
        across = f"{entropy}, {unit}".rstrip(", ") if frontier else "NFE: passes of the network"
        ax.set_xlabel(across, color=theme.ink)
    ax.set(facecolor=theme.paper)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(theme.soft)
    ax.tick_params(colors=theme.soft, length=3)
    ax.grid(True, color=theme.line, lw=0.8)
    ax.set_axisbelow(True)
    ax.margins(0.1, 0.12)
    if not frontier:
        nfe = [c.about["nfe"] for c in cells]
        ax.set_xscale("log", base=2)
        ax.set_xlim(min(nfe) / 1.35, max(nfe) * 1.6)
        ax.xaxis.set_major_locator(ticker.LogLocator(base=2))
        ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        ax.xaxis.set_minor_locator(ticker.NullLocator())
    return figure, ax


def _mark_real(
    ax: Any, cells: Sequence[Cell], theme: Theme, frontier: bool
) -> list[tuple[float, float, str, str]]:
    """Real data as a dashed line, or as a star whose label is returned."""
    one = cells[0]
    quality, entropy = one.real(one.quality), one.real(one.entropy)
    if quality is None or (frontier and entropy is None):
        return []
    if frontier and entropy is not None:
        ax.plot(entropy, quality, marker="*", ms=13, color=theme.ink, mec=theme.paper, ls="")
        return [(entropy, quality, "real data", theme.ink)]
    ax.axhline(quality, color=theme.ink, lw=1, ls=(0, (5, 4)), zorder=1)
    known = "" if entropy is None else f" (entropy {short(entropy)})"
    words = f"real data {short(quality)}{known}"
    place = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points"}
    ax.annotate(words, (0.01, quality), (0, 3), **place, fontsize=8.5, color=theme.ink)
    return []


def _name_lines(figure: Any, ax: Any, lines: Mapping[str, Any], colours: Any) -> None:
    """The samplers' names at the right, each as near as can be to where its line ends."""
    place = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
    ends = {name: line[-1].quality.value for name, line in lines.items()}
    for name, y in ends.items():
        ax.annotate(name, (1.0, y), (16, 0), **place, color=colours[name], annotation_clip=False)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what follows must not move what it is placed by
    order, high = sorted(ends, key=lambda n: ends[n]), ax.bbox.height
    pixels = ax.transData.transform([(1, ends[n]) for n in order])[:, 1] - ax.bbox.y0
    gap = 13 / 72 * figure.dpi
    heights = dict(zip(order, spread(pixels.tolist(), gap), strict=True))
    named = {text.get_text(): text for text in ax.texts}
    marks = {n: box[0].get_marker() for n, box in zip(lines, ax.containers, strict=True)}
    for name, y in heights.items():
        named[name].xy = (1.0, y / high)
        named[name].xycoords = ax.transAxes
        spot = (1 + 8 / 72 * figure.dpi / ax.bbox.width, y / high)
        look = {"marker": marks[name], "color": colours[name], "ms": 5.5, "clip_on": False}
        ax.plot(*spot, transform=ax.transAxes, **look)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """The nearest to these, in ascending order, that are `gap` apart or more.

    y_i - i gap must not fall: least squares by pooling neighbours that would.
    """
    pools: list[list[float]] = []
    for i, y in enumerate(wanted):
        pools.append([y - i * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    levels = [float(np.mean(pool)) for pool in pools for _ in pool]
    return [level + i * gap for i, level in enumerate(levels)]


def _label(ax: Any, labels: Sequence[Any], theme: Theme, lines: Any, frontier: bool) -> None:
    """A word at each point, on that side of it where it covers the least."""
    effects: Any = import_module("matplotlib.patheffects")
    halo = [effects.withStroke(linewidth=2.2, foreground=theme.paper)]
    dot = ax.figure.dpi / 72
    taken = _occupied(ax, lines, frontier, 3 * dot)
    for x, y, word, colour in labels:
        (px, py), size = ax.transData.transform((x, y)), np.array([4.9 * len(word), 8.0]) * dot
        sides = [(1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 1), (-1, -1), (-1, 0)]
        far = (size / 2 + 5 * dot) * sides * np.array([1, 1.15])
        boxes = np.hstack([(px, py) + far - size / 2, (px, py) + far + size / 2])
        side = int(np.argmin([_covered(b, taken, ax.bbox.extents) for b in boxes]))
        taken = np.vstack([taken, boxes[side]])
        look = {"fontsize": 8, "color": colour, "ha": "center", "va": "center", "zorder": 5}
        place = {"xycoords": "data", "textcoords": "offset points", "path_effects": halo}
        ax.annotate(word, (x, y), far[side] / dot, **place, **look)


def _occupied(ax: Any, lines: Any, frontier: bool, half: float) -> np.ndarray:
    """Boxes (N, 4) along lines and error bars, in pixels."""
    spots = []
    for line in lines:
        ends = [(_x(c, frontier), c.quality.value, c.quality.error or 0.0) for c in line]
        pixels = ax.transData.transform([(x, y) for x, y, _ in ends])
        spots += [a + (b - a) * w for a, b in zip(pixels, pixels[1:], strict=False) for w in _PARTS]
        bars = [(x, y + e * side) for x, y, e in ends for side in (-1, -0.5, 0, 0.5, 1)]
        spots += list(ax.transData.transform(bars))
    return np.hstack([np.array(spots) - half, np.array(spots) + half])


_PARTS = np.linspace(0, 1, 25)


def _covered(box: np.ndarray, taken: np.ndarray, inside: np.ndarray) -> float:
    """The area that a box shares with others; outside of the axes is covered too."""
    low, high = np.maximum(box[:2], taken[:, :2]), np.minimum(box[2:], taken[:, 2:])
    shared = np.clip(high - low, 0, None).prod(1).sum()
    kept = np.clip(np.minimum(box[2:], inside[2:]) - np.maximum(box[:2], inside[:2]), 0, None)
    return float(shared + 9 * ((box[2:] - box[:2]).prod() - kept.prod()))


# --- report ---


def write_report(records: Records, folder: Path) -> Path:
    """The figures, report.md, and report.html: one page that needs nothing beside it."""
    cells = read(records)
    light, dark = (list(_pictures(cells, theme)) for theme in (LIGHT, DARK))
    data = json.dumps(_page(cells, recommend(records), light, dark), allow_nan=False)
    data = data.replace("<", "\\u003c")  # no text can end the script element, or open one
    template = resources("psidiff.cli").joinpath("report.html").read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for picture in light:
        (folder / picture.name).write_bytes(picture.png)
    (folder / "report.md").write_text(_document(records, cells, light), encoding="utf-8")
    path = folder / "report.html"
    path.write_text(template.replace("__DATA__", data), encoding="utf-8")
    return path


def _title(cells: Sequence[Cell]) -> str:
    names = dict.fromkeys(cell.kappa for cell in cells)
    what = "one sampler" if len(names) == 1 else f"{len(names)} samplers compared"
    return f"{_listed(list(_by_model(cells)))}: {what}"


def _document(records: Records, cells: Sequence[Cell], pictures: Sequence[Picture]) -> str:
    told = [f"**{model}.** {_summary(ours)}" for model, ours in _by_model(cells).items()]
    advice = "\n".join(f"- {sentence}" for sentence in recommend(records))
    images = "\n".join(f"![{p.alt}]({p.name})" for p in pictures)
    measured = "\n".join(f"- {name}: {words}" for name, words in _measured(cells))
    parts = [f"# {_title(cells)}", *told, "## With the entropy held", advice]
    parts += ["## Figures", images, "## Cells", markdown(records)]
    return "\n\n".join([*parts, "## How this was measured", measured]) + "\n"


def _page(
    cells: Sequence[Cell], advice: Sequence[str], light: Sequence[Picture], dark: Sequence[Picture]
) -> dict[str, Any]:
    """What the page knows."""
    number, best = {cell: i for i, cell in enumerate(cells)}, _best(cells)
    shown = [_figure(*pair, number) for pair in zip(light, dark, strict=True)]
    parts = [
        {
            "model": model,
            "summary": _summary(ours),
            "figures": [f for f in shown if cells[f["points"][0][0]].model == model],
            "head": _head(ours)[1:],
            "rows": [_table_row(cell, number[cell], cell in best) for cell in ours],
        }
        for model, ours in _by_model(cells).items()
    ]
    told = [_details(cell, cells) for cell in cells]
    page = {"title": _title(cells), "parts": parts, "cells": told, "advice": list(advice)}
    columns = {"sampler": _QUALITY - 2, "quality": _QUALITY - 1, "others": _QUALITY + 1}
    return {**page, **columns, "measured": _measured(cells)}


def _figure(light: Picture, dark: Picture, number: Mapping[Cell, int]) -> dict[str, Any]:
    points = [[number[cell], round(x, 5), round(y, 5)] for cell, x, y in light.points]
    pair = [base64.b64encode(p.png).decode("ascii") for p in (light, dark)]
    return {"alt": light.alt, "png": pair, "points": points}


def _table_row(cell: Cell, number: int, best: bool) -> dict[str, Any]:
    values = _row(cell)[1:]
    words, keys = [_shown(v) for v in values], [_key(v) for v in values]
    return {"cell": number, "best": best, "words": words, "keys": keys}


def _details(cell: Cell, cells: Sequence[Cell]) -> dict[str, Any]:
    about, ours = cell.about, _by_model(cells)[cell.model]
    facts = [f"{short(about['nfe'])} passes", f"{short(about['tokens_per_pass'])} tokens a pass"]
    if about.get("head_rows_per_token") is not None:
        facts.append(f"{short(about['head_rows_per_token'])} rows of the head a token")
    facts.append(f"{short(about['seconds'])} s")
    if about.get("peak_memory_mib") is not None:
        facts.append(f"{short(about['peak_memory_mib'])} MiB")
    brief = f"{cell.steps} steps, {cell.name}: {cell.quality.name} {_value(cell.quality)}"
    measures = [
        {"name": m.name, "value": f"{_value(m)} {m.unit}", "how": _protocol([m.protocol])}
        for m in cell.measures.values()
    ]
    return {
        "name": f"{cell.model}: {about['sampler']}",
        "brief": brief + (f", entropy {short(cell.entropy.value)}" if cell.entropy else ""),
        "colours": [_colours(ours, theme)[cell.name] for theme in (LIGHT, DARK)],
        "facts": " · ".join(facts),
        "samples": about["samples"],
        "kind": about["kind"],
        "shown": list(about.get("shown") or []),
        "measures": measures,
    }


def _measured(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """How each number came about, in words."""
    found = []
    models = _by_model(cells)
    for model, ours in models.items():
        of = f" of {model}" if len(models) > 1 else ""
        for name in dict.fromkeys(name for cell in ours for name in cell.measures):
            alike = [cell.measures[name] for cell in ours if name in cell.measures]
            words = [alike[0].unit and f"in {alike[0].unit}", _protocol([m.protocol for m in alike])]
            real = next((r for c in ours if (r := c.real(c.measures.get(name))) is not None), None)
            words.append("" if real is None else f"on real data {short(real)}")
            found.append((name + of, "; ".join(filter(None, words)) or "no protocol was noted"))
    about = [cell.about for cell in cells]
    samples, length, seed = (_between([a[k] for a in about]) for k in _MADE)
    made = f"{samples} samples of {length} tokens a cell, seed {seed}"
    versions = f"psidiff {_between([a['psidiff'] for a in about])}, torch "
    versions += _between([a["torch"] for a in about])
    where = " and ".join(dict.fromkeys(f"{a['device']}, {a['machine']}" for a in about))
    first, last = (pick(a["time"] for a in about)[:16].replace("T", " ") for pick in (min, max))
    when = f"{first} to {last}" if first != last else first
    errors = (
        "one standard error. A difference is called one if it is more than 1.96 of its own "
        "standard errors, which takes the cells for independent"
    )
    costs = (
        "NFE counts passes of the network for a sample; tokens a pass are the length over NFE; "
        "seconds are for all samples of a cell; MiB is the peak of memory"
    )
    extra = [("samples", made), ("±", errors), ("costs", costs), ("versions", versions)]
    return [*found, *extra, ("machine", where), ("time", when)]

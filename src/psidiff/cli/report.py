"""The report of a comparison: what the records of its cells say, as table, figures and page."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files as resources
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..evaluation.measure import Measure

Records = Sequence[Mapping[str, Any]]
TOLERANCE = 0.03  # how far, relative, an entropy may be off and still be called kept
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
    if isinstance(value, int) or not (error or value):
        return f"{value:,.0f}"
    lead = math.floor(math.log10(abs(error or value)))
    digits = (error < 2 * 10**lead) - lead if error else 2 - lead
    digits = min(max(digits, 0), 6)
    return f"{value:,.{digits}f}" + (f" ± {error:,.{digits}f}" if error else "")


def _value(measure: Measure | None) -> str:
    return "–" if measure is None else short(measure.value, measure.error)


def _brief(measure: Measure) -> str:
    """Its name, without what is said in brackets."""
    return measure.name.partition(" (")[0]


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
    if isinstance(value, Sequence) and not isinstance(value, str):
        words = list(map(_word, value))
        return " to ".join(words) if len(words) == 2 else _listed(words)
    return short(value) if isinstance(value, float) else str(value)


def _summary(cells: Sequence[Cell]) -> str:
    """What the cells of a model say."""
    quality, better = _brief(cells[0].quality), cells[0].about["better"]
    if len({c.name for c in cells}) == 1:
        values = _listed([f"{_value(c.quality)} at {c.steps} steps" for c in cells])
        told = f"With {cells[0].name}, {quality} ({better} is better) is {values}."
        return _joined(told, cells)
    firsts = [_first(at) for at in _grouped(cells, lambda c: c.steps).values()]
    places = _grouped(firsts, lambda first: first[0])
    finds = [f"{n} at {_listed([place for _, place in at])}" for n, at in places.items()]
    told = f"By {quality} ({better} is better) the best sampler is {'; '.join(finds)}."
    return _joined(told, cells)


def _joined(told: str, cells: Sequence[Cell]) -> str:
    sentences = [told, _moved(cells), f"Each cell: {_made(cells)}.", _unlike(cells)]
    return " ".join(filter(None, sentences))


def _first(at: Sequence[Cell]) -> tuple[str, str]:
    """The best of the cells at a number of steps, and by how much it is."""
    best = max(at, key=lambda c: c.score)
    rest = [c for c in at if c is not best]
    found = f"{best.steps} steps ({_value(best.quality)}"
    if not rest:
        return best.name, f"{found})"
    rival = _ancestral_of(best, rest) or max(rest, key=lambda c: c.score)
    tie = "" if best.beats(rival) else ": within the errors"
    whose = rival.kappa if rival.setting == best.setting else rival.name
    return best.name, f"{found}, {whose} {_value(rival.quality)}{tie})"


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
        if usual and _key(cell.entropy) is not None and (known or not cell.ancestral):
            moves.append((_key(cell.entropy) / usual - 1, cell))
    if entropy is None or not moves:
        return ""
    than = f"real data's {short(real)}" if known else "ancestral sampling's"
    if real is not None and not known:
        than += f" (real data: {short(real)})"
    most, where = max(moves, key=lambda move: abs(move[0]))
    if abs(most) <= TOLERANCE:
        return f"The {_brief(entropy)} stays within {abs(most):.1%} of {than}."
    side = "below" if most < 0 else "above"
    furthest = f"{where.name} at {where.steps} steps is the furthest, {abs(most):.1%} {side}"
    return f"The {_brief(entropy)} moves: {furthest} {than}."


def _made(cells: Sequence[Cell]) -> str:
    """What a cell is: samples, seed and judge."""
    about = [c.about for c in cells]
    samples, length, seed = (_between([a[k] for a in about]) for k in _MADE)
    fixed = "" if cells[0].setting else _settings(about[0], list(_SETTINGS), absent="")
    protocol = cells[0].quality.protocol
    judge = [f"{w} {protocol[w]}" for w in ("judge", "features") if protocol.get(w)]
    made = [f"{samples} samples of {length} tokens", fixed, f"seed {seed}", *judge]
    return ", ".join(filter(None, made))


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
    return f"Beware: the cells were not measured alike; they differ in {_listed(unlike)}."


# --- recommendations ---


def recommend(records: Records, tolerance: float = TOLERANCE) -> list[str]:
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
        return (
            f"{place}no rule has an entropy within {100 * tolerance:g}% of real data's {usual}"
        )
    best, first = max(kept, key=lambda c: c.score), max(cells, key=lambda c: c.score)
    told = f"{_brief(one.quality)} {_value(best.quality)}"
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
    tie = "no rule beats ancestral by more than the errors; first is"
    return f"{place}{tie} {best.kappa} ({told})"


def _usual_entropy(cell: Cell, cells: Sequence[Cell]) -> float | None:
    """That of ancestral sampling; without such a cell, of real data."""
    ancestral = _ancestral_of(cell, cells)
    if ancestral is None:
        return cell.real(cell.entropy)
    return _key(ancestral.entropy)


def _keeps(cell: Cell, cells: Sequence[Cell], tolerance: float) -> bool:
    usual = _usual_entropy(cell, cells)
    if cell.ancestral or usual is None:  # images and puzzles may have no entropy
        return True
    entropy = math.nan if cell.entropy is None else cell.entropy.value
    return abs(entropy - usual) <= tolerance * abs(usual)


def _entropies(cell: Cell, usual: float | None, whose: str = "") -> str:
    if cell.entropy is None or usual is None:
        return "; no entropy was measured"
    return f"; entropy {short(cell.entropy.value)} against {short(usual)}{whose}"


# --- table ---


def table(records: Records, bold: str = "{}") -> list[list[str]]:
    """A head, then a row a cell; `bold` is how the best of a number of steps is written."""
    cells = read(records)
    head, best = _head(cells), _best(cells)
    rows = [[_shown(value) for value in _row(cell)] for cell in cells]
    for cell, row in zip(cells, rows, strict=True):
        if head[_QUALITY] == "quality":  # which one, the row must say
            row[_QUALITY] = f"{_brief(cell.quality)} {row[_QUALITY]}"
        if cell in best:
            row[_QUALITY] = bold.format(row[_QUALITY])
    return [head, *rows]


_QUALITY = 3  # its column


def markdown(records: Records) -> str:
    """The table in Markdown, the best in bold."""
    head, *rows = (
        [word.replace("|", "\\|").replace("\n", " ") for word in row]
        for row in table(records, "**{}**")
    )
    rule = ["---", "--:", "---", *["--:"] * 2, "---", *["--:"] * 4]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def _head(cells: Sequence[Cell], others: Sequence[str] = ("other measures",)) -> list[str]:
    qualities = {f"{_brief(c.quality)} ({c.about['better']} is better)" for c in cells}
    entropies = {c.entropy.name for c in cells if c.entropy}
    quality = qualities.pop() if len(qualities) == 1 else "quality"
    entropy = entropies.pop() if len(entropies) == 1 else "entropy"
    costs = ["NFE", "tokens a pass", "seconds", "MiB"]
    return ["model", "steps", "sampler", quality, entropy, *others, *costs]


def _row(cell: Cell, others: Sequence[str] | None = None) -> list[Any]:
    """Its values; the other measures in one text, or those asked for each by itself."""
    about, apart = cell.about, (cell.quality, cell.entropy)
    rest = ", ".join(f"{m.name} {_value(m)}" for m in cell.measures.values() if m not in apart)
    settings = _settings(about, list(_SETTINGS), absent="")
    sampler = ", ".join(filter(None, [cell.kappa, settings]))
    between = [rest] if others is None else [cell.measures.get(name) for name in others]
    costs = [about.get(k) for k in ("tokens_per_pass", "seconds", "peak_memory_mib")]
    return [cell.model, cell.steps, sampler, *apart, *between, _nfe(cell), *costs]


def _nfe(cell: Cell) -> float | int:
    nfe = cell.about["nfe"]
    return int(nfe) if nfe == int(nfe) else nfe


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
_MARKS, _DASHES = "osD^vPX", ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))


class Picture(NamedTuple):
    """A figure of a model, and where in it (from the left, from the top) each cell is."""

    name: str
    alt: str
    png: bytes
    points: list[tuple[Cell, float, float]]


def figures(records: Records, folder: Path) -> list[Path]:
    """quality-MODEL.png and, where there is an entropy, frontier-MODEL.png of each model."""
    pictures = _pictures(read(records), LIGHT)
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (folder / picture.name).write_bytes(picture.png)
    return [folder / picture.name for picture in pictures]


def _pictures(cells: Sequence[Cell], theme: Theme) -> list[Picture]:
    found = []
    with _matplotlib().rc_context(_look(theme)):
        for ours in _by_model(cells).values():
            styles = {cell.name: _style(cell, ours, theme) for cell in ours}
            for frontier in (False, True):
                seen = [c for c in ours if None not in (_x(c, frontier), _key(c.quality))]
                if seen:
                    found.append(_picture(sorted(seen, key=_line_order), styles, frontier))
    return found


def _matplotlib() -> Any:
    try:
        for part in ("figure", "ticker", "patheffects", "backends.backend_agg"):
            import_module(f"matplotlib.{part}")
        return import_module("matplotlib")
    except ImportError as error:
        words = "the figures need matplotlib: pip install 'psidiff[compare]'"
        raise ValueError(words) from error


def _look(theme: Theme) -> dict[str, Any]:
    inks = dict.fromkeys(["text.color", "axes.labelcolor"], theme.ink)
    softs = dict.fromkeys(["axes.edgecolor", "xtick.color", "ytick.color"], theme.soft)
    papers = dict.fromkeys(
        ["figure.facecolor", "savefig.facecolor", "axes.facecolor"], theme.paper
    )
    grid = {"axes.grid": True, "grid.color": theme.line, "axes.axisbelow": True}
    open_box = {"axes.spines.top": False, "axes.spines.right": False}
    words = {"font.size": 9.5, "text.parse_math": False}
    return {**inks, **softs, **papers, **grid, **open_box, **words}


def _line_order(cell: Cell) -> tuple[Any, ...]:
    return (not cell.ancestral, *_order(cell)[2:], cell.steps)


def _x(cell: Cell, frontier: bool) -> float | None:
    return _key(cell.entropy) if frontier else float(cell.about["nfe"])


def _picture(cells: Sequence[Cell], styles: Mapping[str, Any], frontier: bool) -> Picture:
    """Quality against NFE, the entropy at each point; or against entropy, the steps there."""
    lines = _grouped(cells, lambda cell: cell.name)
    figure, ax = _axes(cells, len(lines), frontier)
    ends = [_line(ax, line, styles[name], frontier) for name, line in lines.items()]
    _mark_real(ax, cells[0], frontier)
    _name_lines(figure, ax, list(lines), ends)
    _label(ax, cells, styles, frontier)
    places = ax.transData.transform([(_x(c, frontier), c.quality.value) for c in cells])
    width, height = figure.canvas.get_width_height()
    spots = [(c, x / width, 1 - y / height) for c, (x, y) in zip(cells, places, strict=True)]
    file = io.BytesIO()
    figure.savefig(file, format="png")
    kind, against = ("frontier", "entropy") if frontier else ("quality", "NFE")
    name = f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '-', cells[0].model)}.png"
    alt = f"{cells[0].quality.name} of {cells[0].model} against {against}, a line a sampler"
    return Picture(name, alt, file.getvalue(), spots)


def _style(cell: Cell, cells: Sequence[Cell], theme: Theme) -> dict[str, Any]:
    """A colour and a marker for its rule, ancestral grey; dashes for its setting."""
    rules = sorted({c.kappa for c in cells} - {"ancestral"})
    settings = list(dict.fromkeys(c.setting for c in sorted(cells, key=_order)))
    i = -1 if cell.ancestral else rules.index(cell.kappa)
    return {
        "color": theme.soft if i < 0 else theme.samplers[i % len(theme.samplers)],
        "marker": _MARKS[(i + 1) % len(_MARKS)],
        "ls": _DASHES[settings.index(cell.setting) % len(_DASHES)],
    }


def _axes(cells: Sequence[Cell], lines: int, frontier: bool) -> tuple[Any, Any]:
    """Empty axes with their words; higher where many lines are to come."""
    mpl, one = _matplotlib(), cells[0]
    height = 3.9 + 0.3 * max(0, lines - 5)
    figure = mpl.figure.Figure(figsize=(5.4, height), dpi=220, layout="constrained")
    mpl.backends.backend_agg.FigureCanvasAgg(figure)
    ax, quality, entropy = figure.subplots(), one.quality, one.entropy
    across = _brief(entropy) if frontier and entropy else "NFE"
    title = f"{one.model}: {_brief(quality)} against {across}"
    figure.suptitle(title, x=0.015, ha="left", fontsize=11, weight="bold")
    told = "steps" if frontier else entropy and _brief(entropy)
    fixed = "" if one.setting else _settings(one.about, list(_SETTINGS), absent="")
    made = f"{one.about['samples']} samples of {one.about['length']} tokens"
    notes = filter(None, [f"at the points: {told}" if told else "", fixed, made])
    soft = ax.spines["left"].get_edgecolor()
    ax.set_title(" · ".join(notes), loc="left", fontsize=8.5, color=soft)
    unit = f", {quality.unit}" if quality.unit else ""
    ax.set_ylabel(f"{_brief(quality)}{unit} ({one.about['better']} is better)")
    ax.margins(0.1, 0.12)
    if frontier:
        ax.set_xlabel(f"{across}, {entropy.unit}" if entropy and entropy.unit else across)
        ax.xaxis.set_major_locator(mpl.ticker.MaxNLocator(6))
        return figure, ax
    nfe = [c.about["nfe"] for c in cells]
    ax.set_xlabel("NFE: passes of the network")
    ax.set_xscale("log", base=2)
    ax.set_xlim(min(nfe) / 1.55, max(nfe) * 1.6)
    ax.xaxis.set_major_locator(mpl.ticker.LogLocator(base=2))
    ax.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    return figure, ax


def _line(ax: Any, line: Sequence[Cell], style: dict[str, Any], frontier: bool) -> Any:
    """A sampler's points in the order of steps, with errors; its last one is returned."""
    x, y = [_x(c, frontier) for c in line], [c.quality.value for c in line]
    errors = {"yerr": [c.quality.error or 0.0 for c in line]}
    if frontier:
        errors["xerr"] = [(c.entropy and c.entropy.error) or 0.0 for c in line]
    edge = {"mec": ax.get_facecolor(), "mew": 0.8, "ms": 6, "lw": 1.6}
    drawn = ax.errorbar(x, y, **errors, **style, **edge, elinewidth=1, capsize=2, capthick=1)
    for bar in (*drawn[1], *drawn[2]):
        bar.set_alpha(0.55)
    return y[-1], style


def _mark_real(ax: Any, one: Cell, frontier: bool) -> None:
    """Real data as a dashed line; in the frontier as a star."""
    quality, entropy = one.real(one.quality), one.real(one.entropy)
    if quality is None or (frontier and entropy is None):
        return
    ink, words = ax.xaxis.label.get_color(), {"textcoords": "offset points", "fontsize": 8.5}
    if frontier:
        ax.plot(entropy, quality, marker="*", ms=13, color=ink, mec=ax.get_facecolor())
        ax.annotate("real data", (entropy, quality), (0, 9), ha="center", **words)
        return
    ax.axhline(quality, color=ink, lw=1, ls=(0, (5, 4)), zorder=1)
    known = "" if entropy is None else f", entropy {short(entropy)}"
    place = {"xycoords": ax.get_yaxis_transform(), **words}
    ax.annotate(f"real data {short(quality)}{known}", (0.01, quality), (0, 3), **place)


def _name_lines(figure: Any, ax: Any, names: Sequence[str], ends: Sequence[Any]) -> None:
    """The samplers' names at the right, each as near as can be to where its line ends."""
    texts = [
        ax.annotate(
            name,
            (1, y),
            (18, 0),
            xycoords=ax.get_yaxis_transform(),
            textcoords="offset points",
            va="center",
            color=style["color"],
        )
        for name, (y, style) in zip(names, ends, strict=True)
    ]
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what follows must not move what it is placed by
    order = sorted(range(len(ends)), key=lambda i: ends[i][0])
    wanted = [ax.transAxes.inverted().transform(texts[i].get_window_extent()) for i in order]
    middles = [float(box[:, 1].mean()) for box in wanted]
    dot = figure.dpi / 72
    for i, y in zip(order, spread(middles, 13 * dot / ax.bbox.height), strict=True):
        texts[i].xycoords, texts[i].xy = ax.transAxes, (1, y)
        key = [1 + k * dot / ax.bbox.width for k in (2, 8, 14)]
        look = {"markevery": [1], "ms": 5.5, "lw": 1.4, "clip_on": False}
        ax.plot(key, [y] * 3, transform=ax.transAxes, **ends[i][1], **look)


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


_SIDES = np.array([(1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 1), (-1, -1), (-1, 0)])


def _label(ax: Any, cells: Sequence[Cell], styles: Mapping[str, Any], frontier: bool) -> None:
    """Steps or entropy at each point, where it hides least; left out where there is no room."""
    effects, paper, dot = _matplotlib().patheffects, ax.get_facecolor(), ax.figure.dpi / 72
    look = {"fontsize": 8, "ha": "center", "va": "center", "zorder": 5}
    look["path_effects"] = [effects.withStroke(linewidth=2.2, foreground=paper)]
    drawn, labels = _occupied(ax, cells, frontier, 2.5 * dot), np.empty((0, 4))
    for cell in sorted(cells, key=lambda c: -c.steps):
        word = str(cell.steps) if frontier else short(_key(cell.entropy))
        spot, size = (_x(cell, frontier), cell.quality.value), np.array([4.9 * len(word), 8.0])
        far = (size / 2 + 5) * _SIDES
        place = ax.transData.transform(spot) + far * dot
        boxes = np.hstack([place - size * dot / 2, place + size * dot / 2])
        costs = [_shared(b, drawn) + 4 * _shared(b, labels) + 9 * _lost(b, ax) for b in boxes]
        side = int(np.argmin(costs))
        if cell.entropy is None or costs[side] > 1.5 * (size * dot).prod():
            continue
        labels = np.vstack([labels, boxes[side]])
        colour = styles[cell.name]["color"]
        ax.annotate(word, spot, far[side], textcoords="offset points", color=colour, **look)


def _occupied(ax: Any, cells: Sequence[Cell], frontier: bool, half: float) -> np.ndarray:
    """Boxes (N, 4) along lines and error bars, in pixels."""
    ways = []
    for line in _grouped(cells, lambda cell: cell.name).values():
        spots = [np.array([_x(c, frontier), c.quality.value]) for c in line]
        ways += list(pairwise(spots))
        for cell, spot in zip(line, spots, strict=True):
            wide = cell.entropy.error or 0.0 if frontier and cell.entropy else 0.0
            for bar in ((0.0, cell.quality.error or 0.0), (wide, 0.0)):
                ways.append((spot - bar, spot + bar))
    pixels = [ax.transData.transform(way) for way in ways]
    along = np.concatenate([a + (b - a) * np.linspace(0, 1, 25)[:, None] for a, b in pixels])
    return np.hstack([along - half, along + half])


def _shared(box: np.ndarray, others: np.ndarray) -> float:
    """The area that a box has in common with others."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    return float(np.clip(high - low, 0, None).prod(1).sum())


def _lost(box: np.ndarray, ax: Any) -> float:
    """The area of a box outside the axes."""
    return float((box[2:] - box[:2]).prod()) - _shared(box, ax.bbox.extents[None])


# --- report ---


def write_report(records: Records, folder: Path, tolerance: float = TOLERANCE) -> Path:
    """The figures, report.md, and report.html: one page that needs nothing beside it."""
    cells = read(records)
    light, dark = (_pictures(cells, theme) for theme in (LIGHT, DARK))
    data = json.dumps(_page(cells, light, dark, tolerance), allow_nan=False)
    data = data.replace("<", "\\u003c")  # no text can end the script element, or open one
    template = resources("psidiff.cli").joinpath("report.html").read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for picture in light:
        (folder / picture.name).write_bytes(picture.png)
    document = _document(records, cells, light, tolerance)
    (folder / "report.md").write_text(document, encoding="utf-8")
    path = folder / "report.html"
    path.write_text(template.replace("__DATA__", data), encoding="utf-8")
    return path


def _held(tolerance: float) -> str:
    return (
        f"The best rule of those whose entropy is within {100 * tolerance:g}% of ancestral "
        "sampling's at the same steps: what scores well because it varies less does not count."
    )


def _title(cells: Sequence[Cell]) -> str:
    names = dict.fromkeys(cell.kappa for cell in cells)
    what = "one sampler" if len(names) == 1 else f"{len(names)} samplers compared"
    return f"{_listed(list(_by_model(cells)))}: {what}"


def _document(
    records: Records, cells: Sequence[Cell], pictures: Sequence[Picture], tolerance: float
) -> str:
    told = [f"**{model}.** {_summary(ours)}" for model, ours in _by_model(cells).items()]
    advice = "\n".join(f"- {sentence}" for sentence in recommend(records, tolerance))
    notes = [*_measured(cells), *_circumstances(cells)]
    images = "\n".join(f"![{p.alt}]({p.name})" for p in pictures)
    measured = "\n".join(f"- {name}: {words}" for name, words in notes)
    parts = [f"# {_title(cells)}", *told, "## With the entropy held", _held(tolerance), advice]
    parts += ["## Figures", images, "## Cells", markdown(records)]
    return "\n\n".join([*parts, "## How this was measured", measured]) + "\n"


def _page(
    cells: Sequence[Cell],
    light: Sequence[Picture],
    dark: Sequence[Picture],
    tolerance: float,
) -> dict[str, Any]:
    """What the page knows."""
    number, best = {cell: i for i, cell in enumerate(cells)}, _best(cells)
    shown = [_figure(*pair, number) for pair in zip(light, dark, strict=True)]
    parts = [
        {
            "model": model,
            "summary": _summary(ours),
            "figures": [f for f in shown if cells[f["points"][0][0]].model == model],
            "advice": recommend([cell.about for cell in ours], tolerance),
            "head": _head(ours, others := _others(ours))[1:],
            "rows": [_table_row(c, others, number[c], c in best) for c in ours],
        }
        for model, ours in _by_model(cells).items()
    ]
    return {
        "title": _title(cells),
        "held": _held(tolerance),
        "parts": parts,
        "cells": [_details(cell, cells) for cell in cells],
        "measured": [*_measured(cells), *_circumstances(cells)],
    }


def _figure(light: Picture, dark: Picture, number: Mapping[Cell, int]) -> dict[str, Any]:
    points = [[number[cell], round(x, 5), round(y, 5)] for cell, x, y in light.points]
    pair = [base64.b64encode(p.png).decode("ascii") for p in (light, dark)]
    return {"alt": light.alt, "png": pair, "points": points}


def _others(cells: Sequence[Cell]) -> list[str]:
    names = dict.fromkeys(name for cell in cells for name in cell.measures)
    apart = {cells[0].about["quality"], cells[0].about.get("entropy")}
    return [name for name in names if name not in apart]


def _table_row(cell: Cell, others: Sequence[str], number: int, best: bool) -> dict[str, Any]:
    values = _row(cell, others)[1:]
    words, keys = [_shown(v) for v in values], [_key(v) for v in values]
    return {"cell": number, "best": best, "words": words, "keys": keys}


def _details(cell: Cell, cells: Sequence[Cell]) -> dict[str, Any]:
    about, ours = cell.about, _by_model(cells)[cell.model]
    costs = {
        "passes": _nfe(cell),
        "tokens a pass": about["tokens_per_pass"],
        "rows of the head a token": about.get("head_rows_per_token"),
        "s": about["seconds"],
        "MiB": about.get("peak_memory_mib"),
    }
    brief = f"{cell.steps} steps, {cell.name}: {_brief(cell.quality)} {_value(cell.quality)}"
    measures = [
        {"name": m.name, "value": f"{_value(m)} {m.unit}", "how": _protocol([m.protocol])}
        for m in cell.measures.values()
    ]
    return {
        "name": f"{cell.model}: {about['sampler']}",
        "brief": brief + (f", entropy {short(cell.entropy.value)}" if cell.entropy else ""),
        "colours": [_style(cell, ours, theme)["color"] for theme in (LIGHT, DARK)],
        "facts": " · ".join(f"{short(v)} {unit}" for unit, v in costs.items() if v is not None),
        "samples": about["samples"],
        "kind": about["kind"],
        "shown": list(about.get("shown") or []),
        "measures": measures,
    }


def _measured(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """The protocol of each measure of each model, in words."""
    found, models = [], _by_model(cells)
    for model, ours in models.items():
        of = f" of {model}" if len(models) > 1 else ""
        for name in dict.fromkeys(name for cell in ours for name in cell.measures):
            alike = [cell.measures[name] for cell in ours if name in cell.measures]
            reals = [r for cell in ours if (r := cell.real(alike[0])) is not None]
            words = [
                f"in {alike[0].unit}" if alike[0].unit else "",
                _protocol([measure.protocol for measure in alike]),
                f"{short(reals[0])} on real data" if reals else "",
            ]
            found.append((name + of, "; ".join(filter(None, words)) or "no protocol was noted"))
    return found


def _circumstances(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """What all the numbers share, in words."""
    about = [cell.about for cell in cells]
    made = [f"{m}: {_made(ours)}" for m, ours in _by_model(cells).items()]
    first, last = (pick(a["time"] for a in about)[:16].replace("T", " ") for pick in (min, max))
    versions = [f"{part} {_between([a[part] for a in about])}" for part in ("psidiff", "torch")]
    return [
        ("a cell", "; ".join(made)),
        ("±", _ERRORS),
        ("costs", _COSTS),
        ("versions", ", ".join(versions)),
        ("machine", "; ".join(dict.fromkeys(f"{a['device']}, {a['machine']}" for a in about))),
        ("time", first if first == last else f"{first} to {last}"),
    ]


_ERRORS = (
    f"one standard error; a difference counts from {SETTLED} of its own standard errors on, "
    "the cells taken for independent"
)
_COSTS = (
    "NFE counts passes of the network for a sample, tokens a pass are the length over NFE, "
    "seconds are for all samples of a cell, MiB is the peak of memory"
)

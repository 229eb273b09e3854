"""The figures of a model: quality against NFE, and against entropy; and of all models."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .formatting import join_words, short, short_models, short_name
from .labels import label, name_lines, reach
from .plot_style import Theme, axes, joint_style, look, matplotlib, style_of, x_of
from .results import SETTINGS, Cell, by_model, finite, grouped, settings_of, varied_settings


class Picture(NamedTuple):
    """A figure of a model, and where in it (from the left, from the top) each cell is."""

    name: str
    alt: str
    png: bytes
    points: list[tuple[Cell, float, float]]


def draw(cells: Sequence[Cell], theme: Theme) -> list[Picture]:
    """quality-MODEL.png and, where there is an entropy, frontier-MODEL.png of each model."""
    found = []
    with matplotlib().rc_context(look(theme)):
        for ours in by_model(cells).values():
            styles = {cell.name: style_of(cell, ours, theme) for cell in ours}
            for frontier in (False, True):
                seen = [c for c in ours if None not in (x_of(c, frontier), finite(c.quality))]
                if seen:
                    seen.sort(key=lambda c: (not c.ancestral, *c.place[2:], c.steps))
                    found.append(_picture(seen, styles, frontier))
    return found


def _picture(cells: Sequence[Cell], styles: Mapping[str, Any], frontier: bool) -> Picture:
    """Quality against NFE, the entropy at each point; or against entropy, the steps there.

    With one number of steps top-p and temperature are there, and the lines join them.
    """
    one_number = frontier and len({cell.steps for cell in cells}) == 1
    varied = varied_settings([cell.about for cell in cells]) if one_number else []
    lines = grouped(cells, lambda cell: cell.kappa if varied else cell.name)
    told, words = _written(cells, frontier, varied)
    solid = {"ls": "-"} if varied else {}
    looks = {name: styles[line[0].name] | solid for name, line in lines.items()}
    figure, ax = axes(cells, len(lines), frontier, told)
    _mark_real(ax, cells[0], frontier)
    png, spots = _render(figure, ax, lines, looks, words, frontier)
    kind, against = ("frontier", "entropy") if frontier else ("quality", "NFE")
    name = f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '-', cells[0].model)}.png"
    alt = f"{cells[0].quality.name} of {cells[0].model} against {against}, a line a sampler"
    return Picture(name, alt, png, spots)


def draw_together(cells: Sequence[Cell], theme: Theme, chosen: bool = False) -> list[Picture]:
    """quality-all.png: quality against NFE on one pair of axes, a line a model and rule.

    One picture for each quality that models have in common; none where each has its own. A
    colour for each model, dashes for ancestral sampling. chosen: also of one model alone.
    """
    found: list[Picture] = []
    alike = grouped([c for c in cells if finite(c.quality) is not None], _judged_by)
    with matplotlib().rc_context(look(theme)):
        for ours in alike.values():
            if chosen or len(by_model(ours)) > 1:
                number = len(found) + 1
                name = f"quality-all{'' if number == 1 else f'-{number}'}.png"
                found.append(_joint(ours, theme, name))
    return found


def _judged_by(cell: Cell) -> tuple[Any, ...]:
    """What cells have in common whose qualities compare: in a protocol, words say how."""
    words = {k: v for k, v in cell.quality.protocol.items() if isinstance(v, str)}
    by = (cell.quality.name, cell.quality.unit, cell.about["kind"], cell.about["better"])
    return (*by, *sorted(words.items()))


def _joint(cells: Sequence[Cell], theme: Theme, name: str) -> Picture:
    """Of the cells of several models, whose qualities compare."""
    models = list(by_model(cells))
    names = dict(zip(models, short_models(models), strict=True))
    varied = varied_settings([cell.about for cell in cells])

    def named(cell: Cell) -> str:
        settings = settings_of(cell.about, varied, "no ")
        return ", ".join(filter(None, [f"{names[cell.model]} {cell.kappa}", settings]))

    lines = grouped(sorted(cells, key=lambda cell: cell.steps), named)
    rules = list(dict.fromkeys(c.kappa for c in cells if not c.ancestral))
    looks = {
        name: joint_style(models.index(line[0].model), line[0], rules, theme)
        for name, line in lines.items()
    }
    told, words = _written(cells, False, [])
    title = f"{short_name(cells[0].quality)} against NFE"
    figure, ax = axes(cells, len(lines), False, told, title, 7.4)
    known = {(c.real(c.quality), c.real(c.entropy)) for c in cells}
    if len(known) == 1:  # of models with unlike codecs the same text has two values
        _mark_real(ax, cells[0], False)
    png, spots = _render(figure, ax, lines, looks, words, False)
    alt = f"{cells[0].quality.name} of {join_words(models)} against NFE, a line a sampler"
    return Picture(name, alt, png, spots)


def _render(
    figure: Any,
    ax: Any,
    lines: Mapping[str, Sequence[Cell]],
    looks: Mapping[str, Any],
    words: Mapping[Cell, str],
    frontier: bool,
) -> tuple[bytes, list[tuple[Cell, float, float]]]:
    """The lines with their names and words on axes, as PNG; and where each cell is in it."""
    ends = [_line(ax, line, looks[name], frontier) for name, line in lines.items()]
    name_lines(figure, ax, list(lines), ends)
    colours = {c: looks[name]["color"] for name, line in lines.items() for c in line}
    label(ax, list(lines.values()), words, colours, frontier)
    cells = [cell for line in lines.values() for cell in line]
    places = ax.transData.transform([(x_of(c, frontier), c.quality.value) for c in cells])
    width, height = figure.canvas.get_width_height()
    file = io.BytesIO()
    figure.savefig(file, format="png")
    spots = [(c, x / width, 1 - y / height) for c, (x, y) in zip(cells, places, strict=True)]
    return file.getvalue(), spots


def _written(
    cells: Sequence[Cell], frontier: bool, varied: Sequence[str]
) -> tuple[str, dict[Cell, str]]:
    """What is written at the points: its name, and the words at each."""
    if varied:
        name = f"{' and '.join(SETTINGS[which] for which in varied)}, {cells[0].at}"
        given = {cell: [cell.about["cell"].get(which) for which in varied] for cell in cells}
        words = {c: ["none" if v is None else f"{v:g}" for v in vs] for c, vs in given.items()}
        return name, {cell: ", ".join(each) for cell, each in words.items()}
    if frontier:
        return "steps", {cell: str(cell.steps) for cell in cells}
    entropy = cells[0].entropy
    entropies = {cell: short(finite(cell.entropy)) for cell in cells}
    return short_name(entropy) if entropy else "", entropies


def _line(ax: Any, line: Sequence[Cell], style: dict[str, Any], frontier: bool) -> Any:
    """A sampler's points in order, with errors; the last one's height and style."""
    x, y = [x_of(c, frontier) for c in line], [c.quality.value for c in line]
    errors = {"yerr": np.transpose([reach(c.quality) for c in line])}
    if frontier:
        errors["xerr"] = np.transpose([reach(c.entropy) for c in line])
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

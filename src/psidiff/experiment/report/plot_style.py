"""How a figure looks before anything is drawn in it: colours, styles and axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...registry import optional_module
from .formatting import pluralize, short_name
from .results import Cell, finite, is_ancestral


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


def matplotlib() -> Any:
    needs = "the figures need matplotlib: pip install 'psidiff[compare]'"
    for part in ("figure", "ticker", "patheffects", "backends.backend_agg"):
        optional_module(f"matplotlib.{part}", needs)
    return optional_module("matplotlib", needs)


def look(theme: Theme) -> dict[str, Any]:
    inks = dict.fromkeys(["text.color", "axes.labelcolor"], theme.ink)
    softs = dict.fromkeys(["axes.edgecolor", "xtick.color", "ytick.color"], theme.soft)
    papers = dict.fromkeys(
        ["figure.facecolor", "savefig.facecolor", "axes.facecolor"], theme.paper
    )
    grid = {"axes.grid": True, "grid.color": theme.line, "axes.axisbelow": True}
    open_box = {"axes.spines.top": False, "axes.spines.right": False}
    words = {"font.size": 9.5, "text.parse_math": False}
    return {**inks, **softs, **papers, **grid, **open_box, **words}


def x_of(cell: Cell, frontier: bool) -> float | None:
    return finite(cell.entropy) if frontier else float(cell.about["nfe"])


def style_of(cell: Cell, cells: Sequence[Cell], theme: Theme) -> dict[str, Any]:
    """A colour and a marker for its rule, ancestral grey; dashes for its setting."""
    rules = [rule for rule in dict.fromkeys(c.kappa for c in cells) if not is_ancestral(rule)]
    settings = list(dict.fromkeys(c.setting for c in cells))
    i = -1 if cell.ancestral else rules.index(cell.kappa)
    return {
        "color": theme.soft if i < 0 else theme.samplers[i % len(theme.samplers)],
        "marker": _MARKS[(i + 1) % len(_MARKS)],
        "ls": _DASHES[settings.index(cell.setting) % len(_DASHES)],
    }


def joint_style(model: int, cell: Cell, rules: Sequence[str], theme: Theme) -> dict[str, Any]:
    """A colour for its model, a marker for its rule, dashes for ancestral sampling."""
    return {
        "color": theme.samplers[model % len(theme.samplers)],
        "marker": _MARKS[0 if cell.ancestral else (rules.index(cell.kappa) + 1) % len(_MARKS)],
        "ls": _DASHES[cell.ancestral],
    }


def axes(
    cells: Sequence[Cell],
    lines: int,
    frontier: bool,
    told: str,
    title: str | None = None,
    width: float = 5.4,
) -> tuple[Any, Any]:
    """Empty axes with their words; higher where many lines are to come.

    told: what is written at the points; title: other words than those of one model.
    """
    mpl, one = matplotlib(), cells[0]
    height = 3.9 + 0.3 * max(0, lines - 5)
    figure = mpl.figure.Figure(figsize=(width, height), dpi=220, layout="constrained")
    mpl.backends.backend_agg.FigureCanvasAgg(figure)
    ax, quality, entropy = figure.subplots(), one.quality, one.entropy
    across = short_name(entropy) if frontier and entropy else "NFE"
    usual = f"{one.model}: {short_name(quality)} against {across}"
    figure.suptitle(title or usual, x=0.015, ha="left", fontsize=11, weight="bold")
    fixed = "" if one.setting else one.settings
    samples, length = one.about["samples"], one.about["length"]
    made = f"{pluralize(samples, 'sample')} of {pluralize(length, 'token')}"
    notes = filter(None, [f"at the points: {told}" if told else "", fixed, made])
    soft = ax.spines["left"].get_edgecolor()
    ax.set_title(" · ".join(notes), loc="left", fontsize=8.5, color=soft)
    unit = f", {quality.unit}" if quality.unit else ""
    ax.set_ylabel(f"{short_name(quality)}{unit} ({one.about['better']} is better)")
    ax.margins(0.1, 0.12)
    values = [c.quality.value for c in cells]
    if quality.name.endswith("perplexity") and max(values) > 3 * min(values) > 0:
        ax.set_yscale("log")  # so that equal differences in nats are equally high
        ax.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(mpl.ticker.NullLocator())
    if frontier:
        ax.set_xlabel(f"{across}, {entropy.unit}" if entropy and entropy.unit else across)
        ax.xaxis.set_major_locator(mpl.ticker.MaxNLocator(6))
        return figure, ax
    nfe = [c.about["nfe"] for c in cells]
    ax.set_xlabel("NFE: passes of the network")
    ax.set_xscale("log", base=2)
    ax.set_xlim(min(nfe) / 1.55, max(nfe) * 1.6)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    return figure, ax

"""Words in a figure: names of lines at their ends, words at points where they hide least."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...evaluation.metric_result import MetricResult
from .plot_style import matplotlib, x_of
from .results import Cell, finite


def name_lines(figure: Any, ax: Any, names: Sequence[str], ends: Sequence[Any]) -> None:
    """The samplers' names at the right, each as near as can be to where its line ends."""
    place = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points"}
    texts = [
        ax.annotate(name, (1, y), (18, 0), va="center", color=style["color"], **place)
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


def label(
    ax: Any,
    lines: Sequence[Sequence[Cell]],
    words: Mapping[Cell, str],
    colours: Mapping[Cell, Any],
    frontier: bool,
) -> None:
    """Words at each point, where they hide least; left out where there is no room."""
    effects, paper, dot = matplotlib().patheffects, ax.get_facecolor(), ax.figure.dpi / 72
    look = {"fontsize": 8, "ha": "center", "va": "center", "zorder": 5}
    look["path_effects"] = [effects.withStroke(linewidth=2.2, foreground=paper)]
    drawn, labels = _occupied(ax, lines, frontier, 2.5 * dot), np.empty((0, 4))
    for cell, word in sorted(words.items(), key=lambda each: -each[0].steps):
        spot = (x_of(cell, frontier), cell.quality.value)
        size = np.array([4.9 * len(word), 8.0])
        far = (size / 2 + 5) * _SIDES
        place = ax.transData.transform(spot) + far * dot
        boxes = np.hstack([place - size * dot / 2, place + size * dot / 2])
        costs = [_shared(b, drawn) + 4 * _shared(b, labels) + 9 * _lost(b, ax) for b in boxes]
        side = int(np.argmin(costs))
        if cell.entropy is None or costs[side] > 1.5 * (size * dot).prod():
            continue
        labels = np.vstack([labels, boxes[side]])
        look["color"] = colours[cell]
        ax.annotate(word, spot, far[side], textcoords="offset points", **look)


def _occupied(
    ax: Any, lines: Sequence[Sequence[Cell]], frontier: bool, half: float
) -> np.ndarray:
    """Boxes (N, 4) along lines and error bars, in pixels."""
    ways = []
    for line in lines:
        spots = [np.array([x_of(c, frontier), c.quality.value]) for c in line]
        ways += list(pairwise(spots))
        for cell, spot in zip(line, spots, strict=True):
            tall, wide = reach(cell.quality), reach(cell.entropy if frontier else None)
            for bars, way in ((tall, (0, 1)), (wide, (1, 0))):
                ways.append((spot - bars[0] * np.array(way), spot + bars[1] * np.array(way)))
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


def reach(measure: MetricResult | None) -> tuple[float, float]:
    """One standard error below and above, no further than the interval that it comes with."""
    error = (measure and finite(measure.stderr)) or 0.0
    low, high = (measure and measure.protocol.get("interval")) or (-math.inf, math.inf)
    value = measure.value if measure else 0.0
    return min(error, max(value - low, 0.0)), min(error, max(high - value, 0.0))

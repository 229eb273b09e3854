"""Share solved against steps, with intervals, as a drawing that a page holds in itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ...experiment.report.figures import spread
from .puzzles import Runs, name_of

_WIDTH, _HEIGHT = 388, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 300, 16, 226  # of the axes
_GAP = 16.0  # between the names of two lines, at least
_APART = 2.5  # how far each line is moved aside, so that bars do not hide one another


def curve(runs: Sequence[Runs]) -> str:
    """An SVG; colours come from the classes of the page."""
    samplers = list(dict.fromkeys(each.sampler for each in runs))
    steps = sorted({each.steps for each in runs})
    lines = [[each for each in runs if each.sampler == name] for name in samplers]
    ends = [_down(line[-1].hits / len(line[-1].solved)) for line in lines]
    order = sorted(range(len(lines)), key=lambda i: ends[i])
    heights = dict(zip(order, spread([ends[i] for i in order], _GAP), strict=True))
    parts = _axes(steps)
    for i, line in enumerate(lines):
        aside = _APART * (2 * i - len(lines) + 1)
        parts.append(_line(line, [_across(n, steps) + aside for n in steps], i, heights[i]))
    alt = escape("Share of the puzzles solved against steps, one line for each sampler")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{alt}">'
        + "".join(parts)
        + "</svg>"
    )


def _axes(steps: Sequence[int]) -> list[str]:
    parts = []
    for percent in range(0, 101, 25):
        y = _down(percent / 100)
        parts.append(f'<path class="rule" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" class="end">{percent}%</text>')
    for n in steps:
        x = _across(n, steps)
        parts.append(f'<text x="{x:.1f}" y="{_BOTTOM + 20}" class="middle">{n}</text>')
    middle = (_LEFT + _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_BOTTOM + 40}" class="middle">steps</text>')
    return parts


def _line(line: Sequence[Runs], xs: Sequence[float], number: int, height: float) -> str:
    """Points joined, their 95% intervals, and the name where the line ends."""
    ys = [_down(each.hits / len(each.solved)) for each in line]
    bars = "".join(
        f'<path class="interval" d="M{x:.1f} {_down(low):.1f}V{_down(high):.1f}"/>'
        for x, (low, high) in zip(xs, (each.interval for each in line), strict=True)
    )
    points = list(zip(xs, ys, strict=True))
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points)
    name = f'<text class="name" x="{_RIGHT + 14}" y="{height + 4:.1f}">'
    name += f"{escape(name_of(line[0].sampler))}</text>"
    return f'<g class="line s{number}">{bars}<path d="M{way}"/>{dots}{name}</g>'


def _across(n: int, steps: Sequence[int]) -> float:
    low, high = math.log2(steps[0]), math.log2(steps[-1])
    part = (math.log2(n) - low) / (high - low) if high > low else 0.5
    return _LEFT + 16 + part * (_RIGHT - _LEFT - 32)


def _down(share: float) -> float:
    return _BOTTOM - share * (_BOTTOM - _TOP)

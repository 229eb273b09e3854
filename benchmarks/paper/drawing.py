"""A figure of the paper: axes in our colours, and a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from psidiff.experiment.report.plot_style import LIGHT, look, matplotlib

COLOURS = LIGHT.samplers


def panels(
    rows: int, columns: int, titles: Sequence[str], size: tuple[float, float] = (3.1, 2.5)
) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row, with a title each."""
    mpl = matplotlib()
    with mpl.rc_context(look(LIGHT)):
        shape = (size[0] * columns, size[1] * rows)
        figure = mpl.figure.Figure(figsize=shape, dpi=160, layout="constrained")
        mpl.backends.backend_agg.FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, loc="left", fontsize=9)
    return figure, axes


def keep(figure: Any, numbers: Sequence[dict[str, Any]], out: Path, name: str) -> None:
    """NAME.png and NAME.jsonl in a folder; the numbers are printed, too."""
    out.mkdir(parents=True, exist_ok=True)
    if figure is not None:
        figure.savefig(out / f"{name}.png")
    lines = "".join(json.dumps(each) + "\n" for each in numbers)
    (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    print(lines, end="")
    print(f"kept in {out / name}.*")

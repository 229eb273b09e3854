"""The cells of a comparison as a table, a row a cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...evaluation.metric_result import MetricResult
from .formatting import short, short_name, stated
from .results import Cell, Records, best_of, read, settings_of


def table(records: Records, bold: str = "{}", brief: bool = False) -> list[list[str]]:
    """A head, then a row a cell; `bold` is how the best of a number of steps is written.

    A brief one leaves out the measures beside quality and entropy.
    """
    cells = read(records)
    head, best = head_of(cells, brief), best_of(cells)
    rows = [[shown(value) for value in row_of(cell, brief)] for cell in cells]
    for cell, row in zip(cells, rows, strict=True):
        if head[_QUALITY] == "quality":  # which one, the row must say
            row[_QUALITY] = f"{short_name(cell.quality)} {row[_QUALITY]}"
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


def head_of(cells: Sequence[Cell], brief: bool) -> list[str]:
    qualities = {f"{short_name(c.quality)} ({c.about['better']} is better)" for c in cells}
    entropies = {c.entropy.name for c in cells if c.entropy}
    quality = qualities.pop() if len(qualities) == 1 else "quality"
    entropy = entropies.pop() if len(entropies) == 1 else "entropy"
    others = [] if brief else ["other measures"]
    costs = ["NFE", "tokens a pass", "seconds", "MiB"]
    return ["model", "steps", "sampler", quality, entropy, *others, *costs]


def row_of(cell: Cell, brief: bool) -> list[Any]:
    """Its values; the other measures in one text."""
    about, apart = cell.about, (cell.quality, cell.entropy)
    rest = ", ".join(f"{m.name} {stated(m)}" for m in cell.measures.values() if m not in apart)
    settings = settings_of(about)
    sampler = ", ".join(filter(None, [cell.kappa, settings]))
    others = [] if brief else [rest]
    costs = [about.get(k) for k in ("tokens_per_pass", "seconds", "peak_memory_mib")]
    return [cell.model, cell.steps, sampler, *apart, *others, nfe_of(cell), *costs]


def nfe_of(cell: Cell) -> float | int:
    nfe = cell.about["nfe"]
    return int(nfe) if nfe == int(nfe) else nfe


def shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return stated(value) if isinstance(value, MetricResult) else short(value)

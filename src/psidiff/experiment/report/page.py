"""A report of a comparison: the table of its cells, one page, and the same in Markdown."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...evaluation.metric_result import MetricResult
from ...files import write_atomic
from ...html import fill_page
from .conclusions import how_made, recommend, summary
from .figures import Picture, draw, draw_together
from .formatting import between, format_metric, join_words, protocol, short, short_name
from .plot_style import DARK, LIGHT, style_of
from .results import SETTLED, TOLERANCE, Cell, Records, best_of, by_model, finite, read
from .rows import NLL, PERPLEXITY, Choice, choose, drawn_of, paper_table, paper_title


def write_report(
    records: Records,
    folder: Path,
    tolerance: float = TOLERANCE,
    chosen: bool = False,
) -> Path:
    """The figures, report.md, and report.html: one page that needs nothing beside it.

    chosen: rows are chosen as the paper does, for a table; only these are in the figure of all
    models.
    """
    cells = read(records)
    choices = choose(cells) if chosen else None
    drawn = cells if choices is None else drawn_of(cells, choices)
    light, dark = (draw(cells, theme) for theme in (LIGHT, DARK))
    pair = [draw_together(drawn, theme, chosen) for theme in (LIGHT, DARK)]
    page = _page(cells, light, dark, tolerance) | _together(cells, pair, choices)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [*pair[0], *light]
    for picture in pictures:
        write_atomic(folder / picture.name, picture.png)
    document = _document(page, markdown(records), recommend(records, tolerance), pictures)
    write_atomic(folder / "report.md", document.encode("utf-8", "backslashreplace"))
    path = folder / "report.html"
    fill_page(path, __package__, "report.html", page)
    return path


def table(records: Records, bold: str = "{}", brief: bool = False) -> list[list[str]]:
    """A head, then a row a cell; `bold` is how the best of a number of steps is written.

    A brief one leaves out the measures beside quality and entropy.
    """
    cells = read(records)
    head, best = _head_of(cells, brief), best_of(cells)
    paired = any(map(_also_of, cells))
    rows = [[_shown(value) for value in _row_of(cell, brief, paired)] for cell in cells]
    for cell, row in zip(cells, rows, strict=True):
        if head[_QUALITY] == "quality":  # which one, the row must say
            row[_QUALITY] = f"{short_name(cell.quality)} {row[_QUALITY]}"
        if cell in best:
            row[_QUALITY] = bold.format(row[_QUALITY])
    return [head, *rows]


_QUALITY = 3  # its column


def markdown(records: Records) -> str:
    """The table in Markdown, the best in bold."""
    head, *rows = table(records, "**{}**")
    words = ("model", "sampler", "other measures")
    return _as_table([head, ["---" if word in words else "--:" for word in head], *rows])


def _as_table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown of a head, a rule and lines."""
    shown = ([word.replace("|", "\\|").replace("\n", " ") for word in row] for row in rows)
    return "\n".join("| " + " | ".join(row) + " |" for row in shown)


def _head_of(cells: Sequence[Cell], brief: bool) -> list[str]:
    qualities = {f"{short_name(c.quality)} ({c.about['better']} is better)" for c in cells}
    entropies = {c.entropy.name for c in cells if c.entropy}
    quality = qualities.pop() if len(qualities) == 1 else "quality"
    entropy = entropies.pop() if len(entropies) == 1 else "entropy"
    others = [] if brief else ["other measures"]
    costs = ["NFE", "tokens a pass", "seconds", "MiB"]
    also = [_ALSO[c.quality.name] for c in cells if _also_of(c)][:1]
    return ["model", "steps", "sampler", quality, *also, entropy, *others, *costs]


_ALSO = {NLL: PERPLEXITY, PERPLEXITY: NLL}  # one beside the other


def _also_of(cell: Cell) -> MetricResult | None:
    return cell.measures.get(_ALSO.get(cell.quality.name, ""))


def _row_of(cell: Cell, brief: bool, paired: bool) -> list[Any]:
    """Its values, the perplexity beside an NLL if paired; the other measures in one text."""
    also = [_also_of(cell)] if paired else []
    about, apart = cell.about, (cell.quality, *also, cell.entropy)
    rest = ", ".join(
        f"{m.name} {format_metric(m)}" for m in cell.measures.values() if m not in apart
    )
    sampler = ", ".join(filter(None, [cell.kappa, cell.settings]))
    others = [] if brief else [rest]
    costs = [about.get(k) for k in ("tokens_per_pass", "seconds", "peak_memory_mib")]
    return [cell.model, cell.steps, sampler, *apart, *others, _nfe_of(cell), *costs]


def _nfe_of(cell: Cell) -> float | int:
    nfe = cell.about["nfe"]
    return int(nfe) if nfe == int(nfe) else nfe


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return format_metric(value) if isinstance(value, MetricResult) else short(value)


def _held(tolerance: float) -> str:
    return (
        f"The best rule of those whose entropy is within {100 * tolerance:g}% of ancestral "
        "sampling's at the same steps: what scores well because it varies less does not count. "
        "Where top-p or temperature vary, rules are also held against ancestral sampling of "
        "any setting that has their entropy; the best of many must then be ahead by more."
    )


def _title(cells: Sequence[Cell]) -> str:
    names = dict.fromkeys(cell.kappa for cell in cells)
    what = "one sampler" if len(names) == 1 else f"{len(names)} samplers compared"
    return f"{join_words(list(by_model(cells)))}: {what}"


def _document(
    page: Mapping[str, Any], table: str, advice: Sequence[str], pictures: Sequence[Picture]
) -> str:
    """What the page says, in Markdown."""
    told = [f"**{part['model']}.** {part['summary']}" for part in page["parts"]]
    advised = "\n".join(f"- {sentence}" for sentence in advice)
    images = "\n".join(f"![{p.alt}]({p.name})" for p in pictures)
    measured = "\n".join(f"- {name}: {words}" for name, words in page["measured"])
    parts = [f"# {page['title']}", *told, "## With the entropy held", page["held"], advised]
    parts += [] if page["paper"] is None else _paper_in_markdown(page["paper"])
    parts += ["## Figures", images, "## Cells", table, "## How this was measured", measured]
    return "\n\n".join(parts) + "\n"


def _paper_in_markdown(paper: Mapping[str, Any]) -> list[str]:
    """The rows as in the paper's tables, the chosen in bold, and why they are."""
    marks = ["**" if line["chosen"] else "" for line in paper["lines"]]
    lines = [
        [mark + word + mark for word in line["words"]]
        for mark, line in zip(marks, paper["lines"], strict=True)
    ]
    rule = ["---", "---", *["--:"] * (len(paper["head"]) - 2)]
    why = "\n".join(f"- {sentence}" for sentence in paper["told"])
    return [f"## {paper['title']}", why, _as_table([paper["head"], rule, *lines])]


def _page(
    cells: Sequence[Cell], light: Sequence[Picture], dark: Sequence[Picture], tolerance: float
) -> dict[str, Any]:
    """What the page knows."""
    number, best = {cell: i for i, cell in enumerate(cells)}, best_of(cells)
    drawn = [_figure(*pair, number) for pair in zip(light, dark, strict=True)]
    parts = [
        {
            "model": model,
            "summary": summary(ours),
            "figures": [f for f in drawn if cells[f["points"][0][0]].model == model],
            "advice": recommend([cell.about for cell in ours], tolerance),
            "head": _head_of(ours, brief=True)[1:],
            "rows": [_table_row(c, number[c], c in best, ours) for c in ours],
        }
        for model, ours in by_model(cells).items()
    ]
    return {
        "title": _title(cells),
        "held": _held(tolerance),
        "parts": parts,
        "cells": [_details(cell, cells) for cell in cells],
        "measured": [*_measured(cells), *_circumstances(cells)],
    }


def _together(
    cells: Sequence[Cell], pair: Sequence[Sequence[Picture]], choices: Sequence[Choice] | None
) -> dict[str, Any]:
    """What the page knows of all models together, and of the rows that the paper would draw."""
    number = {cell: i for i, cell in enumerate(cells)}
    figures = [_figure(light, dark, number) for light, dark in zip(*pair, strict=True)]
    if choices is None:
        return {"figures": figures, "paper": None}
    paper = paper_table(cells, choices)
    for line in paper["lines"]:
        line["cells"] = [None if cell is None else number[cell] for cell in line["cells"]]
    told = [choice.told for choice in choices]
    return {"figures": figures, "paper": {"title": paper_title(cells), "told": told, **paper}}


def _figure(light: Picture, dark: Picture, number: Mapping[Cell, int]) -> dict[str, Any]:
    points = [[number[cell], round(x, 5), round(y, 5)] for cell, x, y in light.points]
    pair = [base64.b64encode(p.png).decode("ascii") for p in (light, dark)]
    return {"alt": light.alt, "png": pair, "points": points}


def _table_row(cell: Cell, number: int, best: bool, ours: Sequence[Cell]) -> dict[str, Any]:
    values = _row_of(cell, brief=True, paired=any(map(_also_of, ours)))[1:]
    words, keys = [_shown(v) for v in values], [finite(v) for v in values]
    return {"cell": number, "best": best, "words": words, "keys": keys}


def _details(cell: Cell, cells: Sequence[Cell]) -> dict[str, Any]:
    about, ours = cell.about, by_model(cells)[cell.model]
    costs = {
        "passes": _nfe_of(cell),
        "tokens a pass": about["tokens_per_pass"],
        "rows of the head a token": about.get("head_rows_per_token"),
        "s": about["seconds"],
        "MiB": about.get("peak_memory_mib"),
    }
    quality = f"{short_name(cell.quality)} {format_metric(cell.quality)}"
    brief = f"{cell.at}, {cell.name}: {quality}"
    measures = [
        {"name": m.name, "value": f"{format_metric(m)} {m.unit}", "how": protocol([m.protocol])}
        for m in cell.measures.values()
    ]
    return {
        "name": f"{cell.model}: {about['sampler']}",
        "brief": brief + (f", entropy {short(cell.entropy.value)}" if cell.entropy else ""),
        "colours": [style_of(cell, ours, theme)["color"] for theme in (LIGHT, DARK)],
        "facts": " · ".join(f"{short(v)} {unit}" for unit, v in costs.items() if v is not None),
        "samples": about["samples"],
        "kind": about["kind"],
        "shown": list(about.get("shown") or []),
        "measures": measures,
    }


def _measured(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """The protocol of each measure of each model, in words."""
    found, models = [], by_model(cells)
    for model, ours in models.items():
        of = f" of {model}" if len(models) > 1 else ""
        for name in dict.fromkeys(name for cell in ours for name in cell.measures):
            alike = [cell.measures[name] for cell in ours if name in cell.measures]
            reals = [r for cell in ours if (r := cell.real(alike[0])) is not None]
            words = [
                f"in {alike[0].unit}" if alike[0].unit else "",
                protocol([measure.protocol for measure in alike]),
                f"{short(reals[0])} on real data" if reals else "",
            ]
            found.append((name + of, "; ".join(filter(None, words)) or "no protocol was noted"))
    return found


def _circumstances(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """What all the numbers share, in words."""
    about = [cell.about for cell in cells]
    made = [f"{m}: {how_made(ours)}" for m, ours in by_model(cells).items()]
    first, last = (pick(a["time"] for a in about)[:16].replace("T", " ") for pick in (min, max))
    versions = [f"{part} {between([a[part] for a in about])}" for part in ("psidiff", "torch")]
    return [
        ("a cell", "; ".join(made)),
        ("±", _ERRORS),
        ("costs", _COSTS),
        ("versions", ", ".join(versions)),
        ("machine", "; ".join(dict.fromkeys(map(_machine, about)))),
        ("time", first if first == last else f"{first} to {last}"),
    ]


def _machine(about: Mapping[str, Any]) -> str:
    """Where a cell was made; records of before do not say in which precision."""
    precision = about.get("dtype", "auto")
    words = [about["device"], about["machine"], precision if precision != "auto" else ""]
    return ", ".join(filter(None, words))


_ERRORS = (
    f"one standard error; a difference counts from {SETTLED} of its own standard errors on, "
    "the cells taken for independent; ? where one sample cannot tell"
)
_COSTS = (
    "NFE counts passes of the network for a sample, tokens a pass are the length over NFE, "
    "seconds are for all samples of a cell, MiB is the peak of memory"
)

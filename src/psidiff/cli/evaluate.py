"""`psidiff evaluate`: likelihood, multiple choice, and the worth of samples made before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__
from ..evaluation.metric_result import MetricResult
from ..experiment.evaluate import (
    Asked,
    check_extras,
    dataset_of,
    of_choices,
    of_data,
    of_images,
    of_samples,
)
from ..experiment.report.formatting import join_words
from ..experiment.report.formatting import protocol as in_words
from ..experiment.sample_evaluators import kind_of
from ..files import FORMAT_VERSION, append_json_lines
from ..model import load
from ..types import check_choice
from .option_checks import PARTS, check_kinds, check_protocol_of_text
from .progress import counter
from .terminal import plain, say

Works = dict[str, Callable[[], list[MetricResult]]]


def run(console: Console, name: str | None, device: str, asked: Asked) -> None:
    """Measure, print a table, and append a line of JSON for each number.

    What can be wrong with the data is said before anything is measured. Whoever stops it keeps
    what is finished. Without the name of a model, the samples are images.
    """
    check_choice("protocol", asked.protocol, ("exact", "paper", "released"))
    works = _works_of_images(device, asked) if name is None else _works(name, device, asked)
    title = name or str(asked.samples)
    found: list[MetricResult] = []
    for number, work in enumerate(works.values()):
        try:
            fresh = work()
        except KeyboardInterrupt:
            if not number:
                raise
            if found:
                _show(console, title, found)
            kept = "above" if asked.out is None else f"kept in {asked.out}"
            left = join_words(list(works)[number:])
            raise KeyboardInterrupt(
                f"stopped: what is finished is {kept}, and {left} is still to do"
            ) from None
        found += fresh
        _keep(asked.out, title, fresh)
    _show(console, title, found)


def _works_of_images(device: str, asked: Asked) -> Works:
    """What is asked of images without a model."""
    given = [option for option in PARTS["samples"] if getattr(asked, option)]
    check_kinds(given, {str(asked.samples): "image"})
    if asked.data or asked.harness:
        raise ValueError("name a model: --data and --harness measure one")
    check_extras(asked)
    return {"--samples": partial(of_images, asked, device)}


def _works(name: str, device: str, asked: Asked) -> Works:
    """What is asked of a model, by the options that ask for it."""
    check_extras(asked)
    model = load(name, device)
    given = [option for option in PARTS["samples"] if getattr(asked, option)]
    check_kinds(given, {name: kind_of(model)})
    if asked.samples is not None and kind_of(model) == "text" and not asked.data:
        check_protocol_of_text(asked.protocol, asked.judge)
    sources: Sequence[str | None] = asked.data
    if not asked.data and asked.samples is None and not asked.harness:
        sources = (None,)
    data = {source: dataset_of(name, model, source, asked.drop_unknown) for source in sources}
    shown = partial(counter, Console(stderr=True))
    works: Works = {}
    if asked.samples is not None:
        works["--samples"] = partial(of_samples, name, model, asked)
    if asked.harness:
        works["--harness"] = partial(of_choices, model, asked)
    for source, rows in data.items():
        works[f"--data {source}"] = partial(of_data, model, source, rows, asked, shown)
    return works


def _keep(out: Path | None, name: str, found: Sequence[MetricResult]) -> None:
    """A line of JSON for each number, after those of before."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    about = {"format_version": FORMAT_VERSION, "model": name}
    append_json_lines(
        out, [{**about, **each.to_dict(), "psidiff": __version__} for each in found]
    )


def _sure(error: float | None) -> str:
    if error is None:
        return "exact"
    return f"{error:.4g}" if math.isfinite(error) else "unknown"


def _show(console: Console, name: str, found: Sequence[MetricResult]) -> None:
    """A table without empty columns, then each protocol once, with the names it is of.

    What all numbers are of goes into the title.
    """
    head = ("what", "value", "standard error", "unit", "of")
    rows = [
        (
            measure.name,
            f"{measure.value:.5g}",
            _sure(measure.stderr),
            measure.unit,
            str(measure.protocol.get("data") or measure.protocol.get("judge") or ""),
        )
        for measure in found
    ]
    alike = {row[-1] for row in rows}
    title = f"{name}: {alike.pop()}" if len(alike) == 1 and "" not in alike else name
    rows = rows if title == name else [(*row[:-1], "") for row in rows]
    used = [i for i in range(len(head)) if any(row[i] for row in rows)]
    table = Table(*(head[i] for i in used), title=escape(plain(title)), title_justify="left")
    for row in rows:
        table.add_row(*(escape(plain(row[i])) for i in used))
    console.print(table)
    names: dict[str, dict[str, None]] = {}
    for measure in found:
        names.setdefault(in_words([measure.protocol]), {})[measure.name] = None
    for words, of in names.items():
        line = f"{', '.join(of)}: {words or 'no protocol was noted'}"
        say(console, line, style="dim")

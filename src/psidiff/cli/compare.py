"""`psidiff compare`: models x steps x rules x truncation, measured by one protocol."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..distributed import Processes
from ..experiment.compare import EvaluatorCache, fill_grid
from ..experiment.report import conclusions
from ..experiment.report import page as report
from ..experiment.report.formatting import join_words
from ..experiment.report.plot_style import matplotlib
from ..experiment.report.results import read
from ..experiment.report.rows import NLL, PERPLEXITY, choose, paper_table, paper_title
from ..experiment.results_log import Cell, Protocol
from ..sampling import Constant, Sampler, parse_options
from ..types import check_choice
from .option_checks import check_kinds, check_protocol_of_text
from .terminal import plain, say

_WIDE = 110  # columns of a terminal in which names and numbers stand side by side
_IN_THE_REPORT = ("model", "tokens a pass", "MiB")  # and not in the terminal


def run(
    console: Console,
    cells: Sequence[Cell],
    protocol: Protocol,
    given: Collection[str],
    *,
    out: Path,
    device: str,
    tolerance: float,
    recommend: bool,
    chosen_as: str | None,
    compiled: bool,
) -> None:
    """Measure the cells that are missing, then write tables, figures and a page.

    They show all cells of these models that the folder has. given: the options that somebody
    typed, which must then be for one of the models.
    """
    check_choice("protocol", protocol.protocol, ("exact", "released"))
    check_protocol_of_text(protocol.protocol, protocol.judge)
    if chosen_as is not None:
        _check_choice_of_rows(chosen_as, cells)
    matplotlib()  # a report without figures would be found out after all the work
    group = Processes.join(device)
    evaluators = EvaluatorCache(protocol, str(group.device), compiled)
    models = list(dict.fromkeys(cell.model for cell in cells))
    typed = [*given, *(["choose"] if chosen_as else [])]
    check_kinds(typed, {name: evaluators.kind(name) for name in models})
    records, others = fill_grid(cells, protocol, out, evaluators, group, partial(say, console))
    if group.first:
        page = report.write_report(records, out, tolerance, chosen_as is not None)
        _show(console, records)
        if chosen_as is not None:
            _show_chosen(console, records)
        for sentence in conclusions.recommend(records, tolerance) if recommend else ():
            say(console, sentence)
        if others:
            say(console, f"left out: {join_words(others)}, which {out} has too")
        say(console, "the report: ", (page, "bold"))
    group.leave()


def _check_choice_of_rows(word: str, cells: Sequence[Cell]) -> None:
    """Raise where the paper's rule has nothing to choose by."""
    if word != "paper":
        raise ValueError(f"--choose must be paper, got {word!r}")
    if not any(_takes_ancestral(cell.kappa) for cell in cells):
        raise ValueError(
            "--choose paper takes the rule whose entropy is nearest to ancestral sampling's: "
            "name ancestral in --kappa"
        )


def _takes_ancestral(words: str) -> bool:
    """Whether a sampler in words, perhaps a preset, is ancestral sampling."""
    if parse_options(words).get("kappa") == "auto":
        return False
    sampler = Sampler.parse(words)
    return sampler.kappa == Constant(1.0) and not sampler.options(["predictor", "corrector"])


def _show_chosen(console: Console, records: list[dict[str, Any]]) -> None:
    """The rows that the paper would draw, and why."""
    cells = read(records)
    choices = choose(cells)
    drawn = [cell for choice in choices for cell in choice.cells]
    found = paper_table(drawn or cells, choices)
    table = Table(title=escape(paper_title(cells)), title_justify="left", show_edge=False)
    for i, name in enumerate(found["head"]):
        table.add_column(name, overflow="fold", justify="left" if i < 2 else "right")
    for line in found["lines"]:
        style = "bold" if line["chosen"] else ""
        table.add_row(*(escape(plain(word)) for word in line["words"]), style=style)
    console.print(table)
    for choice in choices:
        say(console, choice.told)


def _show(console: Console, records: list[dict[str, Any]]) -> None:
    """A table a model, narrow enough for a terminal: long names go on in a second line."""
    for model in dict.fromkeys(record["cell"]["model"] for record in records):
        ours = [record for record in records if record["cell"]["model"] == model]
        head, *rows = report.table(ours, bold="[bold]{}[/]", brief=True)
        if console.width < _WIDE:
            head, *rows = stacked([head, *rows])
        table = Table(title=escape(plain(model)), title_justify="left", show_edge=False)
        kept = [i for i, name in enumerate(head) if name not in _IN_THE_REPORT]
        for i in kept:
            numbers = head[i] != "sampler"
            side: Any = "right" if numbers else "left"
            lines = [line for row in rows for line in row[i].split("\n")]
            width = max(13, *(len(Text.from_markup(line)) for line in lines))
            name = "\n".join(wrap(head[i], width, break_long_words=False))
            table.add_column(name, overflow="fold", no_wrap=numbers, justify=side)
        for row in rows:
            table.add_row(*(row[i] for i in kept))
        console.print(table)


def stacked(rows: Sequence[list[str]]) -> list[list[str]]:
    """Perplexity and NLL in one column, one below the other, where both are there."""
    head = rows[0]
    lower = next((i for i, name in enumerate(head) if name in (PERPLEXITY, NLL)), None)
    if lower is None:
        return list(rows)
    joined = [[*row[:lower], *row[lower + 1 :]] for row in rows]
    for row, old in zip(joined, rows, strict=True):
        row[lower - 1] += f"\n{old[lower]}"
    joined[0][lower - 1] = f"{head[lower - 1]}, below it {head[lower]}"
    return joined

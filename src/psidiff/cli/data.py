"""`psidiff data`: what is there of a data set, a recipe's data or a file, as words or JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..experiment.data_report import DataReport, names, report
from ..experiment.document_counts import OnCount, SourceReport
from ..files import folder_of
from .progress import Progress
from .terminal import plain, say

_PATIENCE = 10.0  # seconds before a line is written where nothing can be redrawn
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def run(console: Console, name: str | None, as_json: bool) -> bool:
    """Print what is there. False: it was stopped before all of it was counted."""
    if name is None:
        _list(console, as_json)
        return True
    with _counting(Console(stderr=True), name) as on_count:
        found = report(name, on_count)
    if as_json:
        _print_json(found.to_dict() | {"complete": found.complete})
    else:
        _show(console, found)
    return found.complete


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1)
    print()


@contextmanager
def _counting(console: Console, name: str) -> Iterator[OnCount]:
    """A line of how much was read and how long the rest takes, where that is known."""
    begun = time.monotonic()
    with Progress(console) as progress:

        def on_count(documents: int, characters: int, total: int | None) -> None:
            of, left = "", ""
            if total:
                of = f" of {total:,}"
                seconds = (time.monotonic() - begun) * (total - documents) / documents
                left = f", {seconds:,.0f} s left"
            words = f"{documents:,}{of} documents, {characters:,} characters{left}"
            if console.is_terminal or time.monotonic() - begun > _PATIENCE:
                progress.show(f"reading; Ctrl-C shows what is counted: {words}")

        yield on_count


def _list(console: Console, as_json: bool) -> None:
    """Every name, and whether its files are here."""
    there = {}
    for name, data in names().items():
        files = data.local()
        there[name] = [] if files is None else [str(part) for part in files]
    if as_json:
        _print_json(there)
        return
    table = Table("name", "part", "columns", "files", box=None, header_style="dim")
    for name, data in names().items():
        here = plain(_files(there[name])) if there[name] else Text("not here", "yellow")
        table.add_row(name, data.split, ", ".join(data.columns), here)
    console.print(table)
    say(console, f"Files are looked for here and in {folder_of('PSIDIFF_DATA')}.", style="dim")
    say(console, "psidiff data NAME says more, also of a recipe or a file.", style="dim")


def _files(files: list[str]) -> str:
    more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
    return f"{files[0]}{more}"


def _show(console: Console, found: DataReport) -> None:
    table = Table(box=None, show_header=False, title=Text(plain(found.name), "bold"))
    table.title_justify = "left"
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for source in found.sources:
        table.add_row(source.part, Text(plain(_of(source), keep="\n")))
        if source.sha256:
            table.add_row("", f"hash of the {found.hashed} {source.sha256}")
    for label in ("split", "detokenizer", "tokenizer", "packing", "rows_sha256"):
        if words := getattr(found, label):
            table.add_row(
                "packed rows" if label == "rows_sha256" else label, Text(plain(words))
            )
    console.print(table)
    width = max(20, console.width - 4)
    for number, row in enumerate(found.rows):
        line = plain(row.replace("\n", "⏎"))
        cut = line if len(line) <= width else f"{line[: width - 1]}…"
        say(console, (f"{number:>2} ", "dim"), cut, soft_wrap=True)


def _of(source: SourceReport) -> str:
    """A source in words."""
    least = "" if source.complete else "at least "
    counts = f"{least}{source.documents:,} rows"
    if source.characters:
        counts += f", {source.characters:,} characters"
    if not source.complete:
        counts += " (stopped)"
    where = _files(source.files) if source.files else source.source
    size = "" if source.bytes is None else f", {_bytes(source.bytes)}"
    revision = "" if source.revision is None else f", revision {source.revision}"
    return f"{counts}\n{where}{size}{revision}"


def _bytes(count: int) -> str:
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"

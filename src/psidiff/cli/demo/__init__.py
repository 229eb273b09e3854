"""`psidiff demo`: puzzles, prose and digits by the models that ship, and a page of it all."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ...model import Model, load
from ...sampling import parse_kappa
from ..terminal import say
from . import samples, sudoku
from .page import Shown, write_page
from .puzzles import Puzzles, Solver, one_core_an_operation

__all__ = ["Sizes", "run"]


@dataclass(frozen=True)
class Sizes:
    """How much of everything; these take two to three minutes on two cores."""

    puzzles: int = 50  # counted
    shown: int = 3  # further ones; the live part ends with the first that is solved
    longer: int = 4  # times as many steps for those, since one puzzle takes little time
    passage: int = 128  # steps
    fills: int = 3  # of the same blanks
    rows: int = 6  # of ten digits
    drawing: int = 64  # steps


def run(
    console: Console, out: Path, steps: int, kappa: str, seed: int, sizes: Sizes | None = None
) -> None:
    """Solve, count, write and draw; what is left is one page."""
    if parse_kappa(kappa) == parse_kappa("ancestral"):
        raise ValueError("the demo sets a rule beside ancestral sampling: name another --kappa")
    sizes = sizes or Sizes()
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise ValueError(f"{out} cannot be written into")
    begun = time.monotonic()
    with one_core_an_operation() as cores:
        shown = _show(console, steps, kappa, seed, sizes, cores)
    page = write_page(out / "index.html", shown)
    minutes, seconds = divmod(round(time.monotonic() - begun), 60)
    words = (
        f"\nDone in {minutes} min {seconds} s. Every step of it, to play back in a browser: "
    )
    say(console, words, (page, "bold"), soft_wrap=True)


def _show(
    console: Console, num_steps: int, kappa: str, seed: int, sizes: Sizes, cores: int
) -> Shown:
    model = load("sudoku")
    _introduce(console, "Sudoku", model)
    puzzles = Puzzles.held_out(sizes.puzzles + sizes.shown, seed)
    pluralize, further = puzzles[: sizes.puzzles], puzzles[sizes.puzzles :]
    longer = sizes.longer * num_steps
    solver = Solver(model, seed, cores)
    sudoku.solve_live(console, solver, further, longer, kappa, first=sizes.puzzles)
    runs = sudoku.count(console, solver, pluralize, num_steps, kappa)
    books = load("books")
    _introduce(console, "Prose", books)
    passage = samples.write(console, books, sizes.passage, seed)
    filled = samples.fill(console, books, sizes.fills, sizes.passage, seed)
    drawer = load("digits")
    _introduce(console, "Digits", drawer)
    drawn = samples.draw(console, drawer, sizes.rows, sizes.drawing, seed)
    return Shown(seed, model, kappa, pluralize, runs, passage, filled, drawn)


def _introduce(console: Console, title: str, model: Model) -> None:
    facts = f"{model.num_parameters / 1e6:.1f} million parameters, {model.config.length} tokens"
    console.print(f"\n[bold]{title}[/]  [dim]{facts}[/]\n", highlight=False)

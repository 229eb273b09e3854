"""Sudoku in the terminal: a puzzle solved live, then many counted."""

from __future__ import annotations

from rich.console import Console
from torch import Tensor

from ...experiment.report.formatting import counted
from ...sampling import Step
from ..progress import progress_bar
from .puzzles import Puzzles, Runs, Solver, name_of, verdict
from .sudoku_view import Boards

_PARTS = (8, 4, 2, 1)  # the curve has a point at each of these parts of the steps


def solve_live(
    console: Console, solver: Solver, puzzles: Puzzles, steps: int, kappa: str, first: int
) -> None:
    """Puzzles before the reader's eyes, one after the other until Psi has solved one.

    first: the number of the first puzzle among all samples of the seed.
    """
    console.print(
        "A puzzle with one solution and no clue to spare. All other cells start as random "
        f"digits. The same network improves them in {steps} steps, twice: by ancestral "
        f"sampling, and by the Ψ-sampler [bold]{kappa}[/], which keeps asking again.\n",
        highlight=False,
    )
    for i in range(len(puzzles)):
        one, index = puzzles[i : i + 1], first + i
        with console.status("ancestral sampling goes first"):
            before = solver.solve(one, steps, "ancestral", first_index=index)
        with Boards(console, one.clues[0], one.solutions[0], before.trace) as boards:
            psi = solver.solve(one, steps, kappa, on_step=boards, first_index=index)
        if psi.hits:
            break
        another = "; here is another" if i + 1 < len(puzzles) else ""
        console.print(f"Ψ has not solved this one{another}.\n")


def count(
    console: Console, solver: Solver, puzzles: Puzzles, steps: int, kappa: str
) -> list[Runs]:
    """How many each sampler solves, with few steps and with more; all on the same puzzles."""
    console.print(
        f"Now {len(puzzles)} such puzzles, the same for every line; in brackets the 95% "
        "interval.\n",
        highlight=False,
    )
    grid, results = sorted({max(1, steps // part) for part in _PARTS}), []
    with progress_bar(console, "  ") as bar:
        task = bar.add_task("", total=2 * len(puzzles) * (sum(grid) + len(grid)))

        def advance(i: int, step: Step, z: Tensor, route: Tensor) -> None:
            bar.advance(task, len(z))

        for each in grid:
            for rule in ("ancestral", kappa):
                runs = solver.solve_many(puzzles, each, rule, advance)
                console.print(_line(runs), highlight=False)
                results.append(runs)
    console.print("\n" + verdict(*results[-2:]), highlight=False)
    return results


def _line(runs: Runs) -> str:
    """8 steps  ancestral  ███████·············  17 of 50  (22 to 48%)"""
    total = len(runs.solved)
    full = round(20 * runs.hits / total)
    colour = "dim" if runs.sampler == "ancestral" else "green"
    bar = f"[{colour}]{'█' * full}[/][dim]{'·' * (20 - full)}[/]"
    return (
        f"  {counted(runs.steps, 'step'):>9}  {name_of(runs.sampler):9}  {bar}  "
        f"{runs.hits:>3} of {total}  [dim]({runs.percent})[/]"
    )

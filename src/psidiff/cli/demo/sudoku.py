"""Sudoku in the terminal: a puzzle solved live on two boards, then many counted."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console, Group
from rich.text import Text
from torch import Tensor

from ...experiment.report.formatting import pluralize
from ...sampling import Step, Trace
from ..live_view import LivePicture, board
from ..progress import progress_bar
from .puzzles import Puzzles, Runs, Solver, name_of, verdict

_SECONDS = 8.0  # that a run takes to watch, at least
_WRONG = "×"  # where there are no colours
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
        f"  {pluralize(runs.steps, 'step'):>9}  {name_of(runs.sampler):9}  {bar}  "
        f"{runs.hits:>3} of {total}  [dim]({runs.percent})[/]"
    )


class Boards(LivePicture):
    """Pass it as `on_step`, inside `with`: `done` is played back in step with the new run.

    clues and solution are (81,). In a file a few pictures are printed.
    """

    def __init__(self, console: Console, clues: Tensor, solution: Tensor, done: Trace) -> None:
        super().__init__(console)
        self.clues = clues
        self.solution = solution
        self._done = [tokens[0] for tokens in done.tokens]
        self._before: list[Tensor] = []
        last = len(done) - 1
        self._stops, self._pause = {last // 2, last}, _SECONDS / len(done)
        self._drawn = 0.0

    def __call__(self, i: int, step: Step, z: Tensor, route: Tensor) -> None:
        now = [self._done[i], z[0].cpu().to(self._done[i].dtype)]
        before, self._before = self._before or now, now
        if self.moving:
            time.sleep(max(0.0, self._drawn + self._pause - time.monotonic()))
        if self.moving or i in self._stops:
            self.show(self._picture(i, before, now))
            self._drawn = time.monotonic()

    def _picture(self, i: int, before: Sequence[Tensor], now: Sequence[Tensor]) -> Group:
        last = len(self._done) - 1
        line = Text(f"  step {i + 1} of {last}" if i < last else "  the end")
        drawn = []
        for name, old, new in zip(("ancestral", "Ψ"), before, now, strict=True):
            wrong = int((new != self.solution).sum())
            title = f"{name}: {wrong} wrong" if wrong else f"{name}: solved"
            drawn.append(Text.assemble((f"  {title:25}\n", "bold"), self._board(old, new)))
        return Group(line, Columns(drawn, padding=(0, 3)), _legend(self.coloured), Text())

    def _board(self, old: Tensor, new: Tensor) -> Text:
        cells = zip(*(x.tolist() for x in (old, new, self.clues, self.solution)), strict=True)
        return board([self._cell(*cell) for cell in cells])

    def _cell(self, old: int, new: int, clue: int, right: int) -> Text:
        if clue >= 0:
            return Text(str(new + 1), "bold")
        if not self.coloured:
            return Text(str(new + 1) if new == right else _WRONG)
        colour = "green" if new == right else "red"
        return Text(str(new + 1), colour if old == new else f"{colour} reverse")


def _legend(coloured: bool) -> Text:
    if not coloured:
        return Text(f"  {_WRONG} a wrong cell")
    words = (("  clue", "bold"), ("right", "green"), ("wrong", "red"))
    return Text("   ").join(
        [*(Text(*word) for word in words), Text("just changed", "reverse dim")]
    )

"""Two boards in the terminal: one that is done, one that is being filled beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from torch import Tensor

from ...sampling import Step, Trace
from ..live_view import board

_SECONDS = 8.0  # that a run takes to watch, at least
_WRONG = "×"  # where there are no colours


class Boards:
    """Pass it as `on_step`, inside `with`: `done` is played back in step with the new run.

    clues and solution are (81,). In a file a few pictures are printed.
    """

    def __init__(self, console: Console, clues: Tensor, solution: Tensor, done: Trace) -> None:
        self.console, self.clues, self.solution = console, clues, solution
        self._done = [tokens[0] for tokens in done.tokens]
        self._before: list[Tensor] = []
        self._moving = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False)
        last = len(done) - 1
        self._stops, self._pause = {last // 2, last}, _SECONDS / len(done)
        self._drawn = 0.0

    def __enter__(self) -> Boards:
        if self._moving:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def __call__(self, i: int, step: Step, z: Tensor, route: Tensor) -> None:
        now = [self._done[i], z[0].cpu().to(self._done[i].dtype)]
        before, self._before = self._before or now, now
        if self._moving:
            time.sleep(max(0.0, self._drawn + self._pause - time.monotonic()))
            self._live.update(self._picture(i, before, now), refresh=True)
            self._drawn = time.monotonic()
        elif i in self._stops:
            self.console.print(self._picture(i, before, now), highlight=False)

    def _picture(self, i: int, before: Sequence[Tensor], now: Sequence[Tensor]) -> Group:
        last = len(self._done) - 1
        line = Text(f"  step {i + 1} of {last}" if i < last else "  the end")
        drawn = []
        for name, old, new in zip(("ancestral", "Ψ"), before, now, strict=True):
            wrong = int((new != self.solution).sum())
            told = f"{name}: {wrong} wrong" if wrong else f"{name}: solved"
            drawn.append(Text.assemble((f"  {told:25}\n", "bold"), self._board(old, new)))
        return Group(line, Columns(drawn, padding=(0, 3)), _legend(self._coloured), Text())

    def _board(self, old: Tensor, new: Tensor) -> Text:
        cells = zip(*(x.tolist() for x in (old, new, self.clues, self.solution)), strict=True)
        return board([self._cell(*cell) for cell in cells])

    def _cell(self, old: int, new: int, clue: int, right: int) -> Text:
        if clue >= 0:
            return Text(str(new + 1), "bold")
        if not self._coloured:
            return Text(str(new + 1) if new == right else _WRONG)
        colour = "green" if new == right else "red"
        return Text(str(new + 1), colour if old == new else f"{colour} reverse")

    @property
    def _coloured(self) -> bool:
        return self.console.color_system is not None and not self.console.no_color


def _legend(coloured: bool) -> Text:
    if not coloured:
        return Text(f"  {_WRONG} a wrong cell")
    words = (("  clue", "bold"), ("right", "green"), ("wrong", "red"))
    return Text("   ").join(
        [*(Text(*word) for word in words), Text("just changed", "reverse dim")]
    )

"""Two boards in the terminal: one that is done, one that is being filled beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console, Group
from rich.text import Text
from torch import Tensor

from ...sampling import Step, Trace
from ..live_view import LivePicture, board

_SECONDS = 8.0  # that a run takes to watch, at least
_WRONG = "×"  # where there are no colours


class Boards(LivePicture):
    """Pass it as `on_step`, inside `with`: `done` is played back in step with the new run.

    clues and solution are (81,). In a file a few pictures are printed.
    """

    def __init__(self, console: Console, clues: Tensor, solution: Tensor, done: Trace) -> None:
        super().__init__(console)
        self.clues, self.solution = clues, solution
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

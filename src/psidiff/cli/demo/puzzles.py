"""Puzzles with one solution, and how many of them a sampler solves; many on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Event
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...data.sudoku_solver import solve
from ...evaluation.metric_result import wilson
from ...evaluation.puzzle_metrics import held_out_clues
from ...model import Model
from ...sampling import Step, Trace
from ...sampling.loop import OnStep

_MOST = 4  # threads; more of them mostly wait for Python
Part = TypeVar("Part")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Puzzles:
    """Clues (N, 81), -1 where a cell is free, and the only grids (N, 81) that have them."""

    clues: Tensor
    solutions: Tensor

    @classmethod
    def held_out(cls, count: int, seed: int) -> Puzzles:
        clues = held_out_clues("minimal", count, seed)
        assert clues is not None
        return cls(clues, torch.from_numpy(solve(clues.numpy())).long())

    def __len__(self) -> int:
        return len(self.clues)

    def __getitem__(self, part: slice) -> Puzzles:
        return Puzzles(self.clues[part], self.solutions[part])


@dataclass(frozen=True)
class Runs:
    """All puzzles by one sampler: which it solved (N,), and how."""

    sampler: str
    steps: int
    solved: Tensor
    trace: Trace

    @property
    def hits(self) -> int:
        return int(self.solved.sum())

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.hits, len(self.solved))

    @property
    def percent(self) -> str:
        low, high = self.interval
        return f"{100 * low:.0f} to {100 * high:.0f}%"


@dataclass(frozen=True)
class Solver:
    """A model of Sudoku with a seed, and how many cores of the CPU share many puzzles."""

    model: Model
    seed: int
    cores: int

    def solve(self, puzzles: Puzzles, steps: int, kappa: str, **options: Any) -> Runs:
        """Each puzzle once; what is left open at the end is the network's likeliest digit."""
        options |= {"infill": puzzles.clues, "last": "greedy", "record": True}
        made = self.model.sample(len(puzzles), steps, kappa, seed=self.seed, **options)
        assert made.trace is not None
        solved = (made.tokens.cpu() == puzzles.solutions).all(1)
        return Runs(kappa, steps, solved, made.trace)

    def solve_many(self, puzzles: Puzzles, steps: int, kappa: str, on_step: OnStep) -> Runs:
        """The same for many, on all cores."""

        def work(part: slice, on_step: OnStep) -> Runs:
            options: dict[str, Any] = {"on_step": on_step, "first_index": part.start}
            return self.solve(puzzles[part], steps, kappa, **options)

        cores = self.cores if self.model.device.type == "cpu" else 1
        bounds = [len(puzzles) * i // cores for i in range(cores + 1)]
        parts = [slice(*ends) for ends in pairwise(bounds) if ends[0] < ends[1]]
        runs = side_by_side(work, parts, on_step)
        solved = torch.cat([each.solved for each in runs])
        trace = Trace.join([each.trace for each in runs])
        return replace(runs[0], solved=solved, trace=trace)


def verdict(ancestral: Runs, psi: Runs) -> str:
    """The counts, and the puzzles that only one of the two solved."""
    only = int((psi.solved & ~ancestral.solved).sum())
    lost = int((ancestral.solved & ~psi.solved).sum())
    return (
        f"With {psi.steps} steps ancestral sampling solves {ancestral.hits} of the "
        f"{len(psi.solved)} puzzles and Ψ solves {psi.hits}. Ψ alone solves {only} of them, "
        f"ancestral sampling alone {lost}."
    )


def name_of(sampler: str) -> str:
    return sampler if sampler == "ancestral" else "Ψ"


@contextmanager
def one_core_an_operation() -> Iterator[int]:
    """Inside, torch does not split operations; given is how many threads it had.

    Threads that meet at the end of every operation are slow beside other programs.
    """
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield min(cores, _MOST)
    finally:
        torch.set_num_threads(cores)


def side_by_side(
    work: Callable[[Part, OnStep], Made], parts: Sequence[Part], on_step: OnStep
) -> list[Made]:
    """Each part in a thread of its own; what stops one stops all at their next step."""
    stopped = Event()

    def listen(i: int, step: Step, z: Tensor, route: Tensor) -> None:
        if stopped.is_set():
            raise InterruptedError
        on_step(i, step, z, route)

    with ThreadPoolExecutor(len(parts)) as pool:
        try:
            return list(pool.map(lambda part: work(part, listen), parts))
        except BaseException:
            stopped.set()
            raise

"""Cores shared out: a thread for each part of the work, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import TypeVar

import torch
from torch import Tensor

from ...sampling import Step
from ...sampling.loop import OnStep

_MOST = 4  # threads; more of them mostly wait for Python
Part = TypeVar("Part")
Made = TypeVar("Made")


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

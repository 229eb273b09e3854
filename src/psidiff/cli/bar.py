"""Bars: how far the work is, how long still."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ..evaluation.nll import OnBatch
from ..request import Request
from ..sampling import Step
from ..sampling.loop import OnStep

_EVERY = 10.0  # seconds between lines where nothing can be redrawn


def bar_of(console: Console, before: str, *after: ProgressColumn) -> Progress:
    """Words, a bar, how long still; only where it can be redrawn, and gone at the end."""
    return Progress(
        TextColumn(before),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
        *after,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def counter(console: Console, what: str) -> Iterator[OnBatch]:
    """A bar of how much of `what` is done; where nothing can be redrawn, a line at times."""
    bar = bar_of(console, "{task.description}")
    said = time.monotonic()
    with bar:
        task = bar.add_task(escape(what), total=None)

        def advance(done: int, total: int) -> None:
            nonlocal said
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - said > _EVERY:
                said = time.monotonic()
                console.print(f"{what}: {done / total:.0%}", highlight=False, markup=False)

        yield advance


@contextmanager
def progress(console: Console, request: Request) -> Iterator[OnStep]:
    """A bar that counts the steps of all samples."""
    bar = bar_of(console, "{task.fields[step]}", _TokensASecond(request.length))
    steps = steps_of(request)
    with bar:
        task = bar.add_task("", total=request.num_samples * steps, step="", steps=steps)

        def advance(i: int, step: Step, z: torch.Tensor, route: torch.Tensor) -> None:
            bar.update(task, advance=len(z), step=place(i, request))

        yield advance


def place(i: int, request: Request) -> str:
    """Where call i of on_step is in its window: --steps 16 are 16 steps and a last one."""
    here = i % (len(request.steps) or request.window)
    if not request.steps:
        return f"token {here + 1}/{request.window}"
    asked = len(request.steps) - 1
    return f"step {here + 1}/{asked}" if here < asked else "the last step"


class _TokensASecond(ProgressColumn):
    """Tokens of finished work over time."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def render(self, task: Task) -> Text:
        done = task.completed / task.fields["steps"] * self.length
        return Text(f"{done / (task.elapsed or 1):,.0f} tokens/s")


def steps_of(request: Request) -> int:
    """Calls of on_step for one sample."""
    per_window = len(request.steps) or request.window
    return per_window * len(request.starts)

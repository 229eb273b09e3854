"""A bar over the steps of all samples: how far, how long still, how fast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ..request import Request
from ..sampling import Step
from ..sampling.loop import OnStep


@contextmanager
def progress(console: Console, request: Request) -> Iterator[OnStep]:
    """A bar that counts the steps of all samples."""
    bar = Progress(
        TextColumn("{task.fields[step]}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
        _TokensASecond(request.length),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    steps = steps_of(request)
    with bar:
        task = bar.add_task("", total=request.num_samples * steps, step="", steps=steps)

        def advance(i: int, step: Step, z: torch.Tensor, route: torch.Tensor) -> None:
            bar.update(task, advance=len(z), step=_place(i, request))

        yield advance


def _place(i: int, request: Request) -> str:
    """Where a window is: --steps 16 are 16 steps and a last one."""
    if not request.steps:
        return f"token {i + 1}/{request.window}"
    asked = len(request.steps) - 1
    return f"step {i + 1}/{asked}" if i < asked else "the last step"


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

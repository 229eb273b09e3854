"""What a person sees of work that goes on: bars and live lines, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from rich import progress as rich_progress
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from ..evaluation.nll import OnBatch
from ..request import Request
from ..sampling import Step
from ..sampling.loop import OnStep

_EVERY = 10.0  # seconds between lines where nothing can be redrawn


def progress_bar(console: Console, before: str, *after: str) -> rich_progress.Progress:
    """Words, a bar, how long still; only where it can be redrawn, and gone at the end."""
    return rich_progress.Progress(
        before,
        rich_progress.BarColumn(),
        "{task.percentage:3.0f}%",
        rich_progress.TimeRemainingColumn(),
        *after,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def counter(console: Console, what: str) -> Iterator[OnBatch]:
    """A bar of how much of `what` is done; where nothing can be redrawn, a line at times."""
    last_line = time.monotonic()
    with progress_bar(console, "{task.description}") as bar:
        task = bar.add_task(escape(what), total=None)

        def advance(done: int, total: int) -> None:
            nonlocal last_line
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - last_line > _EVERY:
                last_line = time.monotonic()
                console.print(f"{what}: {done / total:.0%}", highlight=False, markup=False)

        yield advance


@contextmanager
def step_bar(console: Console, request: Request) -> Iterator[OnStep]:
    """A bar that counts the steps of all samples."""
    steps, begun, done = request.total_steps, time.monotonic(), 0
    tokens = request.length / steps  # of finished work, a step
    with progress_bar(console, "{task.fields[step]}", "{task.fields[speed]}") as bar:
        task = bar.add_task("", total=request.num_samples * steps, step="", speed="")

        def advance(i: int, step: Step, z: torch.Tensor, route: torch.Tensor) -> None:
            nonlocal done
            done += len(z)
            speed = f"{done * tokens / (time.monotonic() - begun or 1):,.0f} tokens/s"
            bar.update(task, completed=done, step=place(i, request), speed=speed)

        yield advance


def place(i: int, request: Request) -> str:
    """Where call i of on_step is in its window: --steps 16 are 16 steps and a last one."""
    index = i % len(request.plan)
    if not request.steps:
        return f"token {index + 1}/{request.window}"
    num_steps = len(request.steps) - 1
    return f"step {index + 1}/{num_steps}" if index < num_steps else "the last step"


class Progress:
    """Use as a context; `log` takes the trainer's records."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._last_line, self._steps = 0.0, 1

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.stop()

    def reading(self, documents: int, tokens: int) -> None:
        """The corpus becomes tokens."""
        self.show(f"reading: {documents:,} documents, {tokens:,} tokens")

    def start(
        self, recipe: Any, model: Any, data: Any, folder: Path, begun: int, group: Any
    ) -> None:
        self._steps = recipe.train.steps
        where = f"{group.world} x {group.device.type}" if group.world > 1 else group.device
        self.console.print(
            f"[bold]{escape(recipe.name)}[/]: {model.num_parameters:,} parameters, "
            f"{model.prior or 'next token'}, {len(data.train):,} sequences of "
            f"{data.train.length}, batch {recipe.train.batch_size} on {where}, "
            f"into {escape(str(folder))}",
            highlight=False,
        )
        if begun:
            self.console.print(f"resumed at step {begun:,}", highlight=False)

    def log(self, record: dict[str, Any]) -> None:
        if "valid_nll" in record:
            self.console.print(_evaluation(record), highlight=False)
        else:
            self.show(_training(record, self._steps))

    def stopping(self) -> None:
        """Called by a signal, at any moment."""
        with suppress(RuntimeError):  # a line was being written
            self.console.print(
                "stopping as soon as all is saved; a second signal does not wait"
            )

    def end(self, folder: Path, step: int, finished: bool) -> None:
        stopped = f"stopped at step {step:,}, saved: the same command with --resume goes on"
        words = f"done: {escape(str(folder))}" if finished else stopped
        self.console.print(words, highlight=False)

    def show(self, text: str) -> None:
        """In place of what was shown before; where nothing can be redrawn, now and then."""
        if self.console.is_terminal:
            self._live.update(Text.from_markup(text))
        elif time.monotonic() - self._last_line > _EVERY:
            self._last_line = time.monotonic()
            self.console.print(text, highlight=False)


def _training(record: dict[str, Any], steps: int) -> str:
    speed, left = record["tokens_per_second"], record["seconds_left"]
    memory = record["memory_gib"]
    return (
        f"step {record['step']:,}/{steps:,}  loss {record['loss']:.4f}  "
        f"grad {record['grad_norm']:.2f}  {'?' if speed is None else _short(speed)} "
        f"tokens/s  {'?' if memory is None else f'{memory:.1f}'} GiB  "
        f"{'?' if left is None else _clock(left)} left"
    )


def _evaluation(record: dict[str, Any]) -> str:
    nll, error = record["valid_nll"], record["valid_nll_error"]
    bar = "?" if error is None else f"{error:.4f}"
    parts = [
        f"step {record['step']:,}: held-out NLL {nll:.4f} ± {bar} nats a token "
        f"({nll / math.log(2):.3f} bits)"
    ]
    if "valid_puzzles" in record:
        parts.append(f"{record['valid_puzzles']:.0%} of the samples are valid")
    if "samples" in record:
        parts.append(record["samples"])
    return ", ".join(parts)


def _short(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"

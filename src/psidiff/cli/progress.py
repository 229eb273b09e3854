"""What a person sees of a run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

_EVERY = 10.0  # seconds between lines where nothing can be redrawn


class Progress:
    """Use as a context; `log` takes the trainer's records."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._said, self._steps = 0.0, 1

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.console.is_terminal:
            self._live.__exit__(*error)

    def reading(self, documents: int, tokens: int) -> None:
        """The corpus becomes tokens."""
        self.show(f"reading: {documents:,} documents, {tokens:,} tokens")

    def start(
        self, recipe: Any, model: Any, data: Any, folder: Path, begun: int, group: Any
    ) -> None:
        self._steps = recipe.train.steps
        count = sum(parameter.numel() for parameter in model.network.parameters())
        where = f"{group.world} x {group.device.type}" if group.world > 1 else group.device
        self.console.print(
            f"[bold]{recipe.name}[/]: {count:,} parameters, {model.prior or 'next token'}, "
            f"{len(data.train):,} sequences of {data.train.length}, "
            f"batch {recipe.train.batch_size} on {where}, into {folder}",
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
        if finished:
            self.console.print(f"done: {folder}", highlight=False)
        else:
            self.console.print(
                f"stopped at step {step:,}, saved: the same command with --resume goes on",
                highlight=False,
            )

    def show(self, text: str) -> None:
        """In place of what was shown before; where nothing can be redrawn, now and then."""
        if self.console.is_terminal:
            table = Table.grid()
            table.add_row(text)
            self._live.update(table)
        elif time.monotonic() - self._said > _EVERY:
            self._said = time.monotonic()
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
    if "valid_grids" in record:
        parts.append(f"{record['valid_grids']:.0%} of the samples are valid grids")
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

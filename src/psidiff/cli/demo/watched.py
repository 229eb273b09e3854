"""Samples that form in the terminal; elsewhere only what came of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from torch import Tensor

from ...model import Model
from ...sampling import Step
from ...sampling.loop import OnStep
from ..live_view import Watch


@contextmanager
def watched(console: Console, model: Model, steps: int, most: int) -> Iterator[OnStep]:
    """An `on_step` that draws every step in a terminal, and in a file the last."""
    total = steps + 1  # the last one removes what noise is left

    def place(i: int) -> str:
        return f"step {i + 1} of {steps}" if i < steps else f"after {steps} steps"

    with Watch(console, model.codec, most=most, total=total, place=place) as watch:

        def on_step(i: int, step: Step, z: Tensor, route: Tensor) -> None:
            if console.is_terminal or i + 1 == total:
                watch(i, step, z, route)

        yield on_step

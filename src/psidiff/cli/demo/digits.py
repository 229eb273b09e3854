"""Digits of every class, drawn pixel by pixel and all at once."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ...model import Model
from ...sampling import Trace
from .watched import watched

GUIDANCE = 2.0


def draw(console: Console, model: Model, rows: int, steps: int, seed: int) -> Trace:
    """Rows of ten images, one of each class."""
    console.print(
        f"{10 * rows} handwritten digits of 8 x 8 pixels, each drawn for its class in {steps} "
        "steps; ten of them here:\n",
        highlight=False,
    )
    options: dict[str, Any] = {"labels": [*range(10)] * rows, "guidance": GUIDANCE}
    with watched(console, model, steps, most=10) as on_step:
        options |= {"on_step": on_step, "record": True}
        made = model.sample(10 * rows, steps, seed=seed, **options)
    assert made.trace is not None
    return made.trace

"""`psidiff train`: a recipe becomes a run folder, watched while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..experiment.train import train
from .progress import Progress


def run(
    console: Console,
    recipe: str,
    overrides: Sequence[str],
    out: Path | None,
    resume: bool,
    device: str,
    *,
    force: bool = False,
    skip_damaged: bool = False,
    data_changed: bool = False,
) -> int:
    """Train, or go on training: 0, or 128 + the signal that stopped it before the end."""
    for name, asked in (("--skip-damaged", skip_damaged), ("--data-changed", data_changed)):
        if asked and not resume:
            raise ValueError(f"{name} is of a run that is resumed: add --resume")
    return train(
        recipe,
        overrides,
        out,
        resume,
        device,
        lambda first: Progress(console if first else Console(quiet=True)),
        force=force,
        skip_damaged=skip_damaged,
        data_changed=data_changed,
    )

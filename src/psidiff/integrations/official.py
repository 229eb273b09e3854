"""The released checkpoints: Lightning files of Duo, MDLM and AR, and hub-style folders."""

from __future__ import annotations

from pathlib import Path

from ..model import Model, load_released


def load(path: str | Path, ema: bool = True) -> Model:
    """A released model in float32 on the CPU: averaged weights, or the raw ones on request."""
    return load_released(Path(path), ema)

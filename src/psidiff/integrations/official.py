"""The released checkpoints: Lightning files of Duo, MDLM and AR, and hub-style folders."""

from __future__ import annotations

from pathlib import Path

from ..model import Model, load_released


def load(path: str | Path, ema: bool = True) -> Model:
    """Load a checkpoint that the authors of Duo or MDLM released. Needs no network connection.

    Args:
        path: a .ckpt file, or a folder with config.json and model.safetensors.
        ema: averaged weights; False: the raw ones.

    Returns:
        The `Model` in float32 on the CPU; its codec is None without a tokenizer beside it.

    Raises:
        ValueError: if it is no such checkpoint. Nothing in the file is executed.

    Example:
        >>> from psidiff.integrations import official
        >>> official.load("duo.ckpt")  # doctest: +SKIP
    """
    return load_released(Path(path), ema)

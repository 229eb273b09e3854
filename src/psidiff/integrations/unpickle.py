"""Which names the released checkpoints may mention; they are read as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..limits import regular_file
from ..torch_files import read_torch_file

_INERT_PACKAGES = {
    "collections",
    "dataloader",
    "lightning",
    "omegaconf",
    "pytorch_lightning",
    "tokenizers",
    "transformers",
    "typing",
}


def read_checkpoint(path: str | Path) -> Any:
    """The contents of a .ckpt file on the CPU. Nothing that it names is imported or run."""
    path = regular_file(path)
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            raise ValueError(f"{path.name} is not a checkpoint, or a damaged one")
    return read_torch_file(path, allowed=_INERT_PACKAGES)

"""Checkpoints: whole or absent, the last few kept, readable by any number of processes."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from ..files import read_object, write_object
from ..parallel import Processes

_PREFIX, _UNFINISHED = "step-", "unfinished-"


def save(
    folder: Path, step: int, tensors: dict[str, Any], facts: dict[str, Any], group: Processes
) -> None:
    """Write `tensors` (in parts, if sharded) and `facts` (plain data) under another name, then
    rename: a process killed at any moment leaves no checkpoint that is not whole."""
    unfinished, final = folder / f"{_UNFINISHED}{step}", folder / f"{_PREFIX}{step:08d}"
    if final.exists():  # a run that stops where it was resumed
        return
    if group.first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    group.wait()
    _distributed("save", tensors, unfinished, group)
    if group.first:
        write_object(unfinished / "facts.json", facts)
        os.replace(unfinished, final)
    group.wait()


def load(folder: Path, step: int, tensors: dict[str, Any], group: Processes) -> dict[str, Any]:
    """Fill `tensors` in place; the facts."""
    path = folder / f"{_PREFIX}{step:08d}"
    facts = read_object(path / "facts.json")
    _distributed("load", tensors, path, group)
    return facts


def _distributed(verb: str, tensors: dict[str, Any], path: Path, group: Processes) -> None:
    """torch.distributed.checkpoint, which is slow to import, and warns when it is alone."""
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            getattr(dcp, verb)(tensors, checkpoint_id=path, no_dist=group.world == 1)
        except dcp.CheckpointException as error:  # no Exception, and its last line says why
            why = str(error).strip().splitlines()[-1]
            raise ValueError(f"cannot {verb} the checkpoint {path}: {why}") from error


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, rising."""
    return sorted(int(path.name.removeprefix(_PREFIX)) for path in folder.glob(f"{_PREFIX}*"))


def rotate(folder: Path, keep: int) -> None:
    """Only the last few stay; what a killed process left unfinished goes."""
    for step in steps(folder)[:-keep]:  # renamed first: half a checkpoint never bears the name
        os.replace(folder / f"{_PREFIX}{step:08d}", folder / f"{_UNFINISHED}{step}")
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path)

"""Checkpoints: whole or absent, the last few kept, readable by any number of processes.

A checkpoint is a folder of data: the tensors in parts (`parts`), and facts.json with the step,
plain numbers and the index of the parts. Every file is held against its checksum.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ..checksums import Damaged, damaged
from ..distributed import Processes
from ..files import read_object, sync_folder, write_object
from .advice import DAMAGED_CHECKPOINT

_PREFIX, _UNFINISHED = "step-", "unfinished-"
_LARGEST = torch.finfo(torch.float32).max

Skip = Callable[[str], None]


def save(
    folder: Path, step: int, tensors: dict[str, Any], facts: dict[str, Any], group: Processes
) -> None:
    """Write `tensors` (in parts, if sharded) and `facts` (plain data) under another name, then
    rename: a process killed at any moment leaves no checkpoint that is not whole."""
    from .checkpoint_parts import PartWriter

    final = _at(folder, step)
    if group.told(final.exists):  # a run that stops where it was resumed
        return
    unfinished = group.told(lambda: _new_folder(folder, step))
    try:
        writer = PartWriter(unfinished)
        _planned("save", tensors, final, group, storage_writer=writer)
        group.told(lambda: _finish(unfinished, final, {**facts, **writer.index}))
    except BaseException:
        if group.first:
            shutil.rmtree(unfinished, ignore_errors=True)  # a full disk has room again
        raise


def _new_folder(folder: Path, step: int) -> Path:
    made = folder / f"{_UNFINISHED}{step}-{secrets.token_hex(4)}"
    made.mkdir(parents=True)
    return made


def _finish(unfinished: Path, final: Path, facts: dict[str, Any]) -> None:
    write_object(unfinished / "facts.json", facts)
    os.replace(unfinished, final)
    sync_folder(final.parent)


def load(folder: Path, step: int, tensors: dict[str, Any], group: Processes) -> dict[str, Any]:
    """Fill `tensors` in place; the facts."""
    path = _at(folder, step)
    facts, index = group.told(lambda: _facts(path, step))
    reader = _reader(path, index)
    _check_fit(path, reader.metadata, tensors)
    _planned("load", tensors, path, group, storage_reader=reader)
    return facts


def _check_fit(path: Path, held: Any, tensors: dict[str, Any]) -> None:
    """Raise where a checkpoint has not the tensors that a run needs."""
    stored = held.state_dict_metadata
    for name, shape in _shapes(tensors):
        if name not in stored:
            raise ValueError(
                f"{path} does not fit this run: it has no {name}; {DAMAGED_CHECKPOINT}"
            )
        found = tuple(stored[name].size)
        if found != shape:
            why = f"its {name} has the shape {found} instead of {shape}"
            raise ValueError(f"{path} does not fit this run: {why}; {DAMAGED_CHECKPOINT}")


def _shapes(tensors: dict[str, Any], before: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors in nested mappings by their names in a checkpoint."""
    for name, value in tensors.items():
        if isinstance(value, dict):
            yield from _shapes(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", tuple(value.shape)


def _reader(path: Path, index: dict[str, Any] | None) -> Any:
    """What reads the tensors of a checkpoint; one without an index is of an earlier version."""
    from .checkpoint_parts import PartReader, part_metadata, read_parts

    if index is None:
        from .legacy_checkpoint import older_metadata, read_older

        return PartReader(older_metadata(path), partial(read_older, path))
    return PartReader(part_metadata(index), partial(read_parts, path, index["files"]))


def _planned(
    verb: str, tensors: dict[str, Any], path: Path, group: Processes, **storage: Any
) -> None:
    """torch.distributed.checkpoint, which is slow to import, and warns when it is alone."""
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            getattr(dcp, verb)(tensors, no_dist=group.world == 1, **storage)
        except dcp.CheckpointException as error:  # no Exception; it holds those of each process
            raise _cause(verb, path, error) from error


def _cause(verb: str, path: Path, error: Any) -> BaseException:
    """What went wrong in one of the processes; a signal before anything else."""
    found = [held for held, _ in error.failures.values()]
    for kind in (KeyboardInterrupt, SystemExit, Damaged, OSError):
        for each in found:
            if isinstance(each, kind):
                return each
    why = str(found[0]).strip().splitlines() or [type(found[0]).__name__]
    return ValueError(f"cannot {verb} the checkpoint {path}: {why[-1]}")


def _at(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step:08d}"


def _facts(path: Path, step: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The facts of a checkpoint and the index of its parts, both with values that can be."""
    from .checkpoint_parts import checked_index

    file = path / "facts.json"
    if not file.exists():
        raise damaged(path, "it has no facts.json", DAMAGED_CHECKPOINT)
    try:
        facts = read_object(file)
    except Damaged as error:
        raise damaged(file, error.why, DAMAGED_CHECKPOINT) from None
    if why := _wrong(facts, step):
        raise damaged(file, why, DAMAGED_CHECKPOINT)
    older = "tensors" not in facts and (path / ".metadata").exists()
    index = None if older else checked_index(file, facts)
    return {name: facts[name] for name in ("step", "ema_updates", "unread")}, index


def _wrong(facts: dict[str, Any], step: int) -> str | None:
    """What cannot be true of a checkpoint of this step."""
    for name in ("step", "ema_updates", "unread"):
        if name not in facts:
            return f"{name} is missing"
    if type(facts["step"]) is not int or facts["step"] != step:
        return f"its folder is of step {step}, and it says step {str(facts['step'])[:40]}"
    updates, unread = facts["ema_updates"], facts["unread"]
    if type(updates) is not int or not 0 <= updates <= step:
        return f"ema_updates must be between 0 and {step}, and is {str(updates)[:40]}"
    if not isinstance(unread, list) or len(unread) > step or not all(map(_is_pair, unread)):
        return f"unread must be at most {step} pairs of numbers"
    return None


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(each) is float and abs(each) <= _LARGEST for each in value)
    )


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, rising; folders with other names are passed over."""
    found = [int(path.name.removeprefix(_PREFIX)) for path in _folders(folder)]
    return sorted(step for step in found if _at(folder, step).is_dir())


def _folders(folder: Path) -> list[Path]:
    return [p for p in folder.glob(f"{_PREFIX}*") if re.fullmatch("step-[0-9]{8,}", p.name)]


def last(
    folder: Path, skip: Skip | None = None, tensors: dict[str, Any] | None = None
) -> int | None:
    """The last step that has a checkpoint; None without any.

    skip: take the last that is whole and has what fits `tensors`, and call this with what is
    wrong with those after it.
    """
    for step in reversed(steps(folder)):
        try:
            if skip is not None:
                verify(folder, step, tensors)
        except (ValueError, OSError) as error:
            assert skip is not None
            skip(str(error))
            continue
        return step
    if skip is not None and steps(folder):
        raise ValueError(f"no checkpoint in {folder} is whole: begin the run in a new folder")
    return None


def verify(folder: Path, step: int, tensors: dict[str, Any] | None = None) -> None:
    """Read all of a checkpoint; raise ValueError where it is not what was written, or has not
    the names and shapes of `tensors`."""
    path = _at(folder, step)
    reader = _reader(path, _facts(path, step)[1])
    _check_fit(path, reader.metadata, tensors or {})
    places = reader.metadata.storage_data.values()
    for _ in reader.read(sorted(places, key=itemgetter("file", "start"))):
        pass


def forget_after(folder: Path, step: int) -> None:
    """Later checkpoints go: a run that was resumed before them makes them anew."""
    for later in steps(folder):
        if later > step:
            _retire(folder, later)


def rotate(folder: Path, keep: int) -> None:
    """Only the last few stay; what a killed process left unfinished goes."""
    for step in steps(folder)[:-keep]:
        _retire(folder, step)
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def _retire(folder: Path, step: int) -> None:
    """Renamed before it is deleted: half a checkpoint never bears the name."""
    os.replace(_at(folder, step), folder / f"{_UNFINISHED}{step}-{secrets.token_hex(4)}")

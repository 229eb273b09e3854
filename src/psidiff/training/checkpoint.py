"""Checkpoints: whole or absent, the last few kept, readable by any number of processes.

A checkpoint is a folder of data: the tensors in parts (`checkpoint_parts`), and facts.json with
the step, plain numbers and the index of the parts. Every file is held against its checksum.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checksums import damaged
from ..distributed import Processes
from ..files import advising, read_object, sync_folder, write_object
from .checkpoint_parts import (
    DAMAGED_CHECKPOINT,
    Index,
    Reader,
    Tensors,
    all_places,
    checked_index,
    fill,
    read_parts,
    whole_index,
    write_part,
)

_UNFINISHED = "unfinished-"
_LARGEST = torch.finfo(torch.float32).max

Skip = Callable[[str], None]


def save(
    folder: Path, step: int, tensors: Tensors, facts: dict[str, Any], group: Processes
) -> None:
    """Write `tensors` (in parts, if sharded) and `facts` (plain data) under another name, then
    rename: a process killed at any moment leaves no checkpoint that is not whole."""
    final = _at(folder, step)
    if group.told(final.exists):  # a run that stops where it was resumed
        return
    unfinished = group.told(lambda: _another_name(folder, step))
    try:
        group.told(lambda: unfinished.mkdir(parents=True))
        parts = group.each(lambda: write_part(unfinished, tensors, group))
        group.told(lambda: _finish(unfinished, final, facts | whole_index(tensors, parts)))
    except BaseException:
        if group.first:
            shutil.rmtree(unfinished, ignore_errors=True)  # a full disk has room again
        raise


def _finish(unfinished: Path, final: Path, facts: dict[str, Any]) -> None:
    write_object(unfinished / "facts.json", facts)
    os.replace(unfinished, final)
    sync_folder(final.parent)


def load(folder: Path, step: int, tensors: Tensors, group: Processes) -> dict[str, Any]:
    """Fill `tensors` in place; the facts."""
    path = _at(folder, step)
    with advising(DAMAGED_CHECKPOINT):
        facts, index = group.told(lambda: _facts(path, step))
        _check_fit(path, index, tensors)
        group.each(lambda: fill(tensors, index, _reader(path, index)))
    return facts


def _check_fit(path: Path, index: Index, tensors: Tensors) -> None:
    """Raise where a checkpoint has not the tensors that a run needs."""
    for name, tensor in tensors.items():
        stored, wanted = index["tensors"].get(name), tuple(tensor.shape)
        why = f"it has no {name}"
        if stored is not None:
            found = tuple(stored["shape"])
            why = f"its {name} has the shape {found} instead of {wanted}"
            if found == wanted:
                continue
        raise ValueError(f"{path} does not fit this run: {why}; {DAMAGED_CHECKPOINT}")


def _reader(path: Path, index: Index) -> Reader:
    """What reads the chunks of a checkpoint; one whose index has no files is older."""
    if "files" in index:
        return partial(read_parts, path, index["files"])
    from .legacy_checkpoint import read_older

    return partial(read_older, path)


def _at(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _facts(path: Path, step: int) -> tuple[dict[str, Any], Index]:
    """The facts of a checkpoint and the index of its parts, both with values that can be."""
    file = path / "facts.json"
    if not file.exists():
        raise damaged(path, "it has no facts.json")
    facts = read_object(file)
    if why := _wrong(facts, step):
        raise damaged(file, why)
    if "tensors" not in facts and (path / ".metadata").exists():
        from .legacy_checkpoint import older_index

        index = older_index(path)
    else:
        index = checked_index(file, facts)
    return {name: facts[name] for name in ("step", "ema_updates", "unread")}, index


def _wrong(facts: dict[str, Any], step: int) -> str | None:
    """What cannot be true of a checkpoint of this step."""
    said, updates, unread = map(facts.get, ("step", "ema_updates", "unread"))
    if type(said) is not int or said != step:
        return f"its folder is of step {step}, and it says step {str(said)[:40]}"
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
    names = (re.fullmatch("step-([0-9]{8,})", path.name) for path in folder.glob("step-*"))
    found = (int(name[1]) for name in names if name)
    return sorted(step for step in found if _at(folder, step).is_dir())


def last(folder: Path, skip: Skip | None = None, tensors: Tensors | None = None) -> int | None:
    """The last step that has a checkpoint; None without any.

    skip: take the last that is whole and has what fits `tensors`, and call this with what is
    wrong with those after it.
    """
    for step in reversed(steps(folder)):
        if skip is None:
            return step
        try:
            verify(folder, step, tensors)
            return step
        except (ValueError, OSError) as error:
            skip(str(error))
    if skip is not None and steps(folder):
        raise ValueError(f"no checkpoint in {folder} is whole: begin the run in a new folder")
    return None


def verify(folder: Path, step: int, tensors: Tensors | None = None) -> None:
    """Read all of a checkpoint; raise ValueError where it is not what was written, or has not
    the names and shapes of `tensors`."""
    path = _at(folder, step)
    with advising(DAMAGED_CHECKPOINT):
        _, index = _facts(path, step)
        _check_fit(path, index, tensors or {})
        for _ in _reader(path, index)(all_places(index)):
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
    os.replace(_at(folder, step), _another_name(folder, step))


def _another_name(folder: Path, step: int) -> Path:
    """Of what is not yet, or no longer, a checkpoint."""
    return folder / f"{_UNFINISHED}{step}-{secrets.token_hex(4)}"

"""Area disk: commands that write to a disk which is full at some moment.

Right: one sentence, and nothing half written that passes as whole: the same command on a larger
disk gives what an undisturbed one gives. The disk is a tmpfs; who may not mount one gets a
bound on the size of files instead.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from . import kills
from .examples import COMPARE, SAMPLE, Examples
from .files import _FRESH
from .report import Outcome, remove
from .workers import Ended, run

_SECONDS = 30.0
_ROOM = 2**30  # bytes, enough for all
_TRACED = ("sample", "model", "-n", 2, "--steps", 3, "--device", "cpu", "--trace", "b.trace")


@dataclass(frozen=True)
class Written:
    """A command, what it leaves, and how it goes on."""

    group: str
    remove: str | None  # what the example has of it already
    command: Sequence[Any]
    again: Sequence[Any]
    left: str


WRITTEN = [
    Written("shards", "shards", (*SAMPLE, "--out", "shards"), ("--resume",), "shards"),
    Written("run", "run", _FRESH, ("--resume",), "run"),
    Written("trace", None, _TRACED, (), "b.trace"),
    Written("official", None, ("convert", "model.ckpt", "out"), (), "out"),
    Written("trace", None, ("replay", "a.trace", "--out", "page.html"), (), "page.html"),
    Written("report", "report", COMPARE, (), "report"),
]
_VARIES = ("run.json", "log.jsonl", "cells-0.jsonl", "config.yaml", "report.html", "index.html")


class Disk:
    """The tries of this area, one command each."""

    def __init__(self, seed: int, root: Path) -> None:
        self.seed, self.root = seed, root
        self.examples = Examples(root / "examples")
        self.undisturbed = cache(self._undisturbed)
        self.said = root / "said"  # on another disk than the full one
        self.said.mkdir(exist_ok=True)

    def try_one(self, number: int) -> Outcome:
        rng = np.random.default_rng((self.seed, 5, number))
        place = number % len(WRITTEN)
        folder = self.root / "case"
        try:
            wanted, held, size = self.undisturbed(place)
        except RuntimeError as error:
            return Outcome("an example", f"it cannot be made: {error}")
        bound = int(held + rng.uniform(0, 1.1) * size)
        mounted = rng.random() < 0.7 and _mount(folder, _ROOM)
        try:
            return self._try(WRITTEN[place], folder, bound, mounted, wanted)
        finally:
            if mounted:
                _unmount(folder)
            remove(folder)

    def _try(
        self, work: Written, folder: Path, bound: int, mounted: bool, wanted: dict[str, bytes]
    ) -> Outcome:
        if mounted:  # what the command makes anew is on it for a moment, and then gone
            self._fill(work, folder / "on-it")
            _mount(folder, bound, again=True)
        else:
            self._fill(work, folder)
        place = folder / "on-it" if mounted else folder
        limit = {} if mounted else {"size": max(bound // 4, 1)}
        ended = run(work.command, place, _SECONDS, said_in=self.said, **limit)
        kind = f"a disk of {bound:,} bytes" if mounted else f"files of {bound // 4:,} bytes"
        what = f"{kind}; psidiff {' '.join(map(str, work.command))}"
        made = Outcome(what, _of_full(ended), ended.sentence, ended.seconds, ended.peak)
        made.counts = {"refused": float(ended.code == 2)}
        if made.failure is None and mounted:
            _mount(folder, _ROOM, again=True)
        if made.failure is None:
            made.failure = self._goes_on(work, place, wanted)
        return made

    def _goes_on(self, work: Written, folder: Path, wanted: dict[str, bytes]) -> str | None:
        """With room enough the command makes all of it."""
        begun = any(
            (folder / work.left / n).is_file() for n in ("config.yaml", "sampling.json")
        )
        ended = run((*work.command, *(work.again if begun else ())), folder, _SECONDS)
        if why := ended.failure((0,)):
            return f"with room it does not go on: {why}"
        return kills.difference(_left(folder, work), wanted)

    def _fill(self, work: Written, folder: Path) -> None:
        self.examples.copy(work.group, folder)
        if work.remove is not None:
            remove(folder / work.remove)

    def _undisturbed(self, place: int) -> tuple[dict[str, bytes], int, int]:
        """What is left of the command, the bytes it needs at the start, and those it writes."""
        folder, work = self.root / "case", WRITTEN[place]
        remove(folder)
        self._fill(work, folder)
        held = _bytes_in(folder)
        ended = run(work.command, folder, _SECONDS)
        if ended.code != 0:
            raise RuntimeError(f"{work.command}: {ended.err}")
        wanted, written = _left(folder, work), _bytes_in(folder) - held
        remove(folder)
        return wanted, held, written


def _of_full(ended: Ended) -> str | None:
    if why := ended.failure():
        return why
    if ended.code == 2 and not any(
        word in ended.sentence
        for word in ("No space", "too large", "cannot be written", "full")
    ):
        return f"it does not say that the disk is full: {ended.sentence}"
    return None


def _left(folder: Path, work: Written) -> dict[str, bytes]:
    path = folder / work.left
    found = kills.files_of(path) if path.is_dir() else {path.name: path.read_bytes()}
    return {
        name: _without_times(data) if name.endswith(".md") else data
        for name, data in found.items()
        if Path(name).name not in _VARIES and "checkpoints/" not in name
    }


def _without_times(report: bytes) -> bytes:
    """A report without the columns and the line that say what it cost and when."""
    lines: list[str] = []
    costs: list[int] = []
    for line in report.decode().splitlines():
        cells = line.split("|")
        if "seconds" in line and len(cells) > 1:
            costs = [i for i, cell in enumerate(cells) if cell.strip() in ("seconds", "MiB")]
        if len(cells) > 1:
            line = "|".join(cell for i, cell in enumerate(cells) if i not in costs)
        if not line.startswith("- time: "):
            lines.append(line)
    return "\n".join(lines).encode()


def _bytes_in(folder: Path) -> int:
    """In pages, as a tmpfs counts, with one for each folder."""
    return sum(
        4096 * (1 + -(-path.stat().st_size // 4096)) if path.is_file() else 4096
        for path in folder.rglob("*")
    )


def _mount(folder: Path, size: int, again: bool = False) -> bool:
    """A disk of so many bytes; False where nobody may mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"{'remount,' if again else ''}size={max(size, 4096)}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True)

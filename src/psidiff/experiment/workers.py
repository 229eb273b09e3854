"""Processes that share the work in one folder: who is there, and who makes which piece."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..files import parts_in
from ..locks import Lock, Locked, held_by

_PATIENCE = 60.0  # seconds until somebody at the gate is taken for stuck
_GATE = ".gate.lock"
_LEFT = re.compile(
    r"\.(gate|worker-[0-9a-f]{16}|shard-\d+)\.lock"
    r"|(shard-\d+\.\w+|sampling\.json)\.part"  # of earlier versions
)


class Workers:
    """This process among all that work in a folder. Whoever is killed holds nothing.

    what: what they do, said to others.
    force: go past owners of locks that cannot be asked, as in `Lock`.
    """

    def __init__(self, folder: Path, what: str, force: bool = False) -> None:
        self.folder, self.what, self.force = folder, what, force
        self._mine = Lock(folder / f".worker-{secrets.token_hex(8)}.lock", what, force)

    @contextmanager
    def gate(self) -> Iterator[bool]:
        """Nobody comes or goes meanwhile. Gives whether others are at work."""
        until = time.monotonic() + _PATIENCE
        gate = Lock(self.folder / _GATE, self.what, self.force)
        while True:
            try:
                gate.__enter__()
                break
            except Locked:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
        try:
            others = self._others()
            if not others:
                self._tidy()
            yield others
        finally:
            gate.__exit__(None, None, None)

    def join(self) -> None:
        """Be one of them; inside the gate."""
        self._mine.__enter__()

    def leave(self) -> None:
        """The last one clears away what killed ones left."""
        self._mine.__exit__(None, None, None)
        with self.gate():
            pass

    @contextmanager
    def claim(self, piece: str) -> Iterator[bool]:
        """Whether this process may make a piece now; nobody else does so meanwhile."""
        lock = Lock(self.folder / f".{piece}.lock", self.what, self.force)
        try:
            lock.__enter__()
        except Locked:
            yield False
            return
        try:
            yield True
        finally:
            lock.__exit__(None, None, None)

    def leftovers(self) -> list[Path]:
        """Locks, and files that are not finished."""
        locks = [path for path in self.folder.iterdir() if _LEFT.fullmatch(path.name)]
        return [*locks, *parts_in(self.folder)]

    def _others(self) -> bool:
        return any(held_by(path) for path in self.folder.glob(".worker-*.lock"))

    def _tidy(self) -> None:
        for path in self.leftovers():
            if path.name != _GATE:
                with suppress(OSError):
                    path.unlink()

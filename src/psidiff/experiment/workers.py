"""Processes that share the work in one folder: who is there, and who makes which piece."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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
        self._mine = self._lock(f".worker-{secrets.token_hex(8)}.lock")

    @contextmanager
    def gate(self) -> Iterator[bool]:
        """Nobody comes or goes meanwhile. Gives whether others are at work."""
        until = time.monotonic() + _PATIENCE
        with ExitStack() as held:
            while True:
                try:
                    held.enter_context(self._lock(_GATE))
                    break
                except Locked:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.02)
            others = any(held_by(path) for path in self.folder.glob(".worker-*.lock"))
            if not others:
                self._tidy()
            yield others

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
        with ExitStack() as held:
            mine = False
            with suppress(Locked):
                held.enter_context(self._lock(f".{piece}.lock"))
                mine = True
            yield mine

    def leftovers(self) -> list[Path]:
        """Locks, and files that are not finished."""
        locks = [path for path in self.folder.iterdir() if _LEFT.fullmatch(path.name)]
        return [*locks, *parts_in(self.folder)]

    def _lock(self, name: str) -> Lock:
        return Lock(self.folder / name, self.what, self.force)

    def _tidy(self) -> None:
        for path in self.leftovers():
            if path.name != _GATE:
                with suppress(OSError):
                    path.unlink()

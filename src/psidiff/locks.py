"""Locks on folders and files: who is writing here, and whether they still live.

The kernel's lock (flock, which Linux also keeps on NFS) goes when its process dies, so nothing
stale is left by a kill. Where a file system has no locks, the owner named in the file decides:
a process of this machine that is gone holds nothing, one of another machine does until it is
forced.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_BUSY = (BlockingIOError, PermissionError)
_OPEN = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)  # a link may lead anywhere


class Locked(ValueError):
    """Another process holds the lock."""


class Lock:
    """A lock in the file `path`, held while it is entered.

    what: what its holder does, such as "training"; said to others.
    force: take it from an owner that cannot be asked (another machine, without kernel locks).

    Raises Locked when it is entered and another process holds it.
    """

    def __init__(self, path: Path, what: str, force: bool = False) -> None:
        self.path = path
        self.what = what
        self.force = force
        self._file: int | None = None

    @contextmanager
    def when_free(self, seconds: float, pause: float = 0.02) -> Iterator[None]:
        """Held as soon as the other process lets it go; Locked if that takes longer."""
        until = time.monotonic() + seconds
        with ExitStack() as held:
            while True:
                try:
                    held.enter_context(self)
                    break
                except Locked:
                    if time.monotonic() > until:
                        raise
                    time.sleep(pause)
            yield

    def __enter__(self) -> Lock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while not self._try():
            pass
        assert self._file is not None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(_this_process(self.what)).encode(), 0)
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._file is not None
        with suppress(OSError):
            os.unlink(self.path)  # before the lock goes, so that nobody takes a dead file
        os.close(self._file)
        self._file = None

    def _try(self) -> bool:
        """One try. False: the file went away meanwhile, try again."""
        with ExitStack() as failed:
            handle = os.open(self.path, _OPEN | os.O_CREAT, 0o666)
            failed.callback(os.close, handle)
            try:
                if not _kernel_locks(handle):
                    self._check_owner(_owner(handle))
            except _BUSY:
                raise Locked(_sentence(self.path, _owner(handle))) from None
            if _is_named(handle, self.path):
                failed.pop_all()
                self._file = handle
        return self._file is not None

    def _check_owner(self, owner: dict[str, Any]) -> None:
        """Without kernel locks: whether who is named in the file may still be at work."""
        if owner and not self.force and _may_live(owner):
            hint = " (if that process is gone, --force takes the folder)"
            raise Locked(_sentence(self.path, owner) + hint)


def held_by(path: Path) -> dict[str, Any] | None:
    """Who holds the lock in this file now; None if nobody does."""
    try:
        handle = os.open(path, _OPEN)
    except OSError:
        return None
    try:
        if _kernel_locks(handle):
            return None
        owner = _owner(handle)
        return owner if owner and _may_live(owner) else None
    except _BUSY:
        return _owner(handle) or {"what": "at work"}
    finally:
        os.close(handle)


def _kernel_locks(handle: int) -> bool:
    """Take the kernel's lock. False where there is no such thing; _BUSY where it is taken."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except _BUSY:
        raise
    except OSError:
        return False
    return True


def _is_named(handle: int, path: Path) -> bool:
    """The locked file is the one that bears the name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(handle))
    return False


def _this_process(what: str) -> dict[str, Any]:
    return {
        "what": what,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": _started(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _owner(handle: int) -> dict[str, Any]:
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _may_live(owner: dict[str, Any]) -> bool:
    """A process of another machine may; one of this machine does or does not."""
    if owner.get("host") != socket.gethostname():
        return True
    started = _started(owner.get("pid"))
    return started is not None and started == owner.get("started")


def _started(pid: Any) -> str | None:
    """When a process of this machine was started, in the kernel's count; None if it is gone."""
    if not isinstance(pid, int) or pid <= 0:
        return None
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    if Path("/proc/self/stat").exists() or os.name == "nt":
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "alive"


def _sentence(path: Path, owner: dict[str, Any]) -> str:
    who = "another process"
    if owner.get("pid"):
        who = f"process {owner['pid']} on {owner.get('host')} (since {owner.get('since')})"
    return f"{path.parent} is in use: {who} is {owner.get('what', 'at work')} there"

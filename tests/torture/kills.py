"""What the two areas of kills share: processes that are signalled at random moments."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .workers import Ended, Worker

SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "SIGINT SIGINT")
PATIENCE = 60.0  # seconds for a whole run, or for the others after one is gone
_RIGHT = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 130, 143)


def environments(world: int) -> list[dict[str, str]]:
    """What torchrun would tell each of so many processes."""
    if world == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world)]


def start(arguments: Sequence[Any], folder: Path, environment: dict[str, str]) -> Worker:
    """A command at low priority, whose memory is not bounded: gloo maps much."""
    says = f"said-{time.monotonic_ns()}"
    return Worker(arguments, folder, env=environment, memory=None, nice=10, says=says)


def disturb(rng: np.random.Generator, workers: list[Worker], most: float, all_: bool) -> int:
    """Signal one of the workers, or all, after a random while; how many signals hit.

    all_: they belong together, as under torchrun: what hits one by SIGTERM or SIGINT hits all,
    and when one is gone the others are asked to end.
    """
    words = str(rng.choice(SIGNALS)).split()
    end = time.monotonic() + float(rng.uniform(0, most))
    while time.monotonic() < end and any(worker.alive() for worker in workers):
        time.sleep(0.002)
    chosen = [workers[int(rng.integers(len(workers)))]]
    if all_ and words[0] != "SIGKILL":
        chosen = workers
    hits = 0
    for i, word in enumerate(words):
        if i:
            time.sleep(float(rng.uniform(0, 0.1)))
        hits += any([worker.alive() for worker in chosen])
        for worker in chosen:
            worker.kill(getattr(signal, word))
    if all_ and hits:
        _end_together(workers)
    return min(hits, 1)


def _end_together(workers: list[Worker]) -> None:
    """As torchrun does: when one is gone, the others are asked, and then made to go."""
    until = time.monotonic() + PATIENCE / 4
    while any(w.alive() for w in workers) and time.monotonic() < until:
        if not all(w.alive() for w in workers):
            for worker in workers:
                worker.kill(signal.SIGTERM)
            until = min(until, time.monotonic() + PATIENCE / 6)
            while any(w.alive() for w in workers) and time.monotonic() < until:
                time.sleep(0.01)
        time.sleep(0.01)
    for worker in workers:
        worker.kill(signal.SIGKILL)


def wrong_end(ended: Ended, alone: bool) -> str | None:
    """Why a process that was signalled did not end as it may."""
    if ended.late:
        return f"it hangs: {ended.err[-1500:]}"
    if not alone:
        return None  # of one that lost its peers anything is right but to go on for ever
    if ended.code not in _RIGHT or "Traceback" in ended.err:
        return f"after a signal exit code {ended.code}: {ended.err[-1500:]}"
    return None


def files_of(folder: Path) -> dict[str, bytes]:
    """All whole files of a folder, by their names in it."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in found
        if not path.name.startswith(".") or path.name == ".metadata"
    }


def left_behind(folder: Path) -> list[str]:
    """Parts of files and locks that a finished run should not leave."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name.endswith(".part") or "unfinished" in path.name or "lock" in path.name
    ]


def difference(found: dict[str, bytes], wanted: dict[str, bytes]) -> str | None:
    """The first file that is not as it should be."""
    for name in sorted({*found, *wanted}):
        if name not in found:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} is there, and is not in an undisturbed run"
        if found[name] != wanted[name]:
            return f"{name} differs from that of an undisturbed run"
    return None

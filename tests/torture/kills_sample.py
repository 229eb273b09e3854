"""Area kills-sample: samplers are killed at random moments and resumed until all is made; then
every file is that of an undisturbed run, bit by bit.

One process, two under torchrun's environment, or two samplers that share a folder unasked.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from . import kills
from .examples import Examples
from .report import Outcome, remove
from .workers import Ended

_KILLS = 3
_COMMAND = (
    *("sample", "model", "-n", 40, "--shard-size", 2, "--steps", 12, "--kappa", "cap:.02"),
    *("--batch-size", 2, "--device", "cpu", "--out", "shards", "--resume"),
)
_MODES = ("one process", "two processes", "two samplers")


class KillsSample:
    """The tries of this area, one folder of samples each."""

    def __init__(self, seed: int, root: Path) -> None:
        self.seed, self.root = seed, root
        self.examples = Examples(root / "examples")
        self.undisturbed = cache(self._undisturbed)

    def try_one(self, number: int) -> Outcome:
        rng = np.random.default_rng((self.seed, 3, number))
        mode = _MODES[number % len(_MODES)]
        folder = self.root / f"try-{number}"
        made = Outcome(mode, counts={})
        try:
            self.examples.copy("shards", folder)
            remove(folder / "shards")
            made.failure = self._try(rng, mode, folder, made)
        finally:
            remove(folder)
        return made

    def _try(
        self, rng: np.random.Generator, mode: str, folder: Path, made: Outcome
    ) -> str | None:
        wanted, seconds = self.undisturbed()
        together = mode == "two processes"
        hits = starts = 0
        while hits < _KILLS and starts < 3 * _KILLS:
            starts += 1
            workers = _start(folder, mode)
            hit = kills.disturb(rng, workers, 1.1 * seconds, all_=together)
            ended = [worker.wait(kills.PATIENCE) for worker in workers]
            hits += hit
            _count(made, ended, hit)
            for each in ended:
                if why := kills.wrong_end(each, not together or not hit):
                    return why
            if not hit:
                break
        if why := _finish(folder, mode, made):
            return why
        made.counts["left behind"] = len(kills.left_behind(folder / "shards"))
        return kills.difference(kills.files_of(folder / "shards"), wanted)

    def _undisturbed(self) -> tuple[dict[str, bytes], float]:
        folder = self.root / "whole"
        remove(folder)
        self.examples.copy("shards", folder)
        remove(folder / "shards")
        made = Outcome("")
        if why := _finish(folder, _MODES[0], made):
            raise RuntimeError(why)
        wanted = kills.files_of(folder / "shards")
        remove(folder)
        return wanted, made.seconds


def _start(folder: Path, mode: str) -> list[Any]:
    world = 2 if mode == "two processes" else 1
    places = kills.environments(world) * (2 if mode == "two samplers" else 1)
    return [kills.start(_COMMAND, folder, each) for each in places]


def _finish(folder: Path, mode: str, made: Outcome) -> str | None:
    ended = [worker.wait(kills.PATIENCE) for worker in _start(folder, mode)]
    _count(made, ended, 0)
    if any(each.code or each.late for each in ended):
        return "resumed, it does not finish: " + "; ".join(
            f"exit code {each.code}: {each.err[-1500:]}" for each in ended
        )
    return None


def _count(made: Outcome, ended: list[Ended], hits: int) -> None:
    made.counts["kills"] = made.counts.get("kills", 0) + hits
    made.counts["starts"] = made.counts.get("starts", 0) + 1
    made.seconds = max(made.seconds, *(each.seconds for each in ended))
    made.peak = max(made.peak, *(each.peak for each in ended))

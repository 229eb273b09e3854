"""Area kills-train: a training is killed at random moments and resumed until it is finished;
then everything it leaves is that of an undisturbed run, bit by bit.

Under one process and two; now and then a second training tries to use the same folder.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from . import kills
from .examples import write_recipe, write_words
from .report import Outcome, remove
from .workers import Ended

_KILLS = 3  # of each try, at most
_TIMES = ("samples_per_second", "tokens_per_second", "memory_gib", "seconds_left")
_VARIES = ("run.json", "log.jsonl", "psidiff.log")  # they tell of times and starts


class KillsTrain:
    """The tries of this area, one run each."""

    def __init__(self, seed: int, root: Path) -> None:
        self.seed, self.root = seed, root
        self.undisturbed = cache(self._undisturbed)

    def try_one(self, number: int) -> Outcome:
        rng = np.random.default_rng((self.seed, 2, number))
        world = 1 + number % 2
        folder = self.root / "here"  # its path is in files of the run
        made = Outcome(f"{world} process{'es' * (world > 1)}", counts={})
        self.undisturbed(world)
        try:
            self._prepare(folder)
            made.failure = self._try(rng, world, folder, made)
        finally:
            remove(folder)
        return made

    def _try(
        self, rng: np.random.Generator, world: int, folder: Path, made: Outcome
    ) -> str | None:
        wanted, seconds = self.undisturbed(world)
        hits = starts = 0
        while hits < _KILLS and starts < 3 * _KILLS:
            starts += 1
            workers = self._start(folder, world)
            second = []
            if world == 1 and rng.random() < 0.3:
                second = [kills.start(_command(folder), folder, {})]
            hit = kills.disturb(rng, workers, 1.1 * seconds, all_=world > 1)
            ended = [worker.wait(kills.PATIENCE) for worker in workers]
            hits += hit
            _count(made, ended, hit)
            for each in ended:
                if second and each.code == 2 and "is in use: " in each.err:
                    continue  # the second training was there first
                if why := kills.wrong_end(each, world == 1 or not hit):
                    return why
            for worker in second:
                if why := self._refused(worker.wait(kills.PATIENCE), made):
                    return why
            if not hit:
                break
        if why := self._finish(folder, world, made):
            return why
        made.counts["left behind"] = len(kills.left_behind(folder / "run"))
        found = _lasting(folder / "run")
        kept = [len(_checkpoints(files)) for files in (found, wanted)]
        if kept[0] != kept[1]:
            return f"{kept[0]} checkpoints are kept, {kept[1]} in an undisturbed run"
        # One that asked to stop may have left a checkpoint at a step of its own.
        shared = _checkpoints(found) & _checkpoints(wanted) | {""}
        if max(_checkpoints(wanted)) not in shared:
            return "the last checkpoint is that of another step"
        return kills.difference(
            *(
                {n: d for n, d in files.items() if _checkpoint(n) in shared}
                for files in (found, wanted)
            )
        )

    def _finish(self, folder: Path, world: int, made: Outcome) -> str | None:
        """Resumed without a kill, it must end."""
        ended = [worker.wait(kills.PATIENCE) for worker in self._start(folder, world)]
        _count(made, ended, 0)
        if any(each.code or each.late for each in ended):
            return "resumed, it does not finish: " + "; ".join(
                f"exit code {each.code}: {each.err[-1500:]}" for each in ended
            )
        return None

    def _refused(self, ended: Ended, made: Outcome) -> str | None:
        """A second training in the folder is refused in one sentence, or finds it free."""
        made.counts["second trainings"] = made.counts.get("second trainings", 0) + 1
        if ended.code not in (0, 2) or ended.late or "Traceback" in ended.err:
            return f"a second training: exit code {ended.code}: {ended.err[-1500:]}"
        return None

    def _start(self, folder: Path, world: int) -> list[Any]:
        command = _command(folder)
        return [kills.start(command, folder, each) for each in kills.environments(world)]

    def _prepare(self, folder: Path) -> None:
        remove(folder)
        folder.mkdir()
        write_words(folder / "words.txt")
        write_recipe(
            folder / "tiny.yaml",
            folder / "words.txt",
            steps=48,
            batch_size=8,
            micro_batch=4,
            log_every=2,
            save_every=6,
            eval_every=24,
        )

    def _undisturbed(self, world: int) -> tuple[dict[str, bytes], float]:
        folder = self.root / "here"
        self._prepare(folder)
        made = Outcome("")
        if why := self._finish(folder, world, made):
            raise RuntimeError(why)
        wanted = _lasting(folder / "run")
        remove(folder)
        return wanted, made.seconds


def _checkpoint(name: str) -> str:
    """The checkpoint that a file belongs to; nothing for the others."""
    folder, _, rest = name.partition("/")
    return rest.partition("/")[0] if folder == "checkpoints" else ""


def _checkpoints(files: dict[str, bytes]) -> set[str]:
    return {_checkpoint(name) for name in files} - {""}


def _command(folder: Path) -> list[Any]:
    begun = (folder / "run" / "config.yaml").is_file()
    resume = ["--resume"] if begun else []
    return ["train", "tiny.yaml", "--out", "run", "--device", "cpu", *resume]


def _count(made: Outcome, ended: list[Ended], hits: int) -> None:
    made.counts["kills"] = made.counts.get("kills", 0) + hits
    made.counts["starts"] = made.counts.get("starts", 0) + 1
    made.seconds = max(made.seconds, *(each.seconds for each in ended))
    made.peak = max(made.peak, *(each.peak for each in ended))


def _lasting(run: Path) -> dict[str, bytes]:
    """What may not depend on kills: all files; of the log all but times."""
    found = {
        name: data
        for name, data in kills.files_of(run).items()
        if Path(name).name not in _VARIES and not name.endswith(".part")
    }
    for name in sorted(found):
        if name.startswith("checkpoints/") and name.endswith((".json", ".metadata")):
            found.pop(name)  # facts and indexes: what they say of tensors is in those
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    lines = [
        json.dumps({k: v for k, v in r.items() if k not in (*_TIMES, "checksum")})
        for r in records
    ]
    return {**found, "log.jsonl without times": "\n".join(lines).encode()}

"""Area bits: one flipped bit in a file that carries a checksum must be noticed.

Noticed: a sentence that names the file, or a file that is whole again afterwards. A bit that
changes no value (the e of 1e-05 becomes E) is no damage, and is counted apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import mutations as m
from .examples import SAMPLE, Examples
from .files import _FRESH, _LOAD, _RESUME
from .report import Outcome, remove
from .workers import run

_ON = (*SAMPLE, "--out", "shards", "--resume")


@dataclass(frozen=True)
class Sealed:
    """Files with a checksum, and the command that must notice."""

    name: str
    group: str
    files: str
    command: Sequence[Any]


SEALED = [
    Sealed("weights", "shards", "model/model.safetensors", _LOAD),
    Sealed("psidiff.json", "shards", "model/psidiff.json", _LOAD),
    Sealed("codec.json", "shards", "model/codec.json", _LOAD),
    Sealed("shard", "shards", "shards/shard-*.npz", _ON),
    Sealed("shard.jsonl", "shards", "shards/shard-*.jsonl", _ON),
    Sealed("sampling.json", "shards", "shards/sampling.json", _ON),
    Sealed("trace", "trace", "a.trace", ("replay", "a.trace")),
    Sealed("facts", "run", "run/checkpoints/step-00000004/*.json", _RESUME),
    Sealed("checkpoint", "run", "run/checkpoints/step-00000004/*", _RESUME),
    Sealed("checkpoint", "run", "run/checkpoints/step-00000004/*", _RESUME),
    Sealed("stored recipe", "run", "run/config.yaml", _RESUME),
    Sealed("run codec", "run", "run/codec.json", _RESUME),
    Sealed("run.json", "run", "run/run.json", _RESUME),
    Sealed("log", "run", "run/log.jsonl", _RESUME),
    Sealed("store", "store", "cache/tokens/*/*", _FRESH),
]


class Bits:
    """The tries of this area, one bit each."""

    def __init__(self, seed: int, root: Path) -> None:
        self.seed, self.root = seed, root
        self.examples = Examples(root / "examples")

    def try_one(self, number: int) -> Outcome:
        rng = np.random.default_rng((self.seed, 4, number))
        sealed = SEALED[number % len(SEALED)]
        folder = self.root / "case"
        try:
            self.examples.copy(sealed.group, folder)
            return self._try(rng, sealed, folder)
        except RuntimeError as error:
            return Outcome("an example", f"it cannot be made: {error}")
        finally:
            remove(folder)

    def _try(self, rng: m.Rng, sealed: Sealed, folder: Path) -> Outcome:
        found = sorted(path for path in folder.glob(sealed.files) if path.is_file())
        path = m.pick(rng, found)
        whole = path.read_bytes()
        flipped = m.flip_bit(rng, whole)
        path.write_bytes(flipped)
        ended = run(sealed.command, folder)
        failure, how = ended.failure(), "refused"
        place = next(i for i, (a, b) in enumerate(zip(whole, flipped, strict=True)) if a != b)
        what = f"{sealed.name}: {path.relative_to(folder)} at byte {place:,} of {len(whole):,}"
        if failure is None and ended.code == 0:
            how = "remade"
            if not path.is_file() or path.read_bytes() != whole:
                how = "the same values"
                if not _same_values(path.name, whole, flipped):
                    how, failure = "undetected", f"the flipped bit is not noticed: {ended.err}"
        elif failure is None and path.name not in ended.sentence:
            failure = f"the file is not named: {ended.sentence}"
        counts = {how: 1.0}
        return Outcome(what, failure, ended.sentence, ended.seconds, ended.peak, counts)


def _same_values(name: str, whole: bytes, flipped: bytes) -> bool:
    """Whether JSON means the same as before."""
    if not name.endswith((".json", ".jsonl")):
        return False
    try:
        return [json.loads(line) for line in whole.split(b"\n") if line] == [
            json.loads(line) for line in flipped.split(b"\n") if line
        ]
    except ValueError:
        pass
    try:
        return json.loads(whole) == json.loads(flipped)
    except ValueError:
        return False

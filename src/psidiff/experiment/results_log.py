"""The records of a comparison in their folder, beside the protocol they were all made by."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from ..checksums import KEY, damaged
from ..files import (
    append_json_lines,
    check_plain,
    json_line,
    known_version,
    read_json_lines,
    read_object,
    write_atomic,
    write_object,
)
from ..limits import read_bytes
from ..locks import Lock
from ..registry import fits


@dataclass(frozen=True)
class Cell:
    """One setting of one model."""

    model: str
    steps: int
    kappa: str
    top_p: float | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Protocol:
    """What all cells have in common."""

    samples: int = 64
    seed: int = 0
    judge: str | None = None
    protocol: str = "exact"  # of the judge, or released
    reference: str | None = None
    features: str | None = None
    clues: str | int = 24
    error: float = 4.0  # of the toys' denoiser, in nats on its logits
    truth: str | None = None
    last: str | None = None
    dtype: str = "auto"
    metrics: str | None = None  # beside those of the model's kind, apart by commas


class ResultsLog:
    """The records of a folder; what was being written when a run was killed does not count.

    lock: while it is held, no other process adds to the part of this one.
    """

    def __init__(self, folder: Path, protocol: Protocol, rank: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        check_plain(folder)
        self.path = folder / f"cells-{rank}.jsonl"
        self.lock = Lock(folder / f".cells-{rank}.lock", "comparing")
        self._ready = False
        stored, mine = folder / "protocol.json", asdict(protocol)
        if stored.exists():
            before = read_object(stored)
            for name, value in mine.items():
                begun = before.get(name, getattr(Protocol, name))  # an older one says less
                if begun != value:
                    raise ValueError(
                        f"{folder} was begun with {name} = {begun}, and this asks for {value}: "
                        "name another --out"
                    )
        elif rank == 0:
            write_object(stored, mine, indent=1)

    def records(self) -> list[dict[str, Any]]:
        paths = sorted(self.folder.glob("cells-*.jsonl"))
        return [record for path in paths for record in _read(path)]

    def add(self, record: dict[str, Any]) -> None:
        if not self._ready:  # without half a line; and those of version 1 get their checksums
            held = b"".join(json_line(each) for each in _read(self.path))
            if not self.path.exists() or self.path.read_bytes() != held:
                write_atomic(self.path, held)
            self._ready = True
        append_json_lines(self.path, [record])


def _read(path: Path) -> list[dict[str, Any]]:
    old = path.exists() and KEY.encode() not in read_bytes(path, "unpacked")
    records = read_json_lines(path, cut_lines=old)  # version 1 may have lines of killed runs
    for number, record in enumerate(records, 1):
        known_version(f"record {number} of {path}", record)
        if (wrong := _wrong_field(record)) is not None:
            raise damaged(f"record {number} of {path}", f"its {wrong} is not one")
    return records


def _wrong_field(record: dict[str, Any]) -> str | None:
    """What of a record is of a type that a report cannot use."""
    cell, measures = record.get("cell"), record.get("measures")
    if not isinstance(cell, dict):
        return "cell"
    if not isinstance(measures, list) or not all(isinstance(each, dict) for each in measures):
        return "list of measures"
    parts = [("", cell, get_type_hints(Cell)), ("", record, _OF_RECORDS)]
    parts += [("measure's ", each, _OF_MEASURES) for each in measures]
    for whose, held, types in parts:
        for name, kind in types.items():
            if not fits(held.get(name), kind):
                return f"{whose}{name} ({str(held.get(name))[:40]!r})"
    return None


_OF_RECORDS: dict[str, Any] = {
    **dict.fromkeys(("kind", "sampler", "quality", "better"), str),
    **dict.fromkeys(("entropy", "device", "machine", "torch", "time"), str | None),
    **dict.fromkeys(("samples", "length"), int),
    **dict.fromkeys(("nfe", "seconds", "tokens_per_pass"), float),
    **dict.fromkeys(("head_rows_per_token", "peak_memory_mib"), float | None),
    "reference": dict | None,
    "shown": list | None,
}
_OF_MEASURES: dict[str, Any] = {
    "name": str,
    "value": float | None,
    "error": float | None,
    "unit": str | None,
    "protocol": dict | None,
}

"""The records of a comparison in their folder, beside the protocol they were all made by."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import read_object, write_object


@dataclass(frozen=True)
class Protocol:
    """What all cells have in common."""

    samples: int = 64
    seed: int = 0
    judge: str | None = None
    reference: str | None = None
    features: str | None = None
    clues: str | int = 24
    error: float = 4.0  # of the toys' denoiser, in nats on its logits
    truth: str | None = None
    last: str | None = None
    dtype: str = "auto"


class Book:
    """The records of a folder; what was being written when a run was killed does not count."""

    def __init__(self, folder: Path, protocol: Protocol, rank: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"cells-{rank}.jsonl"
        stored, mine = folder / "protocol.json", asdict(protocol)
        if stored.is_file():
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
        return [record for path in paths for record in read_lines(path)]

    def add(self, record: dict[str, Any]) -> None:
        append_line(self.path, json.dumps(record, ensure_ascii=False))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, if there is one; half a line of a killed run does not count."""
    found = []
    for line in path.read_text(encoding="utf-8").split("\n") if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def append_line(path: Path, text: str) -> None:
    """On a line of its own, even after half a line that a killed run left."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else f"\n{text}"
        file.write(f"{text}\n".encode())
        file.flush()
        os.fsync(file.fileno())

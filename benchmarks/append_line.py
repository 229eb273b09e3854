"""Lines that benchmarks append to their files."""

from __future__ import annotations

import os
from pathlib import Path


def append_line(path: Path, text: str) -> None:
    """On a line of its own, even after half a line that a killed run left."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else f"\n{text}"
        file.write(f"{text}\n".encode())
        file.flush()
        os.fsync(file.fileno())

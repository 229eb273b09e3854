"""Cells of an experiment: each is measured once and kept as a line of JSON in docs/results."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from psidiff.files import append_json_line, read_json_lines

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
Cell = dict[str, Any]


def measure(
    name: str,
    cells: Iterable[Cell],
    run: Callable[[Cell], Cell],
    folder: Path | None = None,
) -> None:
    """Run the cells that docs/results/NAME.jsonl does not have yet, one line for each.

    Args:
        name: of the experiment.
        cells: what identifies each cell; JSON values.
        run: cell -> what was measured. Both are stored, with commit, date, device and seconds.
        folder: another one than docs/results.
    """
    path = (folder or RESULTS) / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = [line["cell"] for line in read_json_lines(path)]
    for cell in cells:
        if cell in done:
            continue
        begun = time.perf_counter()
        result = run(cell)
        seconds = round(time.perf_counter() - begun, 3)
        with path.open("ab") as file:
            append_json_line(
                file, {"cell": cell, "result": result, **_origin(), "seconds": seconds}
            )
        print(name, *cell.values(), *(f"{k}={v}" for k, v in result.items()), flush=True)


def lines(name: str) -> list[Cell]:
    """The cells that were measured: cell and result in one mapping."""
    return [
        line["cell"] | line["result"] for line in read_json_lines(RESULTS / f"{name}.jsonl")
    ]


def markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table, as lines."""
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _origin() -> Cell:
    """Where a number comes from."""
    commit = os.environ.get("PSIDIFF_COMMIT")  # of a copy of the sources without git
    if commit is None:
        asked = ["git", "-C", ROOT, "rev-parse", "--short=10", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"commit": commit, "date": date, "device": device, "torch": torch.__version__}

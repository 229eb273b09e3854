"""What became of each try: lines of JSON that add up over runs, and the table of them."""

from __future__ import annotations

import os
import subprocess
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psidiff.files import append_json_line, read_json_lines

MIB = 2**20


@dataclass
class Outcome:
    """One try. failure: why it counts as one, else None.

    what: what was tried; said: what was answered; counts: kills and whatever else is counted.
    """

    what: str
    failure: str | None = None
    said: str = ""
    seconds: float = 0.0
    peak: int = 0  # bytes beyond those at the start
    counts: dict[str, float] = field(default_factory=dict)


class Report:
    """Appends each outcome to a file, and says the failures."""

    def __init__(self, path: Path, seed: int, tell: Any = print) -> None:
        self.path, self.seed, self.tell = path, seed, tell
        self.commit = commit()
        self.tries: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, area: str, number: int, made: Outcome) -> None:
        self.tries[area] += 1
        record = {
            "area": area,
            "number": number,
            "seed": self.seed,
            "commit": self.commit,
            "outcome": "ok" if made.failure is None else "failure",
            "what": made.what,
            "said": (made.failure or made.said)[-2000:],
            "seconds": round(made.seconds, 3),
            "peak_mib": round(made.peak / MIB, 1),
            **({"counts": made.counts} if made.counts else {}),
        }
        with self.path.open("ab") as file:
            append_json_line(file, record)
        if made.failure is not None:
            self.failures[area] += 1
            said = " ".join(made.failure.split())
            said = said if len(said) < 400 else f"{said[:60]} ... {said[-330:]}"
            self.tell(f"FAILURE {area}:{number} --seed {self.seed} ({made.what}): {said}")


def commit() -> str:
    """The commit that is tried, with a + where files differ from it."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("diff", "--stat", "HEAD") else "")


def table(path: Path, of_commit: str | None = None) -> str:
    """Area, tries, failures and what was counted over all lines of the file.

    A try that was repeated counts once, as it went the last time.
    """
    last = {}
    for record in read_json_lines(path):
        if of_commit is None or record["commit"] == of_commit:
            last[record["area"], record["seed"], record["number"]] = record
    areas: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in last.values():
        areas[record["area"]].append(record)
    lines = ["| area | tries | failures | longest (s) | most memory (MiB) | counted |"]
    lines += ["|---|---:|---:|---:|---:|---|"]
    for area, records in sorted(areas.items()):
        failures = sum(record["outcome"] != "ok" for record in records)
        longest = max(record["seconds"] for record in records)
        most = max(record["peak_mib"] for record in records)
        lines.append(
            f"| {area} | {len(records):,} | {failures:,} | {longest:.1f} | {most:,.0f} "
            f"| {_counted(records)} |"
        )
    return "\n".join(lines)


def _counted(records: list[dict[str, Any]]) -> str:
    """Sums of what is counted; of what is measured (max_...) the largest."""
    found: dict[str, float] = {}
    for record in records:
        for name, value in record.get("counts", {}).items():
            join = max if name.startswith("max ") else (lambda a, b: a + b)
            found[name] = join(found.get(name, 0.0), value)
    return ", ".join(f"{name} {value:,.4g}" for name, value in sorted(found.items()))


def remove(path: Path) -> None:
    """A folder with whatever a try left in it."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        os.unlink(path)

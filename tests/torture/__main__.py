"""Try to break psidiff, within bounds of time: python -m tests.torture --minutes 10 --seed 0

Areas: files (damaged and hostile files), bits (one flipped bit), disk (full), kills-train and
kills-sample (killed and resumed), requests (a server under hostile clients). Each try is a
function of area, number and seed; it appends a line to the file that --table adds up.

    python -m tests.torture --only files:17 --seed 3     the same try once more
    python -m tests.torture --table                      the table of all lines
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from .report import Report, table

AREAS = {  # the module, its class, and the share of the time
    "files": ("files", "Files", 3.0),
    "bits": ("bits", "Bits", 1.0),
    "disk": ("disk", "Disk", 0.7),
    "kills-train": ("kills_train", "KillsTrain", 2.5),
    "kills-sample": ("kills_sample", "KillsSample", 2.0),
    "requests": ("requests", "Requests", 2.0),
}


def main() -> int:
    options = _parser().parse_args()
    if options.table:
        print(table(options.out, options.commit))
        return 0
    report = Report(options.out, options.seed)
    if options.only:
        area, _, number = options.only.partition(":")
        numbers = range(int(number), int(number) + 1)
        _work(area, options.seed, numbers, float("inf"), report)
    else:
        areas = [area for area in (options.area or "").split(",") if area] or list(AREAS)
        whole = sum(AREAS[area][2] for area in areas)
        for area in areas:
            seconds = 60 * options.minutes * AREAS[area][2] / whole
            last = options.first + options.tries if options.tries else sys.maxsize
            _work(area, options.seed, range(options.first, last), seconds, report)
    for area, tries in report.tries.items():
        print(f"{area}: {tries:,} tries, {report.failures[area]:,} failures", flush=True)
    return int(bool(report.failures))


def _work(area: str, seed: int, numbers: range, seconds: float, report: Report) -> None:
    """Try after try until the time or the numbers are over."""
    from .workers import prepare

    prepare()
    module, name, _ = AREAS[area]
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="torture-", ignore_cleanup_errors=True) as root:
        tries = getattr(import_module(f".{module}", __package__), name)(seed, Path(root))
        if len(numbers) == 1 and hasattr(tries, "together"):
            tries.together = 1
        try:
            for number in numbers:
                if time.monotonic() > end:
                    break
                report.add(area, number, tries.try_one(number))
        finally:
            if hasattr(tries, "end"):
                for number, made in enumerate(tries.end(), numbers.start):
                    report.add(f"{area}-whole", number, made)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tests.torture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for all areas together")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds, equal tries")
    parser.add_argument("--area", help=f"some of {', '.join(AREAS)}, apart by commas [all]")
    parser.add_argument("--first", type=int, default=0, help="number of the first try")
    parser.add_argument("--tries", type=int, help="so many of each area, at most")
    parser.add_argument("--only", metavar="AREA:NUMBER", help="one try again")
    parser.add_argument("--table", action="store_true", help="print the table, and stop")
    parser.add_argument("--commit", help="of the table: lines of this commit only")
    parser.add_argument("--out", type=Path, default=Path("out/torture.jsonl"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""The Sudoku card: the share of puzzles solved, by clues, sampler and number of steps.

    python benchmarks/sudoku.py MODEL [--masked RUN] --out sudoku.jsonl --device cuda
    python benchmarks/sudoku.py --out sudoku.jsonl --table --figure solved.png

A puzzle is solved if the grid is valid and keeps every clue. All puzzles of a cell are one
batch; the last step is greedy. A cell is a line of JSON, and cells of few steps come first: a
run that was killed goes on by the same command. Without MODEL nothing is measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from append_line import append_line
from sudoku_shown import (
    COMMITTED,
    CONFIDENT,
    EARLY_PSI,
    GUMBEL,
    MOST_CONFIDENT,
    PSI,
    Record,
    figure,
    newest,
    stated,
    table,
)

from psidiff.data.sudoku import Sudoku
from psidiff.evaluation.puzzle_metrics import clue_count, held_out_clues, puzzle_metrics
from psidiff.files import read_json_lines
from psidiff.model import Model, load
from psidiff.process import Masked
from psidiff.sampling import parse_options

CLUES = ("none", "random:24", "random:30", "minimal")
STEPS = (8, 16, 32, 64, 128, 256, 512, 1024)
UNIFORM = (
    "ancestral",
    PSI,
    EARLY_PSI,
    "constant:.5@.05-.6",
    "constant:0@.05-.95",
    "cap:.02",
    "cap:.1",
    "rescale:.05",
    "rescale:.5",
    "ancestral predictor=maximal",
    f"{PSI} predictor=maximal",
    "ancestral corrector=1x8",
    "ancestral corrector=1x16:uncertain",
    f"{PSI} corrector=1x8",
    "ancestral temperature=.1",
    f"{PSI} temperature=.1",
    CONFIDENT,
    GUMBEL,
    COMMITTED,
)
MASKED = ("ancestral", PSI, MOST_CONFIDENT)


def fingerprint(model: Model) -> str:
    """Of the parameters: a model that learnt on is another one."""
    digest = hashlib.sha256()
    for name, value in sorted(model.network.state_dict().items()):
        digest.update(name.encode() + value.cpu().float().numpy().tobytes())
    return digest.hexdigest()[:12]


def measure(model: Model, clues: str, sampler: str, steps: int, args: Any) -> Record:
    """One cell: how many of the puzzles it solves, and what that took."""
    asked = held_out_clues(clues, args.puzzles, args.seed)
    said = {"last": "greedy", **parse_options(sampler)}
    begun = time.perf_counter()
    made = model.sample(
        args.puzzles,
        steps,
        seed=args.seed,
        infill=asked,
        batch_size=args.batch_size or args.puzzles,
        split=False,
        **said,
    )
    grids = made.tokens.cpu()
    seconds = time.perf_counter() - begun
    found = {each.name: each for each in puzzle_metrics(Sudoku(), grids, asked)}
    share = found.get("solved", found["valid"])
    return {
        "shown": 0.0 if asked is None else float((asked >= 0).sum(1).double().mean()),
        "solved": round(share.value * args.puzzles),
        "distinct": int(found["distinct solutions"].value),
        "interval": share.protocol["interval"],
        "nfe": made.nfe,
        "seconds": round(seconds, 3),
        "device": str(model.device),
        "dtype": args.dtype,
        "torch": torch.__version__,
    }


def cells(args: Any) -> Iterator[tuple[str, str, str, int]]:
    """(model, clues, sampler, steps), those of few steps first."""
    for steps in sorted(args.steps):
        for clues in args.clues:
            for sampler in args.samplers or UNIFORM:
                yield args.model, clues, sampler, steps
            for sampler in args.masked_samplers if args.masked else ():
                yield args.masked, clues, sampler, steps


def run(args: Any) -> None:
    """Measure what is missing in the file."""
    models = {n: load(n, args.device, args.dtype) for n in (args.model, args.masked) if n}
    for name, model in models.items():
        if getattr(model.codec, "kind", None) != "puzzle" or model.prior is None:
            raise ValueError(f"{name} is no diffusion model of Sudoku")
    if args.masked and not isinstance(models[args.masked].prior, Masked):
        raise ValueError(f"--masked names {args.masked}, which has no mask")
    weights = {name: fingerprint(model) for name, model in models.items()}
    for model in models.values() if args.compile else ():
        model.compile()
    done = {key(record) for record in read_json_lines(args.out, cut_lines=True)}
    wanted = list(cells(args))
    for number, (name, clues, sampler, steps) in enumerate(wanted, 1):
        about: Record = {
            "model": name,
            "weights": weights[name],
            "masks": isinstance(models[name].prior, Masked),
            "clues": clues,
            "sampler": sampler,
            "steps": steps,
            "puzzles": args.puzzles,
            "seed": args.seed,
        }
        if key(about) in done:
            continue
        record = about | measure(models[name], clues, sampler, steps, args)
        append(args.out, record)
        print(
            f"[{number}/{len(wanted)}] {name}, clues {clues}, {sampler}, {steps} steps: "
            f"{stated(record)} in {record['seconds']:.1f} s",
            flush=True,
        )


def key(record: Record) -> tuple[Any, ...]:
    names = ("model", "weights", "clues", "sampler", "steps", "puzzles", "seed")
    return tuple(record[name] for name in names)


def append(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, json.dumps(record))


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a name that ships, or a run folder")
    parser.add_argument("--masked", metavar="RUN", help="the masked twin")
    parser.add_argument("--out", type=Path, default=Path("out/sudoku.jsonl"))
    parser.add_argument("--clues", type=words, default=list(CLUES))
    parser.add_argument("--steps", type=numbers, default=list(STEPS))
    parser.add_argument(
        "--sampler",
        dest="samplers",
        action="append",
        help="instead of the list; again for more",
    )
    parser.add_argument("--masked-sampler", dest="masked_samplers", action="append")
    parser.add_argument("--puzzles", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, help="all puzzles at once unless said")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="of the network: float32 or bfloat16")
    parser.add_argument("--compile", action="store_true", help="the network, for a GPU")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", type=Path, metavar="PNG")
    args = parser.parse_args()
    args.masked_samplers = args.masked_samplers or MASKED
    return args


def main() -> None:
    args = arguments()
    try:
        for clues in args.clues:
            clue_count(clues)
        if args.model:
            run(args)
        records = newest(read_json_lines(args.out, cut_lines=True))
        if not records:
            raise ValueError(f"nothing is measured in {args.out}: name a model")
        if args.table:
            print(table(records))
        if args.figure:
            figure(records, args.figure)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

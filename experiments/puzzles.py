"""Exact puzzles: the share solved by uniform and masked models, by sampler and number of steps.

    python experiments/puzzles.py --work DIR            four models and their cells, on one GPU
    python experiments/puzzles.py --work DIR --tiny     that it runs, on a CPU in a minute

Countdown with four numbers and random 3-SAT of nine variables: each with a uniform and a masked
model of the same network, data, steps and rates. A puzzle is solved if a program accepts the
answer and the question is kept. Each cell is one line of docs/results/puzzles.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from cells import Cell, measure
from rich.console import Console

from psidiff.cli.progress import Progress
from psidiff.data.puzzle import Puzzle
from psidiff.evaluation.puzzle_metrics import held_out_questions, puzzle_metrics
from psidiff.experiment.train import train
from psidiff.model import load
from psidiff.sampling import parse_options

PUZZLES = ("countdown", "3sat")
STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
UNIFORM = (
    "ancestral",
    "constant:0@.05-.8",
    "constant:0@.05-.95",
    "constant:.5@.05-.6",
    "cap:.1",
    "rescale:.5",
    "predictor=confident:argmax,commit",
)
MASKED = (
    "ancestral",
    "constant:0@.05-.8",
    "cap:.1",
    "rescale:.5",
    "predictor=confident:argmax",
)
TINY = (
    *("train.steps=20", "train.batch_size=8", "train.warmup=5", "train.precision=float32"),
    *("model.hidden_size=32", "model.num_blocks=1", "model.num_heads=2", "data.count=200"),
)


def model_of(puzzle: str, prior: str, work: Path, overrides: tuple[str, ...]) -> Path:
    """The run of a model: trained if it is not there."""
    recipe = puzzle if prior == "uniform" else f"{puzzle}-masked"
    run = work / recipe
    if not (run / "model.safetensors").is_file():
        shown = Progress(Console(width=100))
        quiet = ("eval.samples=0", "train.log_every=1000", "train.eval_every=5000")
        train(recipe, [*quiet, *overrides], run, run.exists(), "auto", lambda first: shown)
    return run


def cells(steps: tuple[int, ...], count: int) -> Iterator[Cell]:
    for puzzle in PUZZLES:
        for prior, samplers in (("uniform", UNIFORM), ("masked", MASKED)):
            for sampler in samplers:
                for number in steps:
                    yield {
                        "puzzle": puzzle,
                        "prior": prior,
                        "sampler": sampler,
                        "steps": number,
                        "puzzles": count,
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--puzzles", type=int, default=2000, help="of a cell")
    parser.add_argument("--train", nargs="*", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    overrides = (*(TINY if args.tiny else ()), *args.train)
    models = {}

    def run(cell: Cell) -> Cell:
        named = cell["puzzle"], cell["prior"]
        if named not in models:
            models[named] = load(model_of(*named, args.work, overrides))
        model = models[named]
        assert isinstance(model.codec, Puzzle)
        asked = held_out_questions(model.codec, "none", cell["puzzles"])
        begun = time.perf_counter()
        said = {"last": "greedy", **parse_options(cell["sampler"])}
        made = model.sample(
            len(asked), cell["steps"], seed=0, infill=asked, split=False, **said
        )
        seconds = time.perf_counter() - begun
        found = {
            each.name: each for each in puzzle_metrics(model.codec, made.tokens.cpu(), asked)
        }
        solved = found["solved"]
        return {
            "solved": solved.value,
            "interval": solved.protocol["interval"],
            "nfe": made.nfe,
            "sampling_seconds": round(seconds, 3),
        }

    count, steps = (16, (2, 4)) if args.tiny else (args.puzzles, STEPS)
    folder = args.work if args.tiny else None
    measure("puzzles", cells(steps, count), run, folder)


if __name__ == "__main__":
    main()

"""A former commit and the present tree, side by side on one machine: tokens and times.

    python benchmarks/compare_commits.py 0865eb4 [--only step serve] [--rounds 7]

The former commit is checked out into a temporary folder. Three processes wait for work and take
turns, one at a time: the former code, the present code, and the former code again, whose
distance from itself says what a difference is worth. Tokens are of the shipped models in
float32, one sample at a time and with `micro_batch`. Times are medians of rounds in which every
side runs each row of step.py, sampling.py and serve.py once, with the functions of its own
`benchmarks/`. It ends with 1 if tokens differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SIDES = ("former", "present", "former again")
GROUPS = ("tokens", "step", "sampling", "serve")
TOLERANCE = 0.03  # of the time that it was
FREE = 2e-4  # seconds a step that do not count where the network costs nothing
ENOUGH = 0.25  # seconds of a row in a round
Row = Callable[[], Any]

SAMPLED: dict[str, tuple[str, dict[str, Any]]] = {
    "shakespeare, card": ("shakespeare", {"length": 64}),
    "shakespeare, paper-text": ("shakespeare", {"length": 64, "preset": "paper-text"}),
    "shakespeare, prompt": ("shakespeare", {"length": 64, "prompt": "The door", "top_p": 0.9}),
    "shakespeare, windows": ("shakespeare", {"length": 160, "overlap": 64, "kappa": "cap:.1"}),
    "books, card": ("books", {"length": 48, "top_p": 0.9}),
    "books, remdm-cap": ("books", {"length": 48, "preset": "remdm-cap"}),
    "books, confidence": ("books", {"length": 48, "kappa": "confidence:.2", "top_k": 50}),
    "digits, label": ("digits", {"labels": 3}),
    "digits, guidance": ("digits", {"labels": 4, "guidance": 2.0, "preset": "paper-images"}),
    "sudoku, card": ("sudoku", {"last": "greedy"}),
    "sudoku, confident": ("sudoku", {"predictor": "confident:argmax,commit"}),
}


def token_rows() -> dict[str, Row]:
    """What `Model.sample` makes in float32, as hashes."""
    import psidiff

    def row(name: str, count: int, options: dict[str, Any]) -> Any:
        made = psidiff.load(name, device="cpu").sample(
            count, 24, seed=5, record=True, **options
        )
        routes = [route.numpy().tobytes() for route in made.trace.routes]
        tokens = hashlib.sha256(made.tokens.numpy().tobytes()).hexdigest()[:12]
        history = hashlib.sha256(b"".join(routes)).hexdigest()[:12]
        return [tokens, history, made.nfe, made.head_rows]

    shapes: dict[str, tuple[int, dict[str, Any]]] = {
        "batch 1": (1, {}),
        "micro_batch 2": (3, {"micro_batch": 2}),
    }
    return {
        f"{title}, {shape}": lambda n=name, c=count, o={**options, **more}: row(n, c, o)
        for title, (name, options) in SAMPLED.items()
        for shape, (count, more) in shapes.items()
    }


def step_rows() -> dict[str, Row]:
    """The rows of step.py: one step whose network costs nothing."""
    import torch
    from step import our_step

    from psidiff.process import LogLinear, Uniform
    from psidiff.sampling import Step, parse_kappa

    torch.manual_seed(0)
    K, schedule, rule = 50_258, LogLinear(), parse_kappa("cap:0.005")
    prior, log_x = Uniform(K), (3 * torch.randn(1, 256, K)).log_softmax(-1)

    def step_at(t: float, s: float) -> Any:
        alpha_t, alpha_s = schedule.alpha(t), schedule.alpha(s) if s else 1.0
        return Step(t, alpha_t, alpha_s, rule(t, alpha_s, alpha_t))

    cases = {"t = 1/2": step_at(0.5, 0.5 - 1 / 256), "the last step": step_at(1e-3, 0.0)}
    return {
        f"{name}, top-p {top_p or 'off'}": timed(
            lambda s=step, p=top_p: our_step(log_x, prior, s, p)
        )
        for name, step in cases.items()
        for top_p in (None, 0.9)
    }


def sampling_rows() -> dict[str, Row]:
    """The lazy rows of sampling.py, seconds a step; and a small network whole."""
    import torch
    from sampling import make, weighted

    import psidiff
    from psidiff.process import LogLinear, Uniform
    from psidiff.sampling import parse_kappa, plan, sample

    denoiser, prior = make(768, 12, 50_258), Uniform(50_258)
    steps = plan(256, LogLinear(), parse_kappa("cap:0.0025"))
    small = psidiff.load("shakespeare", device="cpu")

    def lazy(top_p: float | None) -> float:
        total = 0.0
        for step, weight in weighted(steps, 8):
            generator = torch.Generator().manual_seed(0)
            begun = time.perf_counter()
            sample(denoiser, prior, (step,), (1, 256), generator, top_p=top_p)
            total += weight * (time.perf_counter() - begun)
        return total

    return {
        "12 x 768, top-p off": lambda: lazy(None),
        "12 x 768, top-p 0.9": lambda: lazy(0.9),
        "shakespeare, 64 steps of 1 x 128": timed(lambda: small.sample(1, 63)),
        "shakespeare, 16 steps of 8 x 128": timed(lambda: small.sample(8, 15)),
    }


def serve_rows() -> dict[str, Row]:
    """The shared rows of serve.py: seconds a request."""
    from serve import LONG, SHORT, by_engine, by_library, requests_of

    import psidiff

    model = psidiff.load("shakespeare", "cpu")
    short, long = requests_of(model, SHORT, 128), requests_of(model, LONG, 8)
    return {
        "short, 64 places": lambda: 1 / by_engine(model, short, 64),
        "short, one place": lambda: 1 / by_engine(model, short[:12], 1),
        "short, the library": lambda: 1 / by_library(model, short[:12]),
        "256 tokens in windows, 8 places": lambda: 1 / by_engine(model, long, 8),
    }


def timed(work: Callable[[], Any]) -> Row:
    """Seconds; what is short is done again for a while, and its median counts."""

    def seconds() -> float:
        times: list[float] = []
        while sum(times) < ENOUGH:
            begun = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    return seconds


ROWS = {
    "tokens": token_rows,
    "step": step_rows,
    "sampling": sampling_rows,
    "serve": serve_rows,
}


def work(benchmarks: str) -> None:
    """One side: names come in by lines, answers go out by lines."""
    sys.path[0] = benchmarks  # its own step.py, sampling.py and serve.py
    answers, sys.stdout = sys.stdout, sys.stderr
    built: dict[str, dict[str, Row]] = {}
    for line in sys.stdin:
        group, name = json.loads(line)
        if group not in built:
            built = {group: ROWS[group]()}  # only one at a time is held
        answer = list(built[group]) if name is None else built[group][name]()
        print(json.dumps(answer), file=answers, flush=True)


class Side:
    """A process that runs rows with the code of one tree."""

    def __init__(self, tree: Path) -> None:
        command = [sys.executable, __file__, "--work", str(tree / "benchmarks")]
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )

    def ask(self, group: str, name: str | None = None) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([group, name]), file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"the process that ran {group}: {name} has ended")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The tree of a commit in a temporary folder."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True)

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def compare_tokens(sides: dict[str, Side]) -> int:
    """How many rows differ."""
    names, different = sides["former"].ask("tokens"), 0
    for name in names:
        former, present = (sides[side].ask("tokens", name) for side in SIDES[:2])
        same = former == present
        different += not same
        said = "equal" if same else f"DIFFERENT: {former} was, {present} is"
        print(f"tokens | {name} | {said}", flush=True)
    print(f"{len(names) - different} of {len(names)} equal: tokens, routes, passes, head rows")
    return different


def compare_times(sides: dict[str, Side], group: str, rounds: int) -> None:
    names = sides["former"].ask(group)
    for side in sides.values():
        for name in names:
            side.ask(group, name)  # warm
    for name in names:
        times: dict[str, list[float]] = {side: [] for side in sides}
        for i in range(rounds):
            for side in SIDES if i % 2 else SIDES[::-1]:
                times[side].append(sides[side].ask(group, name))
        said = verdict(times, FREE if group == "step" else 0.0)
        print(f"{group} | {name} | {said}", flush=True)


def verdict(times: dict[str, list[float]], free: float = 0.0) -> str:
    """Medians, their ratio, that of the same code with itself, and what it means.

    free: seconds that do not count.
    """
    former, present, again = (statistics.median(times[side]) for side in SIDES)
    ratio, same = present / former, again / former
    allowed = max(TOLERANCE, abs(same - 1), free / former)
    said = "slower" if ratio > 1 + allowed else "faster" if ratio < 1 - allowed else "equal"
    return (
        f"{former * 1e3:.2f} ms was, {present * 1e3:.2f} ms is | {ratio:.3f} "
        f"(the same code {same:.3f}) | {said}"
    )


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("commit")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with checked_out(args.commit) as tree, ExitStack() as stack:
        places = dict(zip(SIDES, (tree, ROOT, tree), strict=True))
        sides = {name: Side(place) for name, place in places.items()}
        for side in sides.values():
            stack.callback(side.close)
        different = compare_tokens(sides) if "tokens" in args.only else 0
        for group in args.only:
            if group != "tokens":
                compare_times(sides, group, args.rounds)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())

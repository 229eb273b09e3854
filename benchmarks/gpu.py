"""Speed and memory on one GPU: psidiff beside the straightforward way, row by row.

    python benchmarks/gpu.py                            all rows, then the table
    python benchmarks/gpu.py --rows ceilings,psi_top_p  some of them
    python benchmarks/gpu.py --table                    the table of what was measured before
    python benchmarks/gpu.py --rows unet_train --profile    where the time of ours goes
    python benchmarks/gpu.py --tiny --device cpu        that everything runs, in seconds

Every finished number is a line of --out; one of this machine and size that is there is not
measured again, unless --again. A row that fails says so in one line, its traceback goes beside
--out, and the others go on. DiT small (12 x 768), K = 50,258, L = 1024, sampling B = 8,
training B = 32; the straightforward way is `benchmarks/straightforward.py`.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import gpu_loss
import gpu_sampling
import gpu_table
import gpu_training
import torch
from append_line import append_line
from gpu_measure import TINY, Bench, Record, Sizes

from psidiff.files import read_json_lines

Way = Callable[[Bench], Record]
Rows = dict[str, dict[str, Way]]
ONLY_BY_NAME = "train_entries"  # rows to choose a constant by


def rows_of(sizes: Sizes) -> Rows:
    """Every row, and the ways in which it is measured, in the order of their running."""
    sampling, training = gpu_sampling, gpu_training
    rows: Rows = {
        "ceilings": {"ours": sampling.ceilings},
        "forward": _both(sampling.plain_forward, sampling.our_forward),
    }
    for rule in sampling.RULES:
        for name, top_p in ((rule, None), (f"{rule}_top_p", 0.9)):
            chosen: dict[str, Any] = {"rule": rule, "top_p": top_p, "batch": sizes.batch}
            rows[name] = _both(sampling.plain_step, sampling.our_steps, **chosen)
    for objective in ("exact", "sparse"):
        rows[f"train_{objective}"] = _both(
            training.plain_training, training.our_training, objective=objective
        )
    rows["train_dense"] = {
        "straightforward": partial(training.plain_training, objective="dense")
    }
    rows["loss_accuracy"] = {"ours": gpu_loss.loss_accuracy}
    for name, count in zip(("16", "64"), sizes.ends, strict=True):
        rows[f"end_to_end_{name}"] = _both(
            sampling.plain_end_to_end, sampling.our_end_to_end, count=count
        )
    for name, vocab in zip(("128k", "262k"), sizes.wide, strict=True):
        for suffix, top_p in (("", None), ("_top_p", 0.9)):
            rows[f"vocabulary_{name}{suffix}"] = _both(
                sampling.plain_wide, sampling.our_wide, vocab=vocab, top_p=top_p
            )
    rows["unet_train"] = _both(training.plain_images, training.our_images)
    rows["unet_sample"] = _both(sampling.plain_images, sampling.our_images)
    for power in (25, 26, 27):
        rows[f"{ONLY_BY_NAME}_{power}"] = {
            "ours": partial(training.our_training, objective="exact", entries=2**power)
        }
    return rows


def _both(plain: Callable[..., Record], ours: Callable[..., Record], **chosen: Any) -> Any:
    return {"straightforward": partial(plain, **chosen), "ours": partial(ours, **chosen)}


def measure(bench: Bench, rows: Rows, out: Path, again: bool) -> int:
    """Each row and way that is not in `out` yet, of this machine and size; how many failed."""
    there = set() if again else set(map(gpu_table.key, read_json_lines(out, cut_lines=True)))
    failed = 0
    for row, ways in rows.items():
        for way, work in ways.items():
            named = {"row": row, "way": way}
            if gpu_table.key(named | about(bench)) in there:
                print(f"{row}, {way}: measured before", flush=True)
                continue
            begun = time.perf_counter()
            bench.forget()
            try:
                record = work(bench)
            except Exception as error:
                failed += 1
                print(f"{row}, {way}: {type(error).__name__}: {_first(error)}", flush=True)
                append_line(out.with_suffix(".log"), f"{row}, {way}\n{traceback.format_exc()}")
                error.__traceback__ = None  # it holds tensors
                continue
            append_line(out, json.dumps(named | about(bench) | record))
            took = time.perf_counter() - begun
            print(
                f"{row}, {way}: {record['ms']:.4g} ms, {record.get('gib', 0):.3g} GiB "
                f"({took:.0f} s)",
                flush=True,
            )
    return failed


def profile(bench: Bench, rows: Rows, out: Path) -> None:
    """Operations and kernels of our way by the time they take; nothing is recorded."""
    kind = torch.profiler.ProfilerActivity
    device = "cuda" if bench.cuda else "cpu"
    for row, ways in rows.items():
        bench.forget()
        with torch.profiler.profile(activities=[kind.CUDA if bench.cuda else kind.CPU]) as seen:
            ways["ours"](bench)
        order = f"self_{device}_time_total"
        text = seen.key_averages().table(order, row_limit=40, max_name_column_width=90)
        append_line(out.with_suffix(".profile.txt"), f"{row}\n{text}")
        print(f"{row}\n{text}", flush=True)


def about(bench: Bench) -> Record:
    """When and on what a number was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if bench.cuda else "CPU",
        "tiny": bench.sizes is TINY,
    }


def _first(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows",
        metavar="NAME,...",
        help=f"all but {ONLY_BY_NAME}_* unless named: {', '.join(rows_of(Sizes()))}",
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu.jsonl"), metavar="FILE.jsonl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--end-batch", type=int, default=32, help="of end_to_end rows, ours")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try it out")
    parser.add_argument("--again", action="store_true", help="also what is in FILE already")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--profile", action="store_true", help="of our way, instead of numbers")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _options()
    args = parser.parse_args(arguments)
    if args.table:
        if not args.out.is_file():
            parser.error(f"{args.out} is not there: measure something first")
        print(gpu_table.table(read_json_lines(args.out, cut_lines=True)))
        return 0
    if args.end_batch < 1:
        parser.error(f"--end-batch must be at least 1, got {args.end_batch}")
    sizes = TINY if args.tiny else Sizes()
    rows = rows_of(sizes)
    names = args.rows.split(",") if args.rows else [n for n in rows if ONLY_BY_NAME not in n]
    for name in names:
        if name not in rows:
            parser.error(f"there is no row {name!r}; the rows are {', '.join(rows)}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: say --device cpu --tiny to try it out")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.device, sizes, args.end_batch)
    chosen = {name: rows[name] for name in names}
    if args.profile:
        profile(bench, {n: ways for n, ways in chosen.items() if "ours" in ways}, args.out)
        return 0
    failed = measure(bench, chosen, args.out, args.again)
    print(f"\n{gpu_table.table(read_json_lines(args.out, cut_lines=True))}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Checkpoints of a sharded run: our format beside torch.distributed.checkpoint's own files.

python benchmarks/checkpoints.py [--processes 8] [--readers 1 2 4 8] [--width 768] [--rounds 5]

A transformer is sharded by FSDP2 over so many processes (gloo, CPU). Parameters, averages and
both moments are saved in both formats, in turn, with all processes waiting for each other, and
then loaded by other numbers of processes. It prints medians, and ends with an error unless
each load gives the very bits that were saved. (The same command is called for each process,
with --folder.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from psidiff.distributed import Processes, whole
from psidiff.models import Transformer
from psidiff.training import checkpoint

FACTS = {"step": 1, "ema_updates": 1, "unread": []}


def tensors_of(group: Processes, width: int, filled: bool) -> dict[str, Any]:
    """What a run saves, with values that depend on names alone; zeros unless `filled`."""
    torch.manual_seed(0)
    network = Transformer(50_000, hidden_size=width, num_blocks=4, num_heads=width // 64)
    group.spread(network, "fsdp")
    found: dict[str, torch.Tensor] = {}
    for name, parameter in network.named_parameters():
        value = parameter.detach() if filled else torch.zeros_like(parameter.detach())
        found |= {f"parameters.{name}": value, f"average.{name}": value * 2}
        found |= {f"moments.{name}.exp_avg": value * 3}
        found |= {f"moments.{name}.exp_avg_sq": value * value}
    return found


def digest(tensors: dict[str, Any]) -> str:
    """A hash of all bits, in one piece each; every process must ask."""
    made = hashlib.sha256()
    for name in sorted(tensors):
        made.update(whole(tensors[name]).contiguous().numpy())
    return made.hexdigest()


def by_torch(verb: str, tensors: dict[str, Any], folder: Path, group: Processes) -> None:
    """As psidiff did before it had a format of its own."""
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(dcp, verb)(tensors, checkpoint_id=folder, no_dist=group.world == 1)


def timed(group: Processes, work: Callable[[], Any]) -> float:
    """Seconds until all processes are through."""
    group.wait()
    begun = time.perf_counter()
    work()
    group.wait()
    return time.perf_counter() - begun


def save_rounds(folder: Path, group: Processes, width: int, rounds: int) -> dict[str, Any]:
    tensors = tensors_of(group, width, filled=True)
    seconds: dict[str, list[float]] = {"torch": [], "ours": []}
    for _ in range(rounds + 1):  # the first pays for imports
        for kind in ("torch", "ours"):
            if group.first:
                shutil.rmtree(folder / kind, ignore_errors=True)
            if kind == "torch":
                work = lambda: by_torch("save", tensors, folder / "torch", group)  # noqa: E731
            else:
                work = lambda: checkpoint.save(folder / "ours", 1, tensors, FACTS, group)  # noqa: E731
            seconds[kind].append(timed(group, work))
    return {"seconds": {k: v[1:] for k, v in seconds.items()}, "digest": digest(tensors)}


def load_rounds(folder: Path, group: Processes, width: int, rounds: int) -> dict[str, Any]:
    tensors = tensors_of(group, width, filled=False)
    seconds: dict[str, list[float]] = {"torch": [], "ours": []}
    digests = set()
    for number in range(rounds + 1):
        for kind in ("torch", "ours"):
            if kind == "torch":
                work = lambda: by_torch("load", tensors, folder / "torch", group)  # noqa: E731
            else:
                work = lambda: checkpoint.load(folder / "ours", 1, tensors, group)  # noqa: E731
            seconds[kind].append(timed(group, work))
            if number == 0:
                digests.add(digest(tensors))
                for value in tensors.values():
                    value.zero_()
    return {"seconds": {k: v[1:] for k, v in seconds.items()}, "digest": " ".join(digests)}


def process(options: argparse.Namespace) -> None:
    """One of the processes; the first writes what came out."""
    torch.set_num_threads(1)
    group = Processes.join("cpu")
    work = save_rounds if options.save else load_rounds
    made = work(Path(options.folder), group, options.width, options.rounds)
    if group.first:
        (Path(options.folder) / "made.json").write_text(json.dumps(made))
    group.leave()


def together(count: int, folder: str, save: bool, options: argparse.Namespace) -> Any:
    """So many processes that meet; what the first of them found."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--folder", folder, "--width", str(options.width)]
    command += ["--rounds", str(options.rounds), *(["--save"] if save else [])]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    started = [
        subprocess.Popen(command, env={**os.environ, **meeting, "RANK": str(rank)})
        for rank in range(count)
    ]
    if any([each.wait() for each in started]):
        raise SystemExit(f"one of {count} processes failed")
    return json.loads((Path(folder) / "made.json").read_text())


def report(what: str, seconds: dict[str, list[float]]) -> None:
    theirs, ours = (statistics.median(seconds[kind]) for kind in ("torch", "ours"))
    pairs = zip(seconds["ours"], seconds["torch"], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"{what}: torch {theirs:.3f} s, ours {ours:.3f} s, ratio {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--width", type=int, default=768, help="of the network: 64 a head")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        process(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        saved = together(options.processes, folder, True, options)
        report(f"save by {options.processes}", saved["seconds"])
        held = sum(path.stat().st_size for path in Path(folder, "ours").rglob("part-*"))
        print(f"bytes of tensors: {held:,}")
        for count in options.readers:
            loaded = together(count, folder, False, options)
            report(f"load by {count}", loaded["seconds"])
            if loaded["digest"] != saved["digest"]:
                raise SystemExit(f"{count} processes loaded other bits than were saved")
    print("every load is equal to what was saved, bit by bit")


if __name__ == "__main__":
    main()

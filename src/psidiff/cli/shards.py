"""A large set of samples as files of equal size: stopped at any moment, it goes on later.

A shard is a .npz of tokens, with the pixels of images; text also comes as lines of JSON. The
.npz is written last and at once, so a shard that is there is whole. Nothing in a file depends
on time, on the number of processes or on where the run was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from ..data.images import grid, write_png
from ..data.puzzles import valid
from ..files import FORMAT_VERSION, read_json
from ..generate import batch_that_fits, generate
from ..model import Decoded, Model
from ..parallel import Processes
from ..request import Request
from ..sampling.loop import OnStep
from ..types import as_count
from .report.words import counted

SHARD_SIZE = 256
MANIFEST = "sampling.json"


class ShardedRun:
    """The shards of a request in a folder; under torchrun each process makes every n-th."""

    def __init__(
        self, model: Model, request: Request, folder: Path, words: dict[str, Any], size: int
    ) -> None:
        self.model, self.request, self.folder = model, request, folder
        self.words = {name: str(v) for name, v in words.items() if v is not None}
        self.size = as_count("shard_size", size)
        self.group = Processes.join(model.device.type)

    def run(
        self,
        console: Console,
        resume: bool,
        batch_size: int | None,
        whole: bool,
        on_step: OnStep | None,
    ) -> bool:
        """Make what is missing; False if the user stopped it."""
        batch = self._begin(resume, batch_size)
        begun, finished, made = time.perf_counter(), True, 0
        numbers = range(-(-self.request.num_samples // self.size))
        try:
            for number in numbers[self.group.rank :: self.group.world]:
                if not self._path(number).is_file():
                    made += self._make(console, number, batch, whole, on_step)
        except KeyboardInterrupt:
            finished = False
        self.group.wait()
        if self.group.first:
            self._end(console, numbers, made, time.perf_counter() - begun)
        self.group.leave()
        return finished

    def _begin(self, resume: bool, batch_size: int | None) -> int:
        """The manifest: what the folder is for; a resumed run must ask for the same."""
        path = self.folder / MANIFEST
        if self.group.first:
            if path.is_file():
                self._compare(read_json(path), resume)
            else:
                self._write_manifest(path, batch_size)
        self.group.wait()
        return int(read_json(path)["batch_size"])

    def _write_manifest(self, path: Path, batch_size: int | None) -> None:
        held = self.folder.iterdir() if self.folder.is_dir() else ()
        if any(file.suffix != ".part" for file in held):  # a part: killed while writing it
            raise ValueError(f"{self.folder} is not empty, and holds no samples: name another")
        self.folder.mkdir(parents=True, exist_ok=True)
        fits = min(batch_that_fits(self.model, self.request), self.size)
        manifest = {
            **self._identity(),
            "sampler": self.request.sampler,
            "length": self.request.length,
            "codec": codec_fingerprint(self.model.codec),
            "batch_size": as_count("batch_size", fits if batch_size is None else batch_size),
        }
        _write(path, json.dumps(manifest, indent=1).encode())

    def _identity(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "asked": self.words,
            "shard_size": self.size,
            "parameters": _fingerprint(self.model),
        }

    def _compare(self, held: dict[str, Any], resume: bool) -> None:
        if not resume:
            raise ValueError(
                f"{self.folder} already holds samples: add --resume, or name another"
            )
        mine = self._identity()
        if held["parameters"] != mine["parameters"]:
            raise ValueError(f"{self.folder} was begun with other parameters of the model")
        for name in sorted({*held["asked"], *mine["asked"]} - {"model"}):
            before, now = held["asked"].get(name), mine["asked"].get(name)
            if before != now:
                raise ValueError(
                    f"{self.folder} was begun with {name} = {before}, and this asks for {now}"
                )
        if held["shard_size"] != self.size:
            raise ValueError(
                f"{self.folder} has shards of {held['shard_size']}, not {self.size}"
            )

    def _make(
        self, console: Console, number: int, batch: int, whole: bool, on_step: OnStep | None
    ) -> int:
        first = number * self.size
        count = min(self.size, self.request.num_samples - first)
        made = generate(
            self.model,
            self.request,
            first,
            count,
            batch_size=batch,
            on_step=on_step,
            notify=lambda said: console.print(said, highlight=False),
        )
        decoded = Decoded(**vars(made), codec=self.model.codec, whole=whole)
        tokens = made.tokens.to("cpu", torch.int32).numpy()
        arrays: dict[str, Any] = {
            "tokens": tokens,
            "nfe": np.float64(made.nfe),
            "head_rows": np.int64(made.head_rows),
        }
        if self.request.labels is not None:
            arrays["labels"] = self.request.labels[first : first + count].numpy()
        if decoded.codec is not None and decoded.codec.kind == "image":
            arrays["images"] = np.stack(decoded.images)
        elif decoded.codec is not None:
            about = zip(decoded.text, verdicts(decoded), strict=True)
            lines = (
                json.dumps(
                    {
                        "format_version": FORMAT_VERSION,
                        "index": first + i,
                        "text": text,
                        **right,
                    },
                    ensure_ascii=False,
                )
                for i, (text, right) in enumerate(about)
            )
            _write(self._path(number, "jsonl"), ("\n".join(lines) + "\n").encode())
        with _whole(self._path(number)) as file:
            np.savez_compressed(file, **arrays)
        return count

    def _end(self, console: Console, numbers: range, made: int, seconds: float) -> None:
        """What there is now; of images a sheet of the first ones."""
        there = [number for number in numbers if self._path(number).is_file()]
        tokens = passes = rows = 0.0
        grids = 0
        puzzles = self.model.codec is not None and self.model.codec.kind == "puzzle"
        for number in there:
            with np.load(self._path(number)) as shard:
                if puzzles:
                    grids += int(valid(torch.from_numpy(shard["tokens"])).sum())
                tokens += shard["tokens"].size
                passes += float(shard["nfe"]) * len(shard["tokens"])
                rows += float(shard["head_rows"])
        count = tokens / self.request.length
        if there and self.model.codec is not None and self.model.codec.kind == "image":
            with np.load(self._path(there[0])) as shard:
                write_png(
                    grid(list(shard["images"][:64]), 8, 2, 2), self.folder / "samples.png"
                )
        speed = f", {made} of them now in {seconds:.0f} s" if made else ""
        missing = "" if len(there) == len(numbers) else "; go on with --resume"
        cost = ""
        if there:
            cost = (
                f": {passes / count:.1f} passes a sample, {rows / tokens:.1f} head rows a token"
            )
        wanted = counted(f"{self.request.num_samples:,}", "sample")
        right = f"; {grids:,} of {counted(f'{count:,.0f}', 'grid')} valid" if puzzles else ""
        console.print(
            f"{count:,.0f} of {wanted} in {counted(len(there), 'shard')} "
            f"in {self.folder}{speed}{cost}{right}{missing}",
            highlight=False,
        )

    def _path(self, number: int, suffix: str = "npz") -> Path:
        return self.folder / f"shard-{number:05d}.{suffix}"


def verdicts(made: Decoded) -> list[dict[str, bool]]:
    """Of each puzzle whether its grid is valid; of others nothing."""
    if made.codec is None or made.codec.kind != "puzzle":
        return [{} for _ in made.tokens]
    return [{"valid": each} for each in valid(made.tokens).tolist()]


def codec_fingerprint(codec: Any) -> str | None:
    """Equal where the same ids mean the same; None where nobody knows what they mean."""
    if codec is None:
        return None
    described = json.dumps(codec.describe(), sort_keys=True)
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def _fingerprint(model: Model) -> str:
    """Tells models apart by their parameters."""
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(model.denoiser, torch.nn.Module):
        for name, value in model.denoiser.state_dict().items():
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _write(path: Path, data: bytes) -> None:
    with _whole(path) as file:
        file.write(data)


class _whole:
    """A file that appears under its name only when it is complete."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, path.with_name(path.name + ".part")

    def __enter__(self) -> Any:
        self.file = self.part.open("wb")
        return self.file

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.file.close()
        if kind is None:
            os.replace(self.part, self.path)
        else:
            self.part.unlink(missing_ok=True)

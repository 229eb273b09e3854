"""A large set of samples as files of equal size: stopped at any moment, it goes on later.

Any number of processes share the work: each takes a shard that nobody has claimed. The .npz of
a shard is written last and at once, so one that is there is whole, or was damaged later; that
is seen and made good. Nothing in a file depends on time, on the number of processes or on where
the run was interrupted.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..checksums import Damaged, as_damage, bytes_of, damaged, reading
from ..data.images import grid, write_png
from ..data.puzzle import Puzzle
from ..distributed import Processes
from ..files import advising, check_plain, parts_in, write_object
from ..generate import BatchSize, generate, largest_batch_size, validity_flags
from ..locks import Lock, Locked, held_by
from ..model import Model
from ..request import Request
from ..sampling.loop import OnStep
from ..types import as_count
from .report.formatting import pluralize
from .sample_files import (
    MANIFEST,
    Shard,
    check_lines,
    codec_fingerprint,
    read_manifest,
    read_shard,
    shard_path,
    write_lines,
)

_PATIENCE = 60.0  # seconds until somebody at the gate is taken for stuck
_GATE = ".gate.lock"
_LEFT = re.compile(
    r"\.(gate|worker-[0-9a-f]{16}|shard-\d+)\.lock"
    r"|(shard-\d+\.\w+|sampling\.json)\.part"  # of earlier versions
)
SHARD_SIZE = 256
_PAUSE = 0.2  # seconds between two looks at what others make


class Cost(NamedTuple):
    """What a shard's samples cost, and of puzzles how many are right."""

    tokens: int = 0
    passes: float = 0.0
    rows: int = 0
    right: int = 0


@dataclass(eq=False)
class ShardedRun:
    """The shards of a request in a folder, beside whoever else makes them.

    Under torchrun each process begins with every n-th.

    notify: gets each sentence for the user, what is wrong with a file as its exception.
    force: as in `Lock`.
    """

    model: Model
    request: Request
    folder: Path
    asked: dict[str, Any]
    size: int
    notify: Callable[[object], None]
    force: bool = False

    def __post_init__(self) -> None:
        self.words: dict[str, str] = {
            name: str(v) for name, v in self.asked.items() if v is not None
        }
        self.size = as_count("shard_size", self.size)
        self.total: int = -(-self.request.num_samples // self.size)  # shards
        self.group: Processes = Processes.join(self.model.device.type)
        self.workers: Workers = Workers(self.folder, "sampling", self.force)
        self.kind: str | None = None if self.model.codec is None else self.model.codec.kind
        self.whole: dict[int, Cost] = {}  # shards that were read or made here
        self.made = 0  # samples, by this process

    def run(
        self, resume: bool, batch_size: int | None, whole: bool, on_step: OnStep | None
    ) -> bool:
        """Make what is missing; False if the user stopped it."""
        self._begin(resume, batch_size)
        begun, finished = time.perf_counter(), True
        try:
            batch = BatchSize(read_manifest(self.folder)["batch_size"])
            try:
                self._work(partial(self._make, batch, whole, on_step))
            except KeyboardInterrupt:
                finished = False
            self.group.wait()
            if self.group.first:
                self._end(time.perf_counter() - begun)
        finally:
            self.workers.leave()
        self.group.leave()
        return finished

    def _begin(self, resume: bool, batch_size: int | None) -> None:
        """Come to the folder. The first one says what it is for, others must ask the same."""
        first = self.group.first
        if not first:
            self.group.wait()
        check_plain(self.folder)
        with self.workers.gate() as others:
            if first and (self.folder / MANIFEST).exists():
                self._compare(read_manifest(self.folder), resume or others)
                _check_replaceable(self.folder)
            elif first:
                self._write_manifest(batch_size)
            self.workers.join()
        if first:
            self.group.wait()

    def _write_manifest(self, batch_size: int | None) -> None:
        there = set(self.folder.iterdir()) - set(self.workers.leftovers())
        if any(not path.name.startswith(".") for path in there):  # .DS_Store and the like
            raise ValueError(f"{self.folder} is not empty, and holds no samples: name another")
        fits = min(largest_batch_size(self.model, self.request), self.size)
        manifest = {
            "asked": self.words,
            "shard_size": self.size,
            "parameters": _fingerprint(self.model),
            "sampler": str(self.request.sampler),
            "length": self.request.length,
            "codec": codec_fingerprint(self.model.codec),
            "batch_size": as_count("batch_size", fits if batch_size is None else batch_size),
        }
        write_object(self.folder / MANIFEST, manifest, indent=1)

    def _compare(self, held: dict[str, Any], resume: bool) -> None:
        if not resume:
            raise ValueError(
                f"{self.folder} already holds samples: add --resume, or name another"
            )
        if held["parameters"] != _fingerprint(self.model):
            raise ValueError(f"{self.folder} was begun with other parameters of the model")
        for name in sorted({*held["asked"], *self.words} - {"model"}):
            before, now = held["asked"].get(name), self.words.get(name)
            if before != now:
                raise ValueError(
                    f"{self.folder} was begun with {name} = {before}, and this asks for {now}"
                )
        if held["shard_size"] != self.size:
            raise ValueError(
                f"{self.folder} has shards of {held['shard_size']}, not {self.size}"
            )

    def _work(self, make: Callable[[int], None]) -> None:
        """Shard after shard that nobody has, until there are all of them."""
        share = range(self.total)[self.group.rank :: self.group.world]
        missing = [*share, *(n for n in range(self.total) if n not in share)]
        waited = False
        while missing:
            count = len(missing)
            for number in list(missing):
                if self._is_complete(number) or self._make_unclaimed(number, make):
                    missing.remove(number)
            if len(missing) == count:
                if not waited:
                    self.notify(f"waiting for {pluralize(count, 'shard')} that others make")
                waited = True
                time.sleep(_PAUSE)

    def _make_unclaimed(self, number: int, make: Callable[[int], None]) -> bool:
        """Make a shard, unless another process does so now."""
        with self.workers.claim(f"shard-{number:05d}") as mine:
            if mine and not self._is_complete(number, aloud=True):  # still, now that it is ours
                make(number)
            return mine

    def _is_complete(self, number: int, aloud: bool = False) -> bool:
        """Whether a shard is there as it was written; what is wrong with it is said."""
        path = shard_path(self.folder, number)
        if number in self.whole or not path.exists():
            return number in self.whole
        try:
            self._note_cost(number, self._read(number))
        except Damaged as error:
            if aloud:
                self.notify(error)
            return False
        return True

    def _note_cost(self, number: int, shard: Shard) -> None:
        """Note what a shard that is there cost."""
        codec, tokens, right = self.model.codec, shard.tokens, 0
        if isinstance(codec, Puzzle):
            right = int(codec.valid(torch.from_numpy(tokens)).sum())
        self.whole[number] = Cost(tokens.size, shard.nfe * len(tokens), shard.head_rows, right)

    def _read(self, number: int) -> Shard:
        """A shard as it was written; Damaged, whatever its files end in."""
        path, lines = (shard_path(self.folder, number, kind) for kind in ("npz", "jsonl"))
        first, count = self._span(number)
        with advising("it is made anew"), as_damage(path), reading(path):
            shard = read_shard(path)
            if shard.tokens.shape != (count, self.request.length):
                raise damaged(path, f"it has not {count} samples of {self.request.length}")
            if (shard.images is not None) != (self.kind == "image"):
                raise damaged(path, "it has not what the model makes")
        if self.kind in ("text", "puzzle"):
            with advising("it is made anew"), as_damage(lines), reading(lines):
                check_lines(lines, first, count)
        return shard

    def _span(self, number: int) -> tuple[int, int]:
        """The number of a shard's first sample, and how many it has."""
        first = number * self.size
        return first, min(self.size, self.request.num_samples - first)

    def _make(self, batch: BatchSize, whole: bool, on_step: OnStep | None, number: int) -> None:
        span = first, count = self._span(number)
        model, request, notify = self.model, self.request, self.notify
        made = generate(model, request, *span, batch_size=batch, on_step=on_step, notify=notify)
        decoded = replace(made, whole=whole)
        tokens, labels = made.tokens.to("cpu", torch.int32).numpy(), None
        if request.labels is not None:
            labels = request.labels[first : first + count].numpy()
        images = np.stack(decoded.images) if self.kind == "image" else None
        shard = Shard(tokens, made.nfe, made.head_rows, labels, images, number)
        if self.kind in ("text", "puzzle"):
            about = zip(decoded.text, validity_flags(decoded), strict=True)
            lines = ({"text": text, **right} for text, right in about)
            write_lines(shard_path(self.folder, number, "jsonl"), first, lines)
        shard.write(shard_path(self.folder, number))
        self._note_cost(number, shard)
        self.made += count

    def _end(self, seconds: float) -> None:
        """What there is now; of images a sheet of the first ones."""
        there = [number for number in range(self.total) if self._is_complete(number)]
        costs = [self.whole[number] for number in there]
        tokens, passes, rows, right = map(sum, zip(Cost(), *costs, strict=True))
        count = tokens // self.request.length
        if there and self.kind == "image":
            images = read_shard(shard_path(self.folder, there[0])).images
            assert images is not None
            write_png(grid(list(images[:64]), 8, 2, 2), self.folder / "samples.png")
        wanted = pluralize(f"{self.request.num_samples:,}", "sample")
        said = f"{count:,} of {wanted} in {pluralize(len(there), 'shard')} in {self.folder}"
        if self.made:
            said += f", {self.made} of them now in {seconds:.0f} s"
        if there:
            said += f": {passes / count:.1f} passes a sample"
            said += f", {rows / tokens:.1f} head rows a token"
        if isinstance(self.model.codec, Puzzle):
            said += f"; {right:,} of {pluralize(f'{count:,}', 'puzzle')} valid"
        self.notify(said + ("" if len(there) == self.total else "; go on with --resume"))


def _check_replaceable(folder: Path) -> None:
    """What cannot be made anew is said before the work."""
    for path in folder.glob("shard-*.*"):
        if path.is_dir():
            raise ValueError(f"{path} is a folder in the place of a shard: move it away")


def _fingerprint(model: Model) -> str:
    """Tells models apart by their parameters."""
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(model.denoiser, torch.nn.Module):
        for name, value in model.denoiser.state_dict().items():
            digest.update(name.encode())
            digest.update(bytes_of(value).data)
    return digest.hexdigest()


class Workers:
    """This process among all that work in a folder. Whoever is killed holds nothing.

    what: what they do, said to others.
    force: go past owners of locks that cannot be asked, as in `Lock`.
    """

    def __init__(self, folder: Path, what: str, force: bool = False) -> None:
        self.folder = folder
        self.what = what
        self.force = force
        self._mine = self._lock(f".worker-{secrets.token_hex(8)}.lock")

    @contextmanager
    def gate(self) -> Iterator[bool]:
        """Nobody comes or goes meanwhile. Gives whether others are at work."""
        with self._lock(_GATE).when_free(_PATIENCE):
            others = any(held_by(path) for path in self.folder.glob(".worker-*.lock"))
            if not others:
                self._tidy()
            yield others

    def join(self) -> None:
        """Be one of them; inside the gate."""
        self._mine.__enter__()

    def leave(self) -> None:
        """The last one clears away what killed ones left."""
        self._mine.__exit__(None, None, None)
        with self.gate():
            pass

    @contextmanager
    def claim(self, piece: str) -> Iterator[bool]:
        """Whether this process may make a piece now; nobody else does so meanwhile."""
        with ExitStack() as held:
            mine = False
            with suppress(Locked):
                held.enter_context(self._lock(f".{piece}.lock"))
                mine = True
            yield mine

    def leftovers(self) -> list[Path]:
        """Locks, and files that are not finished."""
        locks = [path for path in self.folder.iterdir() if _LEFT.fullmatch(path.name)]
        return [*locks, *parts_in(self.folder)]

    def _lock(self, name: str) -> Lock:
        return Lock(self.folder / name, self.what, self.force)

    def _tidy(self) -> None:
        for path in self.leftovers():
            if path.name != _GATE:
                with suppress(OSError):
                    path.unlink()

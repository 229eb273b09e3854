"""Area files: a file of every kind that psidiff reads, damaged or hostile, read by a command.

Right is a command that is done, or refuses in one sentence of ours within the bounds. Wrong is
all else: a traceback, a hang, memory, code that ran, a torch that is not itself any more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import mutations as m
from .examples import COMPARE, SAMPLE, Examples, torch_is_well
from .report import Outcome, remove
from .workers import Ended, run

_TRAIN = ("--out", "run", "--resume", "--device", "cpu")
_FRESH = ("train", "tiny.yaml", "--out", "run", "--device", "cpu")
_RESUME = ("train", "tiny.yaml", "train.steps=5", *_TRAIN)
_LOAD = ("sample", "model", "-n", 1, "--steps", 2, "--device", "cpu")
_LAST = "run/checkpoints/step-00000004"
_JUDGE = ("evaluate", "digits", "--samples", "samples.jsonl", "--device", "cpu")


@dataclass(frozen=True)
class Kind:
    """A kind of file: the folder it lies in, which files of it, how they are damaged, and the
    commands that read them."""

    name: str
    group: str
    files: str
    mutation: m.Mutation
    commands: Sequence[Sequence[Any]]


def _data(name: str, *more: str) -> tuple[Any, ...]:
    return ("train", "tiny.yaml", f"data.train={name}", *more, *_FRESH[2:])


def _pictures(path: str) -> tuple[Any, ...]:
    return ("train", "tiny.yaml", f"data.path={path}", *_FRESH[2:])


_SHOW = ("train", "tiny.yaml", "--show")
_NPZ = m.zip_file(m.npy, sealed=True)
KINDS = [
    Kind("recipe", "corpus", "tiny.yaml", m.yaml_file, [_SHOW]),
    Kind("text", "corpus", "a.txt", m.damaged_bytes, [_data("a.txt")]),
    Kind(
        "text.gz",
        "corpus",
        "a.txt.gz",
        m.compressed("gz", m.damaged_bytes),
        [_data("a.txt.gz")],
    ),
    Kind(
        "text.xz",
        "corpus",
        "a.txt.xz",
        m.compressed("xz", m.damaged_bytes),
        [_data("a.txt.xz")],
    ),
    Kind("jsonl", "corpus", "a.jsonl", m.json_lines, [_data("a.jsonl")]),
    Kind(
        "jsonl.gz",
        "corpus",
        "a.jsonl.gz",
        m.compressed("gz", m.json_lines),
        [_data("a.jsonl.gz")],
    ),
    Kind(
        "jsonl.xz",
        "corpus",
        "a.jsonl.xz",
        m.compressed("xz", m.json_lines),
        [_data("a.jsonl.xz")],
    ),
    Kind(
        "tar",
        "corpus",
        "a.tar.gz",
        m.compressed("gz", m.damaged_bytes),
        [_data("a.tar.gz/a.txt")],
    ),
    Kind(
        "tokenizer.json",
        "corpus",
        "tokenizer.json",
        m.tokenizer_file,
        [_data("a.txt", "data.tokenizer=tokenizer.json")],
    ),
    Kind(
        "tokens.npy",
        "corpus",
        "a.npy",
        m.npy,
        [("train", "tiny.yaml", "data={kind: tokens, path: a.npy}", *_FRESH[2:])],
    ),
    Kind("store", "store", "cache/tokens/*/*", m.damaged_bytes, [_FRESH]),
    Kind("store.json", "store", "cache/tokens/*/about.json", m.json_file, [_FRESH]),
    Kind("images.npz", "images", "set.npz", _NPZ, [_pictures("set.npz")]),
    Kind("png", "images", "pictures/*/0.png", m.png, [_pictures("pictures")]),
    Kind("jpeg", "images", "pictures/*/0.jpeg", m.damaged_bytes, [_pictures("pictures")]),
    Kind("idx", "images", "idx/train-images*", m.damaged_bytes, [_pictures("idx")]),
    Kind(
        "idx.gz", "images", "idx/*.gz", m.compressed("gz", m.damaged_bytes), [_pictures("idx")]
    ),
    Kind("cifar-py", "images", "cifar-py/*", m.pickle_bytes, [_pictures("cifar-py")]),
    Kind("cifar-bin", "images", "cifar-bin/*", m.damaged_bytes, [_pictures("cifar-bin")]),
    Kind(
        "given.png",
        "picture",
        "given.png",
        m.png,
        [
            (
                "sample",
                "digits",
                "--given",
                "given.png",
                "-n",
                1,
                "--steps",
                2,
                "--device",
                "cpu",
            )
        ],
    ),
    Kind(
        "ckpt",
        "official",
        "model.ckpt",
        m.zip_file(m.pickle_bytes),
        [("convert", "model.ckpt", "out"), ("convert", "model.ckpt", "out", "--raw")],
    ),
    Kind("old ckpt", "official", "old.ckpt", m.pickle_bytes, [("convert", "old.ckpt", "out")]),
    Kind(
        "vocab.txt",
        "official",
        "vocab.txt",
        m.damaged_bytes,
        [("convert", "model.ckpt", "out")],
    ),
    Kind(
        "hub weights",
        "hub",
        "hub/model.safetensors",
        m.safetensors,
        [("convert", "hub", "out")],
    ),
    Kind("hub config", "hub", "hub/config.json", m.json_file, [("convert", "hub", "out")]),
    Kind("hub vocab", "hub", "hub/vocab.txt", m.damaged_bytes, [("convert", "hub", "out")]),
    Kind("weights", "shards", "model/model.safetensors", m.safetensors, [_LOAD]),
    Kind("psidiff.json", "shards", "model/psidiff.json", m.json_file, [_LOAD]),
    Kind("codec.json", "shards", "model/codec.json", m.codec_file, [_LOAD]),
    Kind("sampling.json", "shards", "shards/sampling.json", m.json_file, []),
    Kind("shard", "shards", "shards/shard-00001.npz", _NPZ, []),
    Kind("shard.jsonl", "shards", "shards/shard-00001.jsonl", m.json_lines, []),
    Kind("trace", "trace", "a.trace", _NPZ, [("replay", "a.trace")]),
    Kind("samples.jsonl", "judged", "samples.jsonl", m.json_lines, [_JUDGE]),
    Kind(
        "features",
        "judged",
        "features.pt",
        m.zip_file(m.pickle_bytes),
        [(*_JUDGE, "--features", "features.pt")],
    ),
    Kind("protocol", "report", "report/protocol.json", m.json_file, [COMPARE]),
    Kind("cells", "report", "report/cells-0.jsonl", m.json_lines, [COMPARE]),
    Kind("stored recipe", "run", "run/config.yaml", m.yaml_file, [_RESUME]),
    Kind("run codec", "run", "run/codec.json", m.codec_file, [_RESUME]),
    Kind("run.json", "run", "run/run.json", m.json_file, [_RESUME]),
    Kind("log", "run", "run/log.jsonl", m.json_lines, [_RESUME]),
    Kind("facts", "run", f"{_LAST}/*.json", m.json_file, [_RESUME]),
    Kind("checkpoint", "run", f"{_LAST}/*", m.damaged_bytes, [_RESUME]),
    Kind(
        "checkpoint tensors",
        "run",
        f"{_LAST}/*.safetensors",
        m.safetensors,
        [_RESUME],
    ),
    Kind(
        "old metadata",
        "oldrun",
        "run/checkpoints/step-00000004/.metadata",
        m.pickle_bytes,
        [_RESUME],
    ),
    Kind(
        "old parts",
        "oldrun",
        f"{_LAST}/*.distcp",
        m.zip_file(m.pickle_bytes),
        [_RESUME],
    ),
]
_SHARDED = [
    (*SAMPLE, "--out", "shards", "--resume"),
    ("evaluate", "model", "--samples", "shards", "--metrics", "entropy", "--device", "cpu"),
]


class Files:
    """The tries of this area, one file each."""

    def __init__(self, seed: int, root: Path) -> None:
        self.seed, self.root = seed, root
        self.examples = Examples(root / "examples")

    def try_one(self, number: int) -> Outcome:
        rng = np.random.default_rng((self.seed, 1, number))
        kind = KINDS[number % len(KINDS)]
        folder = self.root / f"case-{os.getpid()}"
        remove(folder)
        try:
            return self._try(rng, kind, folder)
        except RuntimeError as error:
            return Outcome("an example", f"it cannot be made: {error}")
        finally:
            remove(folder)

    def _try(self, rng: m.Rng, kind: Kind, folder: Path) -> Outcome:
        self.examples.copy(kind.group, folder)
        found = sorted(path for path in folder.glob(kind.files) if path.is_file())
        if not found:
            return Outcome(f"{kind.name}: no such file here", counts={"not there": 1})
        path, way = m.pick(rng, found), "damaged"
        if rng.random() < 0.03:
            way = m.pick(rng, tuple(_INSTEAD))
            path.unlink()
            _INSTEAD[way](path)
        else:
            path.write_bytes(kind.mutation(rng, path.read_bytes()))
        command = m.pick(rng, kind.commands or _SHARDED)
        ended = run(lambda: _guarded(command), folder)
        failure = _escaped(folder) or ended.failure()
        where = path.relative_to(folder)
        what = f"{kind.name}: {where} {way}; psidiff {' '.join(map(str, command))}"
        return Outcome(what, failure, _said(ended), ended.seconds, ended.peak)


def _guarded(command: Sequence[Any]) -> int:
    """In the worker: the command; then torch must still be itself."""
    from .workers import command_here

    code = command_here(command)
    if not torch_is_well():
        raise AssertionError("torch is poisoned")
    return code


def _said(ended: Ended) -> str:
    return ended.sentence if ended.code else "done"


def _escaped(folder: Path) -> str | None:
    """What lies where only code that ran, or a name with .., can have put it."""
    for path in folder.rglob(m.MARKER):
        return f"planted code ran: {path.relative_to(folder)} is there"
    for path in (folder.parent / "outside", Path("/tmp/outside")):
        if path.exists():
            remove(path)
            return f"it wrote outside its folder: {path.name}"
    return None


def _folder(path: Path) -> None:
    path.mkdir()


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _outside(path: Path) -> None:
    path.symlink_to("/tmp/outside")  # where `_escaped` looks


def _gone(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


_INSTEAD = {
    "is a folder": _folder,
    "is a pipe": os.mkfifo,
    "is a loop of links": _loop,
    "is /dev/zero": _zero,
    "is a link to outside": _outside,
    "is gone": _gone,
}

"""The store: a corpus as tokens on disk, made once and then only mapped into memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..checksums import file_crc32
from ..files import folder_of, load_array, read_object, write_atomic, write_object, writing
from ..limits import read_bytes
from ..types import as_count
from .codec import Codec, load_codec
from .detokenizers import DETOKENIZERS
from .hub import HubData
from .source_files import SourceFile
from .text_sources import documents, resolve
from .tokenization import Encoded, dtype_of, tokenize_documents
from .tokenizers import Subwords

OnProgress = Callable[[int, int], None] | None  # told how many documents and tokens are done
FORMAT = 1  # of the files of a store; part of its key
_FILES = ("tokens.bin", "ends.npy")
_DTYPES = ("uint8", "uint16", "uint32")
_SETTLED = 2 * 10**9  # nanoseconds after which a file's time tells its next change


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Documents end to end: number i is tokens[ends[i - 1] : ends[i]].

    key: what stands for the text and how it was encoded, wherever it came from.
    """

    tokens: np.ndarray
    ends: np.ndarray
    key: str = ""

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        about = read_object(folder / "about.json")
        tokens = np.memmap(folder / "tokens.bin", dtype=about["dtype"], mode="r")
        return cls(tokens, load_array(folder / "ends.npy"), folder.name)

    def __len__(self) -> int:
        return len(self.ends)

    def part(self, first: int, last: int) -> TokenStore:
        """The tokens from first to last; a document that is cut there becomes two."""
        ends = np.unique(np.clip(self.ends, first, last)) - first
        key = f"{self.key} from {first} to {last}"
        return TokenStore(self.tokens[first:last], ends[ends > 0], key)

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Where these documents begin."""
        return np.where(numbers == 0, 0, self.ends[numbers - 1])


def tokenize(
    source: str,
    codec: Codec,
    *,
    detokenizer: str | None = None,
    field: str = "text",
    split: str | None = None,
    cache: str | Path | None = None,
    workers: int | None = None,
    on_progress: OnProgress = None,
) -> TokenStore:
    """The store of `documents(source, field, split)`, from the cache where it is there.

    The key is what the files contain and how they are encoded, not what they are called. The
    store is the same whatever the number of `workers`; None: as many as there are processors.
    `on_progress` is told how many documents and tokens are done.
    """
    if detokenizer is not None and detokenizer not in DETOKENIZERS:
        raise ValueError(f"detokenizer {detokenizer!r} is not one of {', '.join(DETOKENIZERS)}")
    processes = as_count("workers", (os.cpu_count() or 1) if workers is None else workers)
    texts = documents(source, field, split)
    root = _cache_folder(cache)
    key = _key(
        content=_content(source, split, root),
        codec=codec.describe(),
        detokenizer=detokenizer,
        field=field,
    )
    folder = root / "tokens" / key
    if not _whole(folder):
        if folder.exists():
            warnings.warn(f"{folder} is damaged: it is made again from the text", stacklevel=2)
        _build(
            folder, tokenize_documents(texts, codec, detokenizer, processes), codec, on_progress
        )
    return TokenStore.open(folder)


def trained_bpe(
    source: str,
    vocab_size: int,
    field: str = "text",
    split: str | None = None,
    cache: str | Path | None = None,
) -> Codec:
    """A BPE of `documents(source, field, split)`, from the cache where it is there."""
    root = _cache_folder(cache)
    key = _key(content=_content(source, split, root), vocab_size=vocab_size, field=field)
    kept = root / "tokenizers" / f"{key}.json"
    if not kept.exists():
        made = Subwords.train_bpe(documents(source, field, split), vocab_size)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_object(kept, made.describe())
    return load_codec(kept)


def _cache_folder(cache: str | Path | None) -> Path:
    return Path(cache).expanduser() if cache else folder_of("PSIDIFF_CACHE")


def _key(**inputs: Any) -> str:
    described = json.dumps({"format": FORMAT, **inputs}, sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def _content(source: str, split: str | None, root: Path) -> list[Any]:
    """What stands for the text of a source: hashes of its files, or its version on the hub."""
    found = resolve(source, split)
    if isinstance(found, HubData):
        return [source, split, found.rows._fingerprint]
    return [[part.kind, part.member, _hash(part, root)] for part in found]


def _hash(part: SourceFile, root: Path) -> str:
    """SHA-256 of a file, remembered until its size or a time changes. Programs set the time of
    contents as they like, not that of the last change (ctime)."""
    stat = part.path.stat()
    name = f"{part.path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
    remembered = root / "hashes" / hashlib.sha256(name.encode()).hexdigest()[:32]
    with suppress(OSError, ValueError):
        said = read_bytes(remembered)
        if re.fullmatch(rb"[0-9a-f]{64}", said):
            return said.decode()
    with part.path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) > _SETTLED:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(remembered, found)
    return found


def _whole(folder: Path) -> bool:
    """The store is there with all its bytes, as they were written."""
    try:
        about = read_object(folder / "about.json")
        sizes = [(folder / name).stat().st_size for name in _FILES]
        if about["dtype"] not in _DTYPES or about["bytes"] != sizes:
            return False
        if "crc32" in about:
            return about["crc32"] == _checksums(folder)
        _adopt(folder, about)
        return True
    except (OSError, ValueError, KeyError):
        return False


def _checksums(folder: Path) -> list[str]:
    """Of the files as they are: 0.1 s for 100 MB, in a process once while they stay."""
    paths = [folder / name for name in _FILES]
    stats = [(path, path.stat()) for path in paths]
    return [_checksum(path, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats]


@cache
def _checksum(path: Path, *_: int) -> str:
    return file_crc32(path)


def _adopt(folder: Path, about: dict[str, Any]) -> None:
    """A store of an earlier version, which may have taken hours, gets the checksums that it has
    today."""
    warnings.warn(
        f"{folder} is of an earlier version, without checksums: its tokens are taken as they "
        "are and checked from now on; delete the folder to make it again",
        stacklevel=4,
    )
    with suppress(OSError):  # a cache that others own
        write_object(folder / "about.json", {**about, "crc32": _checksums(folder)})


def _build(
    folder: Path, found: Iterator[Encoded], codec: Codec, on_progress: OnProgress
) -> None:
    """A store under another name, which becomes `folder` once it is complete."""
    fresh = folder.with_name(f".{uuid.uuid4().hex}")
    fresh.mkdir(parents=True)
    try:
        _write(fresh, found, codec, on_progress)
        if folder.exists() and not _whole(folder):
            shutil.rmtree(folder)
        if not folder.exists():  # another process may have been faster
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write(
    fresh: Path, found: Iterator[Encoded], codec: Codec, on_progress: OnProgress
) -> None:
    count, done, ends = 0, 0, []
    with writing(fresh / "tokens.bin") as file:
        for tokens, stops in found:
            file.write(tokens.tobytes())
            ends.append(count + stops)
            count += len(tokens)
            done += len(stops)
            if on_progress is not None:
                on_progress(done, count)
    if count == 0:
        raise ValueError("all documents are empty: there is not one token in them")
    with writing(fresh / "ends.npy") as file:
        np.save(file, np.concatenate(ends))
    sizes = [(fresh / name).stat().st_size for name in _FILES]
    about = {"dtype": dtype_of(codec).name, "bytes": sizes, "crc32": _checksums(fresh)}
    write_object(fresh / "about.json", about)

"""Where text comes from: a file, an archive, a folder or a hub, read as documents."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ..checksums import in_short, one_line, reading
from ..files import folder_of
from ..limits import BoundedStream, check_limit, limits, parse_json, regular_file
from ..registry import optional_module

HUB = "datasets:"
_ARCHIVE = re.compile(r"(.+?\.(?:tar|tar\.gz|tgz|tar\.xz|txz|tar\.bz2))(?:/(.+))?")
_KINDS = (".txt", ".jsonl")
_UNPACK: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys((".gz", ".tgz"), lambda stream: gzip.GzipFile(fileobj=stream)),
    **dict.fromkeys((".xz", ".txz"), lzma.LZMAFile),
    ".bz2": bz2.BZ2File,
}


class NotHere(ValueError):
    """A file or folder of data is neither where it was said nor below PSIDIFF_DATA."""


class SourceFile(NamedTuple):
    """A file of a corpus, or a member of an archive."""

    path: Path
    member: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}/{self.member}"

    @property
    def kind(self) -> str:
        """.txt or .jsonl, whether compressed or not; '' for all others."""
        name = str(self).removesuffix(".gz").removesuffix(".xz")
        return next((kind for kind in _KINDS if name.endswith(kind)), "")


def find(path: str | Path) -> Path:
    """A path as it is, or else below the folder that PSIDIFF_DATA names."""
    given = Path(path).expanduser()
    places = dict.fromkeys((given.absolute(), folder_of("PSIDIFF_DATA").absolute() / given))
    for place in places:
        if place.exists():
            return place
    tried = " and no ".join(str(place) for place in places)
    raise NotHere(f"there is no {tried}: PSIDIFF_DATA may name the folder that has it")


def documents(source: str, field: str = "text", split: str | None = None) -> Iterator[str]:
    """The documents of a corpus, in order.

    `source` is a .txt (one document), a .jsonl (one a line, in `field`), either also as .gz or
    .xz; a folder of these; a member of an archive, `books.tar.xz/train.jsonl`; or
    `datasets:OWNER/NAME` or `datasets:OWNER/NAME/CONFIG` of the `datasets` library, whose
    `split` is "train" unless named.
    """
    if source.startswith(HUB):
        texts = (_text_of(row, field, source) for row in from_hub(source, split))
    elif split is not None:
        raise ValueError(f"{source} has no splits (got {split!r}): only {HUB}... sources do")
    else:
        texts = (text for part in parts(source) for text in _read(part, field))
    return _require_any(texts, source)


def parts(source: str) -> list[SourceFile]:
    """The files that a source names, in order."""
    archive = _ARCHIVE.fullmatch(source)
    if archive and not archive[2]:
        raise ValueError(f"{source} is an archive: name a file in it, as {source}/train.jsonl")
    found = SourceFile(find(archive[1]), archive[2]) if archive else SourceFile(find(source))
    if found.path.is_dir() and found.member is None:
        return _files_below(found.path)
    if not found.kind:
        raise ValueError(
            f"{source} is of no known kind: text is read from {' and '.join(_KINDS)} files, "
            "also as .gz or .xz, from folders of them and from .tar archives"
        )
    return [found._replace(path=regular_file(found.path))]


def datasets_module(source: str) -> Any:
    """The package that loads a `datasets:` source."""
    return optional_module("datasets", f"{source} needs: pip install datasets")


def from_hub(source: str, split: str | None) -> Any:
    """The dataset of a `datasets:OWNER/NAME/CONFIG`."""
    datasets = datasets_module(source)
    names = source.removeprefix(HUB).split("/")
    repository, config = "/".join(names[:2]), "/".join(names[2:]) or None
    try:
        return datasets.load_dataset(repository, config, split=split or "train")
    except Exception as error:  # of the network, of the hub, of the library: of many kinds
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{source} cannot be loaded (it is read as {HUB}OWNER/NAME/CONFIG): {reason}"
        ) from error


def _files_below(folder: Path) -> list[SourceFile]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found = [part for part in map(SourceFile, files) if part.kind]
    if not found:
        raise ValueError(f"{folder} has no {' or '.join(_KINDS)} file in it")
    return found


def _require_any(texts: Iterator[str], source: str) -> Iterator[str]:
    first = next(texts, None)
    if first is None:
        raise ValueError(f"{source} has no documents in it")
    yield first
    yield from texts


def _read(part: SourceFile, field: str) -> Iterator[str]:
    with _opened(part) as stream:
        texts = (_jsonl if part.kind == ".jsonl" else _txt)(stream, part, field)
        while True:
            with reading(part):  # not around what is done with the text
                text = next(texts, None)
            if text is None:
                return
            yield text


def _txt(stream: Any, part: SourceFile, field: str) -> Iterator[str]:
    read: list[bytes] = []
    size = 0
    while data := stream.read(2**20):
        read.append(data)
        size += len(data)
        said = f"is one document of {size:,} bytes or more"
        check_limit("document", size, part, said, 16 * size)
    try:
        text = b"".join(read).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{part} is not UTF-8 at byte {error.start}") from error
    if text:
        yield text


def _jsonl(stream: Any, part: SourceFile, field: str) -> Iterator[str]:
    most, number = limits().line, 0
    while line := stream.readline(most + 1):
        number, place = number + 1, f"line {number + 1} of {part}"
        check_limit("line", len(line), place, f"has over {most:,} bytes", 16 * most)
        if line.strip():
            yield _text_of(parse_json(line, place), field, place)


def _text_of(row: Any, field: str, place: str) -> str:
    if not isinstance(row, dict):
        raise ValueError(
            f"{place} must be an object with a field {field!r}, got {in_short(row)}"
        )
    if field not in row:
        known = one_line(", ".join(list(row)[:8])) if row else "none"
        raise ValueError(f"{place} has no field {field!r}, but {known}")
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"{place} must have text in {field!r}, got {in_short(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} has half of a character at {error.start} of {field!r} "
            f"({text[error.start]!r}), which no text in UTF-8 can hold: take it out"
        ) from None
    return text


@contextmanager
def _opened(part: SourceFile) -> Iterator[Any]:
    """The bytes of a part, decompressed. An archive is read from the front."""
    with ExitStack() as stack:
        stream: Any = stack.enter_context(regular_file(part.path).open("rb"))
        size = part.path.stat().st_size
        with reading(part):
            if part.member is not None:
                unpacked = _unpacked(stream, part.path.suffix, size, part.path)
                archive = tarfile.open(fileobj=unpacked, mode="r|")  # noqa: SIM115
                stream = _member(stack.enter_context(archive), part)
            found = _unpacked(stream, PurePosixPath(str(part)).suffix, size, part)
        yield found


def _unpacked(stream: Any, suffix: str, size: int, place: Any) -> io.BufferedReader:
    """A stream decompressed as the suffix says, within the bounds for a file of this size."""
    unpack = _UNPACK.get(suffix, lambda stream: stream)
    return io.BufferedReader(BoundedStream(unpack(stream), size, place), 2**16)


def _member(archive: tarfile.TarFile, part: SourceFile) -> Any:
    """Archives are read from the front: what comes after the member is never decompressed."""
    names: list[str] = []
    for entry in archive:
        names.append(entry.name.removeprefix("./"))
        said = f"has {len(names):,} entries or more"
        check_limit("members", len(names), part.path, said, 16 * len(names))
        if names[-1] == part.member and entry.isreg():
            return archive.extractfile(entry)
        archive.members = []  # type: ignore[attr-defined]  # else it keeps all it has seen
    some = one_line(", ".join(names[:8]) + (", ..." if len(names) > 8 else ""))
    raise ValueError(f"{part.path} has no file {part.member}, but {some or 'nothing'}")

"""Where text comes from: a file, an archive, a folder or a hub, read as documents."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import PurePosixPath
from typing import Any

from ..checksums import damaged, in_short, one_line, reading
from ..limits import BoundedStream, check_limit, check_zip, limits, parse_json, regular_file
from .hub import HubData, datasets_module, hub_data
from .parquet import parquet_rows
from .source_files import HUB, NotHere, SourceFile, find, folder_for, local_parts, parts

__all__ = ["HUB", "NotHere", "SourceFile", "documents", "find", "parts", "rows", "text_of"]
Row = tuple[str, Any]  # where it is, in words; what it holds
_UNPACK: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys((".gz", ".tgz"), lambda stream: gzip.GzipFile(fileobj=stream)),
    **dict.fromkeys((".xz", ".txz"), lzma.LZMAFile),
    ".bz2": bz2.BZ2File,
}


def documents(source: str, field: str = "text", split: str | None = None) -> Iterator[str]:
    """The documents of a corpus, in order.

    `source` is a .txt (one document), a .jsonl or .parquet (one a row, in the column `field`),
    .txt and .jsonl also as .gz or .xz; a folder of these, of which `split` takes the files
    whose names say it; a member of an archive, `books.tar.xz/train.jsonl`; or
    `datasets:OWNER/NAME`, `datasets:OWNER/NAME/CONFIG` or `...@REVISION`, whose files are
    taken from PSIDIFF_DATA where they are there, or else by the `datasets` library. Its `split`
    is "train" unless named.
    """
    found = resolve(source, split)
    if isinstance(found, HubData):
        texts = (text_of(row, field, source) for row in found.rows)
    else:
        texts = (text for part in found for text in read_part(part, field))
    return _require_any(texts, source)


def check_source(source: str, split: str | None) -> None:
    """What must come from the Hub needs a package: it is there.

    Raises:
        ValueError: it is not.
    """
    if source.startswith(HUB) and local_parts(source, split) is None:
        datasets_module(source)


def resolve(source: str, split: str | None) -> list[SourceFile] | HubData:
    """The files of a source, or what the `datasets` library has of it."""
    if not source.startswith(HUB):
        return parts(source, split)
    found = local_parts(source, split)
    if found is not None:
        return found
    try:
        return hub_data(source, split)
    except ValueError as error:
        raise NotHere(
            f"{error}; or put its files, Parquet or JSON lines, into {folder_for(source)}"
        ) from error


def _require_any(texts: Iterator[str], source: str) -> Iterator[str]:
    first = next(texts, None)
    if first is None:
        raise ValueError(f"{source} has no documents in it")
    yield first
    yield from texts


def read_part(part: SourceFile, field: str) -> Iterator[str]:
    """The documents of one file."""
    if part.kind in _TEXTS:
        with opened(part) as stream:
            yield from _one_by_one(_TEXTS[part.kind](stream, part), part)
    else:
        for place, row in rows(part, [field]):
            yield text_of(row, field, place)


def rows(
    part: SourceFile, columns: Sequence[str] | None = None, kind: str = ""
) -> Iterator[Row]:
    """The rows of a file of Parquet, of JSON lines or of one JSON list; columns: of Parquet,
    the only ones that are read; kind: what the file is, whatever its name says."""
    kind = kind or part.kind
    if kind == ".parquet":
        if part.member is not None:
            raise ValueError(f"{part} is Parquet inside an archive: unpack the archive")
        for number, row in enumerate(parquet_rows(part.path, columns), 1):
            yield f"row {number} of {part}", row
        return
    with opened(part) as stream:
        yield from _one_by_one((_json if kind == ".json" else _jsonl)(stream, part), part)


def _one_by_one(values: Iterator[Any], part: SourceFile) -> Iterator[Any]:
    while True:
        with reading(part):  # not around what is done with a value
            value = next(values, None)
        if value is None:
            return
        yield value


def _txt(stream: Any, part: SourceFile) -> Iterator[str]:
    text = _decoded(_whole(stream, part, "document", "is one document of"), part)
    if text:
        yield text


def _whole(stream: Any, part: SourceFile, limit: str, said: str) -> bytes:
    """All of a stream, if it is within a bound."""
    read: list[bytes] = []
    size = 0
    while data := stream.read(2**20):
        read.append(data)
        size += len(data)
        check_limit(limit, size, part, f"{said} {size:,} bytes or more", 16 * size)
    return b"".join(read)


def _decoded(data: bytes, part: SourceFile) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{part} is not UTF-8 at byte {error.start}") from error


def _numbered_lines(stream: Any, part: SourceFile) -> Iterator[tuple[str, bytes]]:
    """Lines that are not blank, each after its place."""
    most, number = limits().line, 0
    while line := stream.readline(most + 1):
        number, place = number + 1, f"line {number + 1} of {part}"
        check_limit("line", len(line), place, f"has over {most:,} bytes", 16 * most)
        if line.strip():
            yield place, line


def _lines(stream: Any, part: SourceFile) -> Iterator[str]:
    """A document a line, without the spaces around it."""
    for place, line in _numbered_lines(stream, part):
        with reading(place):
            yield line.decode("utf-8").strip()


def _texts(stream: Any, part: SourceFile) -> Iterator[str]:
    """The documents of an archive of OpenWebText by the order of their names, without their
    outer space and with at most one blank line in a row."""
    found: dict[str, str] = {}
    size = 0
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for entry in archive:
            size += entry.size
            check_limit("text", size, part, f"has {size:,} bytes or more", 16 * size)
            check_limit("members", len(found), part, f"has over {len(found):,} entries")
            if entry.isreg() and entry.name.endswith(".txt"):
                held: Any = archive.extractfile(entry)
                text = _decoded(held.read(), part).strip()
                found[entry.name] = re.sub("\n{3,}", "\n\n", text)
            archive.members = []  # type: ignore[attr-defined]  # else it keeps all it has seen
    for name in sorted(found):
        if found[name]:
            yield found[name]


_TEXTS = {".txt": _txt, ".lines": _lines, ".texts": _texts}


def _jsonl(stream: Any, part: SourceFile) -> Iterator[Row]:
    for place, line in _numbered_lines(stream, part):
        yield place, parse_json(line, place)


def _json(stream: Any, part: SourceFile) -> Iterator[Row]:
    """The values of one list."""
    values = parse_json(_whole(stream, part, "text", "has"), part)
    if not isinstance(values, list):
        raise damaged(part, f"it must hold a list of objects, got {in_short(values)}")
    for number, value in enumerate(values, 1):
        yield f"item {number} of {part}", value


def text_of(row: Any, field: str, place: str) -> str:
    """The text in a field of a row, or a sentence that says what is there instead."""
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
def opened(part: SourceFile) -> Iterator[Any]:
    """The bytes of a part, decompressed. An archive is read from the front."""
    with ExitStack() as stack:
        stream: Any = stack.enter_context(regular_file(part.path).open("rb"))
        size = part.path.stat().st_size
        with reading(part):
            if part.member is not None and part.path.suffix == ".zip":
                check_zip(part.path, part.path)
                stream = _zip_member(stack.enter_context(zipfile.ZipFile(stream)), part)
            elif part.member is not None:
                unpacked = _unpacked(stream, part.path.suffix, size, part.path)
                archive = tarfile.open(fileobj=unpacked, mode="r|")  # noqa: SIM115
                stream = _member(stack.enter_context(archive), part)
            found = _unpacked(stream, PurePosixPath(str(part)).suffix, size, part)
        yield found


def _unpacked(stream: Any, suffix: str, size: int, place: Any) -> io.BufferedReader:
    """A stream decompressed as the suffix says, within the bounds for a file of this size."""
    unpack = _UNPACK.get(suffix, lambda stream: stream)
    return io.BufferedReader(BoundedStream(unpack(stream), size, place), 2**16)


def _zip_member(archive: zipfile.ZipFile, part: SourceFile) -> Any:
    names = archive.namelist()
    if part.member in names:
        return archive.open(part.member)
    some = one_line(", ".join(names[:8]) + (", ..." if len(names) > 8 else ""))
    raise ValueError(f"{part.path} has no file {part.member}, but {some or 'nothing'}")


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

"""The files we write: whole or absent, with version and checksum; read back or refused."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from .checksums import (
    FORMAT_VERSION,
    KEY,
    Damaged,
    as_damage,
    bytes_of,
    check_text,
    check_zip_seal,
    checked_values,
    crc32,
    damaged,
    in_short,
    reading,
    seal_zip,
    tensors_crc32,
    text_with_checksum,
    with_checksum,
)
from .limits import check_zip, parse_json, read_bytes, regular_file

_READ = (1, FORMAT_VERSION)
_HEADER = 1000  # bytes of what an .npy says of its array: a hundred are usual
_PART = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.part", re.DOTALL)  # of a file not complete yet

_SEAL = re.compile(rb', "checksum": "(line )?(crc32:[0-9a-f]{8})"\}\Z')  # of bytes, of values
_TRACE_OF_SEAL = re.compile(rb'crc32:[0-9a-f]{8}"\}\Z')


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """An open file (read, write) that becomes `path` when it is complete and on the disk.

    Until then its name is nobody else's, so two processes never write into one file. A link is
    followed, a file that is there hands on its mode; a device or a pipe gets the bytes when
    they are complete.
    """
    with naming_what_cannot_be_written(path):
        found = None
        with suppress(FileNotFoundError):
            found = path.stat()  # of what is behind links
        if found is None or stat.S_ISREG(found.st_mode):
            with _renamed(Path(os.path.realpath(path)), found) as file:
                yield file
        else:
            with tempfile.TemporaryFile() as file:
                yield file
                file.seek(0)
                with path.open("wb") as target:
                    shutil.copyfileobj(file, target)


@contextmanager
def naming_what_cannot_be_written(path: Path) -> Iterator[None]:
    """Here a file is written: what the system fails at is said of it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"{path} cannot be written: {reason}") from error


@contextmanager
def _renamed(path: Path, found: os.stat_result | None) -> Iterator[BinaryIO]:
    name = f".{path.name[:40]}.{os.getpid()}-{secrets.token_hex(4)}.part"
    part = path.with_name(name)  # short enough wherever the name itself is
    try:
        with part.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if found is not None:
            with suppress(OSError):  # not every file system has modes
                part.chmod(stat.S_IMODE(found.st_mode))
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def check_plain(folder: Path) -> None:
    """A folder that we go on writing to, perhaps a stranger's, has plain files in it: a link
    would be written through to where it leads, and a pipe waits for ever."""
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):  # others may be at work
            kind = stat.S_IFMT(path.lstat().st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR) and not path.is_dir():
                raise ValueError(f"{path} is a link, a pipe or a device: move it away")


def parts_in(folder: Path) -> list[Path]:
    """What processes that were killed, or are at work, left unfinished in a folder."""
    return [path for path in folder.glob(".*") if _PART.fullmatch(path.name)]


def remove_parts(folder: Path) -> None:
    """What killed processes left unfinished goes; nobody else is at work in the folder."""
    for path in parts_in(folder):
        with suppress(OSError):
            path.unlink()


def sync_folder(folder: Path) -> None:
    """New names in a folder survive a crash of the machine."""
    with suppress(OSError):  # not every file system or platform can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_atomic(path: Path, data: str | bytes) -> None:
    """The whole text or none of it, whenever the process is killed."""
    with writing(path) as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


# JSON


def write_object(path: Path, values: Mapping[str, Any], indent: int | None = None) -> None:
    """JSON that says its version and its checksum."""
    held = with_checksum({"format_version": FORMAT_VERSION, **values})
    write_atomic(path, json.dumps(held, indent=indent))


def read_json(path: Path) -> dict[str, Any]:
    """The mapping that a file of JSON holds."""
    return _mapping(read_bytes(path), path)


def _mapping(data: bytes, place: Path | str) -> dict[str, Any]:
    held = parse_json(data, place)
    if not isinstance(held, dict):
        raise ValueError(f"{place} must hold a mapping, got a {type(held).__name__}")
    return held


def read_object(path: Path) -> dict[str, Any]:
    """What `write_object` wrote, without version and checksum; older files have none."""
    return known_version(path, checked_values(path, _record(read_bytes(path), path)))


def known_version(path: Path | str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values but their version, if this is one that we read."""
    version = values.get("format_version", 1)
    if version not in _READ or isinstance(version, bool):
        raise ValueError(
            f"{path} has format_version {str(version)[:40]}; this psidiff reads "
            f"{' and '.join(map(str, _READ))}"
        )
    return {key: value for key, value in values.items() if key != "format_version"}


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of JSON that ends with the checksum of its bytes: that of its values
    would not see the last digits of numbers."""
    line = json.dumps(record).encode()[:-1]
    return line + f', "{KEY}": "line {crc32([line])}"}}\n'.encode()


def append_json_line(file: BinaryIO, record: Mapping[str, Any]) -> None:
    """One more line of JSON, at once on its way to the disk."""
    file.write(json_line(record))
    file.flush()


def append_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Further lines of JSON, all or none of them, on the disk when this returns."""
    with naming_what_cannot_be_written(path), path.open("ab") as file:
        before = file.tell()
        try:
            file.write(b"".join(map(json_line, records)))
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)  # no half line
            raise


def read_json_lines(
    path: Path,
    whole: bool = False,
    check: Callable[[str, dict[str, Any]], None] | None = None,
    skip: Callable[[str], None] | None = None,
    cut_lines: bool = False,
) -> list[dict[str, Any]]:
    """All records of a file that lines are appended to; [] where it is absent.

    A last line without an end was cut off by a kill and is left out. Checksums are held where
    there are any, and are not part of what is returned.

    whole: the file was written at once, perhaps by others: its last line counts without an end
    too, and empty lines are passed over.
    check: raises for what a record cannot be; it is given the line's place, too.
    skip: lines that are damaged are left out, and this is told what is wrong with each.
    cut_lines: lines that kills cut off may stand before others, and are left out; a last line
    that is a whole record counts without an end.
    """
    if not path.exists():
        return []
    *lines, last = read_bytes(path, "unpacked").split(b"\n")
    if whole or cut_lines:
        lines, last = [line for line in (*lines, last) if line.strip()], b""
    sealed = any(_SEAL.search(line[-60:]) for line in lines)
    records = []
    for number, line in enumerate((*lines, last), 1):
        place = f"line {number} of {path}"
        try:
            if number > len(lines):
                if _is_record(line[:-1]):  # no kill leaves a whole line and a byte more
                    raise damaged(place, "its end is not whole")
                continue
            record = _checked_line(line, place, sealed)
            if check is not None:
                check(place, record)
            records.append(record)
        except Damaged as error:
            if cut_lines and line.startswith(b"{"):
                continue
            if skip is None:
                raise
            skip(str(error))
    return records


def _checked_line(line: bytes, place: str, sealed: bool) -> dict[str, Any]:
    """The record of a line; sealed: lines of the file have checksums."""
    record, found = _record(line, place), _SEAL.search(line[-60:])
    if found is None or not found[1]:
        if KEY not in record and (sealed or _TRACE_OF_SEAL.search(line[-60:])):
            raise damaged(place, "it has lost its checksum")
        return checked_values(place, record)
    if crc32([line[: -len(found[0])]]).encode() != found[2]:
        raise damaged(place, "its checksum does not fit what it holds")
    return {name: value for name, value in record.items() if name != KEY}


def _record(line: bytes, place: Path | str) -> dict[str, Any]:
    with as_damage(place):
        return _mapping(line, place)


def _is_record(line: bytes) -> bool:
    with suppress(ValueError):
        return bool(_mapping(line, "it"))
    return False


# Text that a person may edit, such as YAML


def write_checked_text(path: Path, text: str) -> None:
    """Text that ends with its checksum as a comment."""
    write_atomic(path, text_with_checksum(text))


def read_checked_text(path: Path) -> bytes:
    """What a file holds; its checksum, if it ends with one, is right."""
    data = read_bytes(path)
    check_text(path, data)
    return data


# Arrays and tensors


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """A compressed .npz that ends with its checksum."""
    with writing(path) as file:
        np.savez_compressed(file, **arrays)
        seal_zip(file)


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz; no pickles, nothing that unpacks to more than it may."""
    path = regular_file(path)
    check_zip_seal(path)
    check_zip(path, path)
    arrays = {}
    with _reading_arrays(path), zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as file:
                arrays[entry.filename.removesuffix(".npy")] = _array(file, entry.file_size)
    return arrays


def load_array(path: Path) -> np.ndarray:
    """The array of an .npy file; no pickles."""
    path = regular_file(path)
    with _reading_arrays(path), path.open("rb") as file:
        return _array(file, path.stat().st_size)


@contextmanager
def _reading_arrays(path: Path) -> Iterator[None]:
    with as_damage(path, f"it is no readable {path.suffix}"), reading(path):
        yield


def _array(file: Any, size: int) -> np.ndarray:
    """An array of so many bytes, whose header does not promise more of them."""
    reader = np.lib.format
    versions = {(1, 0): reader.read_array_header_1_0, (2, 0): reader.read_array_header_2_0}
    shape, _, dtype = versions[reader.read_magic(file)](file, max_header_size=_HEADER)
    count, rest = prod(shape), size - file.tell()
    if count * dtype.itemsize != rest or count > size:
        raise ValueError(f"{in_short(shape)} of {in_short(dtype.str)} are not {rest:,} bytes")
    file.seek(0)
    held: np.ndarray = reader.read_array(file, allow_pickle=False)
    return held


DTYPES = {  # by their names in safetensors
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A safetensors file: the same tensors and words give the same bytes, while safetensors'
    own writer orders metadata at random.

    Returns:
        The file's size, where its header ends, and the header's checksum; of each tensor where
        it begins, and the checksum of its bytes.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # aligned
    described: dict[str, Any] = {"__metadata__": dict(sorted(about.items()))}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        described[name] = {
            "dtype": DTYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header, places = len(text).to_bytes(8, "little") + text, {}
    with writing(path) as file:
        file.write(header)
        for name in order:
            data = bytes_of(tensors[name]).data
            places[name] = {"start": file.tell(), "crc32": crc32([data])}
            file.write(data)
        return {"bytes": file.tell(), "begin": len(header), "header": crc32([header])}, places


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None
) -> None:
    """A safetensors file whose metadata are `about`, its version and its checksum."""
    words = {**(about or {}), "format_version": str(FORMAT_VERSION)}
    words |= {KEY: tensors_crc32(tensors, words)}
    write_safetensors(path, tensors, words)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file and the words beside them; their checksum is right,
    where there is one."""
    path = regular_file(path)
    with reading(path), safe_open(path, "pt") as file:
        about = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    said = about.pop(KEY, None)
    sealed = said is not None or about.get("format_version") == str(FORMAT_VERSION)
    if sealed and said != tensors_crc32(tensors, about):
        raise damaged(path, "its checksum does not fit what it holds")
    return tensors, about


@contextmanager
def advising(what_to_do: str) -> Iterator[None]:
    """Damage that is found here is said with what can be done about it."""
    try:
        yield
    except Damaged as error:
        place = str(error).partition(" is damaged: ")[0]
        raise damaged(place, error.why, what_to_do) from error


def folder_of(name: str) -> Path:
    """A folder that the environment names: PSIDIFF_DATA, what is given to us; PSIDIFF_CACHE,
    what takes minutes to make."""
    return Path(os.environ.get(name) or "~/.cache/psidiff").expanduser()

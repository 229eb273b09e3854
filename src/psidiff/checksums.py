"""Checksums in the files we write: a CRC-32 finds every single flipped bit, at memory speed.

JSON carries it as a key, text and zip archives at their end, safetensors in their metadata. A
file says in two places that it has one, so no single flipped bit makes it pass as an older file
that has none. A checksum finds damage, not malice.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

FORMAT_VERSION = 2  # 1: the same files without checksums
KEY = "checksum"
_CHUNK = 2**22
_END = re.compile(rb"\n# format_version 2, checksum (crc32:[0-9a-f]{8})\n\Z")
_TRACES_OF_END = (b"# format_version", b", checksum crc32:")
_COMMENT = b"psidiff crc32:"  # of a zip archive; with its 8 digits 22 bytes
_WHAT_TO_DO = "copy it again from where it came, or make it anew"


class Damaged(ValueError):
    """A file does not hold what was written to it. `why` is the reason without the rest."""

    why = ""


def damaged(path: Any, why: str, what_to_do: str = _WHAT_TO_DO) -> Damaged:
    """The sentence for a file that cannot be read as what it is."""
    error = Damaged(f"{path} is damaged: {why}; {what_to_do}")
    error.why = why
    return error


@contextmanager
def as_damage(path: Any, because: str = "") -> Iterator[None]:
    """Here whatever is wrong with what a file holds is damage, and ValueErrors say it."""
    try:
        yield
    except ValueError as error:
        why = getattr(error, "why", "") or in_short(error, 400)
        why = why.replace(f"{path} ", "it ", 1).removeprefix(f"{path}: ")
        why = why.removeprefix("it is damaged: ")
        raise damaged(path, f"{because} ({why})" if because else why) from error


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 110
_SHORT.maxlevel = 3
_BUGS = (AssertionError, ImportError, NameError)


@contextmanager
def reading(path: Any) -> Iterator[None]:
    """Here the contents of a file become values: what they lack is said of the file.

    It stands around a reader, and around nothing that does more than read. ValueErrors keep
    their words; all else that is no bug for sure becomes Damaged, since decompressors and
    parsers fail in every way there is.
    """
    try:
        with said_of(path):
            yield
    except UnicodeError as error:
        raise damaged(path, f"it is not UTF-8 ({in_short(error)})") from error
    except OSError as error:
        if error.errno in (None, errno.EINVAL):  # a decompressor failed, or a place is none
            raise damaged(path, in_short(error)) from error
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except MemoryError as error:
        raise ValueError(f"{path} needs more memory than there is") from error
    except (ValueError, *_BUGS):
        raise
    except Exception as error:
        kind = type(error).__name__
        why = f"what it holds is not what it should be ({kind}: {in_short(error)})"
        raise damaged(path, why) from error


@contextmanager
def said_of(path: Any) -> Iterator[None]:
    """Here something is made of values of a file: ValueErrors name it. All else is a bug."""
    try:
        yield
    except UnicodeError:
        raise
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {in_short(error, 400)}") from error


def in_short(value: Any, most: int = 120) -> str:
    """A value from a file as words for a sentence: one line, no control characters, and not
    much of it, however large its whole text would be."""
    if isinstance(value, BaseException):
        return one_line(str(value), most)
    try:
        return one_line(_SHORT.repr(value), most)
    except ValueError:  # a number of thousands of digits
        return f"a {type(value).__name__}"


def one_line(text: str, most: int = 120) -> str:
    """The first line of a text, without control characters and cut to a length."""
    line = text.strip().partition("\n")[0]
    line = "".join(c if c.isprintable() else "?" for c in line[: most + 1])
    return line if len(line) <= most else f"{line[: most - 3]}..."


def crc32(parts: Iterable[Any]) -> str:
    """The checksum of bytes that come in parts."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return f"crc32:{value:08x}"


def file_crc32(path: str | Path) -> str:
    """The checksum of a file's bytes."""
    with Path(path).open("rb") as file:
        return _crc32_before(file.seek(0, os.SEEK_END), file)


def _crc32_before(end: int, file: BinaryIO) -> str:
    """The checksum of a file's bytes up to a place."""
    file.seek(0)
    return crc32(file.read(min(_CHUNK, end - start)) for start in range(0, end, _CHUNK))


# JSON


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values and, as the last key, the checksum of the others."""
    return {**values, KEY: _of_values(values)}


def checked_values(path: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without their checksum, if it is right; an older file has none."""
    rest = {name: value for name, value in values.items() if name != KEY}
    sealed = KEY in values or values.get("format_version") == FORMAT_VERSION
    if sealed and values.get(KEY) != _of_values(rest):
        raise damaged(path, "its checksum does not fit what it holds")
    return rest


def _of_values(values: Mapping[str, Any]) -> str:
    return crc32([json.dumps(values, sort_keys=True, separators=(",", ":")).encode()])


# Text whose lines may be comments, such as YAML


def text_with_checksum(text: str) -> str:
    """The text, with a last line that says its checksum as a comment."""
    text = text.rstrip("\n")
    return f"{text}\n# format_version {FORMAT_VERSION}, checksum {crc32([text.encode()])}\n"


def check_text(path: Any, data: bytes) -> None:
    """Raise Damaged where the last line tells another checksum than that of the rest."""
    found = _END.search(data)
    if found is None and any(trace in data[-120:] for trace in _TRACES_OF_END):
        raise damaged(path, "the line with its checksum is not whole")
    if found is not None and crc32([data[: found.start()]]).encode() != found[1]:
        raise damaged(
            path,
            "its last line tells another checksum",
            "if you changed it on purpose, delete that line",
        )


# Zip archives (.npz)


def seal_zip(file: BinaryIO) -> None:
    """End a complete zip archive (open for reading and writing) with its checksum."""
    file.seek(-2, os.SEEK_END)  # an archive without a comment ends with its length, 0
    if file.read(2) != b"\0\0":
        raise ValueError("the archive has a comment already")
    file.seek(-2, os.SEEK_END)
    file.write((len(_COMMENT) + 8).to_bytes(2, "little") + _COMMENT)
    digits = _crc32_before(file.tell(), file).removeprefix("crc32:")
    file.write(digits.encode())


def check_zip_seal(path: str | Path) -> bool:
    """Whether an archive ends with its checksum. Raise Damaged where it is wrong."""
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 64))
        end = file.read()
        if end[-2:] == b"\0\0" and _COMMENT not in end:
            return False
        place = end.rfind(_COMMENT)
        if place < 0 or len(end) - place != len(_COMMENT) + 8:
            if any(part in end for part in (b"psidiff", b"crc32:")):
                raise damaged(path, "the checksum at its end is not whole")
            return False
        if _crc32_before(size - 8, file) != f"crc32:{end[-8:].decode('latin1')}":
            raise damaged(path, "the checksum at its end does not fit")
    return True


# Tensors (safetensors)


def tensors_crc32(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """The checksum of named tensors and of the words beside them."""

    def parts() -> Iterable[Any]:
        yield json.dumps(sorted(about.items())).encode()
        for name in sorted(tensors):
            value = tensors[name]
            yield f"{name} {value.dtype} {tuple(value.shape)} ".encode()
            yield bytes_of(value)

    return crc32(parts())


def bytes_of(value: Tensor) -> np.ndarray:
    """A tensor's bytes on the CPU, without a copy where they lie there in order."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()

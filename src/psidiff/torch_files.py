"""Files of torch.save, read as data: tensors and plain values, with nothing called or run.

Such a file is a zip archive: `data.pkl` describes the values, `data/0`, `data/1`, ... are the
bytes of the tensors' storages. torch.load would have the pickle name functions of torch and
change them; here it names nothing that lives, and every view is checked before it is made.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from io import BufferedIOBase
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checksums import damaged, reading
from .limits import check_limit, check_zip, regular_file
from .pickles import Name, read_pickle, refused

_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
    "Untyped": torch.uint8,
}
_DTYPES = {
    f"{module}.{kind}Storage": dtype
    for module in ("torch", "torch.storage")
    for kind, dtype in _STORAGES.items()
}
_COPIES = 4  # of one storage's bytes, that all tensors of a file may be together
_CHUNK = 2**22


@dataclass(frozen=True)
class _Storage:
    """The numbers of a storage, in a row."""

    numbers: Tensor


def read_torch_file(
    source: str | Path | BufferedIOBase, path: Any = None, allowed: Collection[str] = ()
) -> Any:
    """What torch.save wrote, on the CPU.

    Args:
        source: the file's path, or an open file of bytes that is one archive.
        path: what errors call an open file.
        allowed: as of `read_pickle`.

    Raises:
        Refused: it asks for names that are not allowed, or for too much.
        Damaged: it is no whole file of torch.save.
    """
    if isinstance(source, (str, Path)):
        path = regular_file(source)
        with path.open("rb") as file:
            return read_torch_file(file, path, allowed)
    check_zip(source, path)
    with reading(path), zipfile.ZipFile(source) as archive:
        return _Archive(archive, path).read(allowed)


class _Archive:
    """An open archive and the storages that were read from it."""

    def __init__(self, archive: zipfile.ZipFile, path: Any) -> None:
        self.archive, self.path = archive, path
        self.entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in self.entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise damaged(path, "it is no file of torch.save")
        self.folder = pickles[0].removesuffix("data.pkl")
        self.storages: dict[str, _Storage] = {}
        self.held = self.viewed = 0  # bytes of the storages; of the tensors

    def read(self, allowed: Collection[str]) -> Any:
        order = f"{self.folder}byteorder"
        if order in self.entries and self.bytes(order).numpy().tobytes() != b"little":
            raise refused(self.path, "its numbers are not little-endian")
        pickle = self.folder + "data.pkl"
        check_limit("text", self.entries[pickle].file_size, self.path, "has a pickle so large")
        return read_pickle(
            self.bytes(pickle).numpy().tobytes(),
            self.path,
            {*allowed, *_DTYPES},
            {"torch._utils._rebuild_tensor_v2": self.tensor},
            self.storage,
        )

    def bytes(self, name: str) -> Tensor:
        """An entry's bytes; its checksum, if torch was not told to leave it out, is right."""
        if name not in self.entries:
            raise damaged(self.path, f"it lacks {name[:80]!r}")
        entry = self.entries[name]
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise refused(self.path, "it is compressed, which torch never does")
        if entry.flag_bits & 1:
            raise refused(self.path, "it has a password")
        if entry.CRC == 0 and entry.file_size:
            del entry.CRC  # torch was told to leave it out; zipfile compares all others
        held = torch.empty(entry.file_size, dtype=torch.uint8)
        view, place = held.numpy().data, 0
        with self.archive.open(entry) as file:
            while part := file.read(_CHUNK):
                view[place : place + len(part)] = part
                place += len(part)
        if place != len(held):
            raise damaged(self.path, f"{name[:80]!r} in it is cut off")
        return held

    def storage(self, key: Any) -> _Storage:
        """The storage that a persistent id names: ("storage", type, key, location, numel)."""
        match key:
            case ("storage", Name() as kind, str() as name, _, int() as count):
                pass
            case _:
                raise damaged(self.path, "it names a storage in a way that torch does not")
        dtype = _DTYPES.get(kind.path)
        if dtype is None:
            raise refused(self.path, f"it has a {kind.path}, which is refused")
        if name not in self.storages:
            held = self.bytes(f"{self.folder}data/{name}")
            if count * dtype.itemsize != len(held):
                raise damaged(self.path, f"storage {name[:40]!r} has not the size that it says")
            self.held += len(held)
            self.storages[name] = _Storage(held.view(dtype))
        found = self.storages[name]
        if found.numbers.dtype != dtype:
            raise damaged(self.path, f"storage {name[:40]!r} is said to have two types")
        return found

    def tensor(
        self, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any
    ) -> Tensor:  # rest: requires_grad, hooks, metadata, which mean nothing here
        """A view of a storage, which lies in it and is no larger than it."""
        view = [offset, *size, *stride]
        if not isinstance(storage, _Storage) or len(size) != len(stride) or len(size) > 64:
            raise damaged(self.path, "it has a tensor that is none")
        fits = all(type(n) is int and 0 <= n < 2**40 for n in view)
        if not fits or prod(max(n, 1) for n in size) >= 2**40:  # also where there are none
            raise damaged(self.path, "it has a tensor with a size that is none")
        numbers = storage.numbers
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        count = prod(size)
        if count and (last >= len(numbers) or count > len(numbers)):
            raise damaged(self.path, "it has a tensor that is larger than its storage")
        self.viewed += count * numbers.element_size()
        if self.viewed > _COPIES * self.held + _CHUNK:
            raise refused(self.path, "its tensors are many times as large as the file")
        if not count:
            return torch.empty(size, dtype=numbers.dtype)
        return numbers.as_strided(size, stride, offset)

"""The tensors of a checkpoint as data: a safetensors file for each process, and an index.

The index says of every chunk in which file and where it lies, and its checksum; of every file
its size and the checksum of its header. So each bit of a file is held against a checksum, and a
process checks what it reads, no more. Sharded tensors are stored as they lie, and read by any
number of processes: each takes what overlaps its own part.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checksums import as_damage, crc32, damaged, reading
from ..distributed import Processes, own
from ..files import DTYPE_NAMES, DTYPES, write_safetensors
from ..limits import check_limit, regular_file

DAMAGED_CHECKPOINT = (
    "copy the checkpoint again from where it came, or go on from the one before it with "
    "--resume --skip-damaged"
)
_FILE = re.compile(r"part-[0-9]{5}\.safetensors")
_CRC = re.compile(r"crc32:[0-9a-f]{8}")

Place = dict[str, Any]  # of a chunk: {offset, shape, file, start, ...}
Index = dict[str, Any]  # {"files": {name: {bytes, header}}, "tensors": {name: {chunks, ...}}}
Tensors = dict[str, Tensor]
Slices = tuple[slice, ...]
Reader = Callable[[list[Place]], Iterator[Tensor]]


class _Chunk(NamedTuple):
    """What one process holds of a tensor, and where in the tensor that begins."""

    name: str
    offset: tuple[int, ...]
    data: Tensor

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Chunk:
        data: Any = own(tensor)
        if data is tensor:
            return cls(name, (0,) * tensor.ndim, tensor)
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        return cls(name, tuple(chunk.offsets), data)


def _share(tensors: Tensors, group: Processes) -> Iterator[tuple[str, _Chunk]]:
    """What this process writes, by its name in the file: its part of each tensor that is
    sharded, and of the others so many that all write equally much."""
    written = [0] * group.world
    for name, tensor in tensors.items():
        chunk, label, writer = _Chunk.of(name, tensor), name, group.rank
        if chunk.data is tensor:
            writer = written.index(min(written))
            written[writer] += tensor.nbytes
        if chunk.data.shape != tensor.shape:
            label = f"{name} at {','.join(map(str, chunk.offset))}"
        if writer == group.rank and chunk.data.numel():
            yield label, chunk


def write_part(folder: Path, tensors: Tensors, group: Processes) -> Index:
    """Write this process's share to a file; the index of that, with a chunk for each tensor."""
    share = dict(_share(tensors, group))
    if not share:
        return {"files": {}, "tensors": {}}
    name, parts = f"part-{group.rank:05d}.safetensors", {n: c.data for n, c in share.items()}
    about, places = write_safetensors(folder / name, parts, {"format": "pt"})
    found = {
        chunk.name: {
            "offset": list(chunk.offset),
            "shape": list(chunk.data.shape),
            "file": name,
            **places[label],
        }
        for label, chunk in share.items()
    }
    return {"files": {name: about}, "tensors": found}


def whole_index(tensors: Tensors, parts: list[Index]) -> Index:
    """One index of the parts that all processes wrote."""
    found = {
        name: {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "chunks": [part["tensors"][name] for part in parts if name in part["tensors"]],
        }
        for name, tensor in tensors.items()
    }
    files = {name: about for part in parts for name, about in part["files"].items()}
    return {"files": files, "tensors": found}


def all_places(index: Index) -> list[Place]:
    """The chunks of all tensors, in the order in which they lie in the files."""
    places = [
        {**chunk, "tensor": name, "dtype": stored.get("dtype")}
        for name, stored in index["tensors"].items()
        for chunk in stored["chunks"]
    ]
    return sorted(places, key=itemgetter("file", "start"))


@torch.no_grad()
def fill(tensors: Tensors, index: Index, read: Reader) -> None:
    """Copy what is stored of `tensors` into them; of those that are sharded, this part."""
    here = {name: _Chunk.of(name, tensor) for name, tensor in tensors.items()}
    copies = []
    for place in all_places(index):
        chunk = here.get(place["tensor"])
        if chunk is not None and (both := _overlap(chunk, place)) is not None:
            copies.append((place, chunk.data[both[0]], both[1]))
    stored = read([place for place, _, _ in copies])
    for (_, target, part), data in zip(copies, stored, strict=True):
        target.copy_(data[part])


def _overlap(here: _Chunk, place: Place) -> tuple[Slices, Slices] | None:
    """Where a stored chunk lies in what is held here, and which part of the chunk that is."""
    mine, its = [], []
    sizes = zip(here.offset, here.data.shape, place["offset"], place["shape"], strict=True)
    for begin, count, first, number in sizes:
        low, high = max(begin, first), min(begin + count, first + number)
        if low >= high:
            return None
        mine.append(slice(low - begin, high - begin))
        its.append(slice(low - first, high - first))
    return tuple(mine), tuple(its)


def read_parts(folder: Path, files: dict[str, Any], places: list[Place]) -> Iterator[Tensor]:
    """What lies in places, which are in the order of their files; all checksums are right."""
    for name, found in groupby(places, key=itemgetter("file")):
        path, about = folder / name, files[name]
        if not path.exists():
            raise damaged(folder, f"it has no {name}")
        check_limit("text", about["begin"], path, "is said to have a large header")
        with regular_file(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != about["bytes"]:
                raise damaged(path, f"it has {size:,} bytes instead of {about['bytes']:,}")
            if crc32([file.read(about["begin"])]) != about["header"]:
                raise damaged(path, "the checksum of its header does not fit")
            for place in found:
                dtype = DTYPES[place["dtype"]]
                size = math.prod(place["shape"]) * dtype.itemsize
                data = torch.empty(size, dtype=torch.uint8)
                file.seek(place["start"])
                file.readinto(data.numpy().data)
                if crc32([data.numpy().data]) != place["crc32"]:
                    why = f"the checksum of the bytes from {place['start']:,} on does not fit"
                    raise damaged(path, why)
                yield data.view(dtype).view(place["shape"])


def checked_index(path: Path, facts: dict[str, Any]) -> Index:
    """The index in a file of facts, if all of it can be what a writer wrote."""
    with as_damage(path, "its index is not one"), reading(path):
        index = {"files": facts["files"], "tensors": facts["tensors"]}
        for name, about in index["files"].items():
            _check(bool(_FILE.fullmatch(name)), f"no part is named {name[:80]!r}")
            _check(is_size(about["begin"], about["bytes"]) and about["begin"] <= about["bytes"])
            _check(bool(_CRC.fullmatch(about["header"])))
        for name, stored in index["tensors"].items():
            _check_tensor(name, stored, index["files"])
    return index


def _check(right: bool, why: str = "a number in it cannot be") -> None:
    if not right:
        raise ValueError(why)


def is_size(*numbers: Any) -> bool:
    """Whether each is a whole number that a size, or a place in a file, can be."""
    return all(type(number) is int and 0 <= number < 2**63 for number in numbers)


def _check_tensor(name: str, stored: dict[str, Any], files: dict[str, Any]) -> None:
    dtype, shape, filled = DTYPES[stored["dtype"]], stored["shape"], 0
    _check(is_size(*shape) and len(shape) <= 64)
    for chunk in stored["chunks"]:
        offset, size = chunk["offset"], chunk["shape"]
        _check(is_size(*offset, *size, chunk["start"]) and bool(_CRC.fullmatch(chunk["crc32"])))
        _check(len(offset) == len(size) == len(shape))
        inside = all(b + n <= whole for b, n, whole in zip(offset, size, shape, strict=True))
        _check(inside, f"a part of {name[:200]!r} lies outside of it")
        about, end = files[chunk["file"]], chunk["start"] + math.prod(size) * dtype.itemsize
        _check(about["begin"] <= chunk["start"] and end <= about["bytes"])
        filled += math.prod(size)
    _check(filled == math.prod(shape), f"{name[:200]!r} is not all there")

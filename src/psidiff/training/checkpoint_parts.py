"""The tensors of a checkpoint as data: a safetensors file for each process, and an index.

torch.distributed.checkpoint plans who writes and who reads what; here is how it is stored. The
index says of every chunk in which file and where it lies, and its checksum; of every file its
size and the checksum of its header. So each bit of a file is held against a checksum, and a
process checks what it reads, no more. Importing this is slow, as that module is.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import RawIOBase
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ..checksums import bytes_of, crc32, damaged
from ..files import DTYPE_NAMES, DTYPES, safetensors_header, writing
from ..limits import check_limit, regular_file
from .advice import DAMAGED_CHECKPOINT

_FILE = re.compile(r"part-[0-9]{5}\.safetensors")
_CRC = re.compile(r"crc32:[0-9a-f]{8}")

Place = dict[str, Any]  # of a chunk: {file, start, shape, ...}
Index = dict[str, Any]  # {"files": {name: {bytes, header}}, "tensors": {name: {dtype, ...}}}


class PartWriter(StorageWriter):
    """Writes one file in `folder` for each process; after it, the first one has the `index`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: Index = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            replace(plan, storage_data=f"part-{rank:05d}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """A process's share: one result for each chunk, and one for the file."""
        items = [item for item in plan.items if _chunk(item).sizes.numel()]
        items.sort(key=lambda item: (-_dtype(item).itemsize, _name(item)))  # so all is aligned
        results = self._write(plan.storage_data, items, planner) if items else []
        return _done(results)

    def _write(
        self, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        header, starts, end = _header(items)
        about = {"bytes": end, "begin": len(header), "header": crc32([header])}
        results = [WriteResult(MetadataIndex(name), end, about)]
        with writing(self.folder / name) as file:
            file.write(header)
            for item, start in zip(items, starts, strict=True):
                held = planner.resolve_data(item)
                assert isinstance(held, Tensor)
                data = bytes_of(held).data
                file.write(data)
                place = {"file": name, "start": start, "crc32": crc32([data])}
                results.append(WriteResult(item.index, len(data), place))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {each.index: each.storage_data for part in results for each in part}
        files = {index.fqn: about for index, about in written.items() if "header" in about}
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [
                {"offset": list(c.offsets), "shape": list(c.sizes)}
                | written[MetadataIndex(name, c.offsets)]
                for c in stored.chunks
                if c.sizes.numel()
            ]
            dtype = DTYPE_NAMES[stored.properties.dtype]
            tensors[name] = {"dtype": dtype, "shape": list(stored.size), "chunks": chunks}
        self.index = {"files": files, "tensors": tensors}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    if item.tensor_data is None:
        raise ValueError(f"{item.index.fqn} is no tensor, and a checkpoint holds no others")
    return item.tensor_data.chunk


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _name(item: WriteItem) -> str:
    """The tensor's name in the file; with its place, if it is not the whole tensor."""
    assert item.tensor_data is not None
    if _chunk(item).sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn} at {','.join(map(str, _chunk(item).offsets))}"


def _header(items: list[WriteItem]) -> tuple[bytes, list[int], int]:
    """The start of a file, where each tensor begins in it, and where it ends."""
    described = [(_name(item), _dtype(item), tuple(_chunk(item).sizes)) for item in items]
    return safetensors_header(described, {"format": "pt"})


class PartReader(StorageReader):
    """Reads what a plan asks for.

    metadata: what is stored, with the place of every chunk.
    read: gives places, in the order of their files, with what lies there.
    """

    def __init__(
        self, metadata: Metadata, read: Callable[[list[Place]], Iterator[tuple[Place, Tensor]]]
    ) -> None:
        self.metadata, self.read = metadata, read

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = self.metadata.storage_data
        wanted: dict[tuple[str, int], list[ReadItem]] = {}
        for item in plan.items:
            place = places[item.storage_index]
            wanted.setdefault((place["file"], place["start"]), []).append(item)
        ordered = [places[wanted[key][0].storage_index] for key in sorted(wanted)]
        for place, tensor in self.read(ordered):
            for item in wanted[place["file"], place["start"]]:
                _copy_into(planner, item, tensor)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def part_metadata(index: Index) -> Metadata:
    """What an index that `checked_index` has seen says, with the place of every chunk."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    for name, stored in index["tensors"].items():
        chunks = []
        for chunk in stored["chunks"]:
            offset, shape = torch.Size(chunk["offset"]), torch.Size(chunk["shape"])
            chunks.append(ChunkStorageMetadata(offset, shape))
            places[MetadataIndex(name, offset)] = {**chunk, "dtype": stored["dtype"]}
        properties = TensorProperties(DTYPES[stored["dtype"]])
        tensors[name] = TensorStorageMetadata(properties, torch.Size(stored["shape"]), chunks)
    return Metadata(tensors, storage_data=places)


def _copy_into(planner: LoadPlanner, item: ReadItem, tensor: Tensor) -> None:
    """The part of a stored chunk that a reader asked for goes where it belongs."""
    for dimension, (start, length) in enumerate(
        zip(item.storage_offsets, item.lengths, strict=True)
    ):
        tensor = tensor.narrow(dimension, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def read_parts(
    folder: Path, files: dict[str, Any], places: list[Place]
) -> Iterator[tuple[Place, Tensor]]:
    """Chunks in the order of their files, with what they hold; all checksums are right."""
    for name, found in groupby(places, key=itemgetter("file")):
        path, about = folder / name, files[name]
        if not path.exists():
            raise damaged(folder, f"it has no {name}", DAMAGED_CHECKPOINT)
        regular_file(path)
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != about["bytes"]:
                why = f"it has {size:,} bytes instead of {about['bytes']:,}"
                raise damaged(path, why, DAMAGED_CHECKPOINT)
            if crc32([file.read(about["begin"])]) != about["header"]:
                raise damaged(
                    path, "the checksum of its header does not fit", DAMAGED_CHECKPOINT
                )
            for place in found:
                dtype = DTYPES[place["dtype"]]
                size = math.prod(place["shape"]) * dtype.itemsize
                data = torch.empty(size, dtype=torch.uint8)
                file.seek(place["start"])
                _fill(file, data.numpy().data)
                if crc32([data.numpy().data]) != place["crc32"]:
                    why = f"the checksum of the bytes from {place['start']:,} on does not fit"
                    raise damaged(path, why, DAMAGED_CHECKPOINT)
                yield place, data.view(dtype).view(place["shape"])


def _fill(file: RawIOBase, view: memoryview) -> None:
    """Read until it is full or the file ends."""
    while view and (count := file.readinto(view)):
        view = view[count:]


def _done(value: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(value)
    return done


def checked_index(path: Path, facts: dict[str, Any]) -> Index:
    """The index in a file of facts, if all of it can be what a writer wrote."""
    try:
        index = {"files": facts["files"], "tensors": facts["tensors"]}
        for name, about in index["files"].items():
            _check(bool(_FILE.fullmatch(name)), f"no part is named {name[:80]!r}")
            check_limit("text", about["begin"], path, "says that a part has a large header")
            _check(_whole(about["begin"], about["bytes"]) and about["begin"] <= about["bytes"])
            _check(bool(_CRC.fullmatch(about["header"])))
        for name, stored in index["tensors"].items():
            _check_tensor(name, stored, index["files"])
    except (KeyError, TypeError, AttributeError) as error:
        why = f"its index is not one ({type(error).__name__})"
        raise damaged(path, why, DAMAGED_CHECKPOINT) from None
    except _Wrong as error:
        raise damaged(path, f"its index is not one{error}", DAMAGED_CHECKPOINT) from None
    return index


class _Wrong(Exception):
    """Why an index is none, as the end of a sentence."""


def _check(right: bool, why: str = "") -> None:
    if not right:
        raise _Wrong(f": {why}" if why else "")


def _whole(*numbers: Any) -> bool:
    return all(type(number) is int and 0 <= number < 2**63 for number in numbers)


def _check_tensor(name: str, stored: dict[str, Any], files: dict[str, Any]) -> None:
    dtype, shape, filled = DTYPES[stored["dtype"]], stored["shape"], 0
    _check(_whole(*shape) and len(shape) <= 64)
    for chunk in stored["chunks"]:
        offset, size = chunk["offset"], chunk["shape"]
        _check(_whole(*offset, *size, chunk["start"]) and bool(_CRC.fullmatch(chunk["crc32"])))
        _check(len(offset) == len(size) == len(shape))
        inside = all(b + n <= whole for b, n, whole in zip(offset, size, shape, strict=True))
        _check(inside, f"a part of {name[:200]!r} lies outside of it")
        about, end = files[chunk["file"]], chunk["start"] + math.prod(size) * dtype.itemsize
        _check(about["begin"] <= chunk["start"] and end <= about["bytes"])
        filled += math.prod(size)
    _check(filled == math.prod(shape), f"{name[:200]!r} is not all there")

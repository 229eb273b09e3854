"""Checkpoints of earlier versions: the files of torch.distributed.checkpoint, read as data.

`.metadata` is a pickle, and `.distcp` files hold a file of torch.save for each chunk. What
they describe is read without running any of it. They have no checksums but those of the zip
archives inside; the next checkpoint of the run is written as `parts` writes it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
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

from ..checksums import Damaged, damaged, in_short, reading
from ..files import DTYPES
from ..limits import check_limit, read_bytes, regular_file
from ..pickles import Name, Refused, StandIn, read_pickle
from ..torch_files import read_torch_file
from .advice import DAMAGED_CHECKPOINT
from .checkpoint_parts import Place

_ALLOWED = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.serialization._get_layout",
    "torch.Size",
    *(str(dtype) for dtype in DTYPES.values()),
    "pathlib",
}
_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_FLAT = {str(dtype): dtype for dtype in DTYPES.values()}


def older_metadata(folder: Path) -> Metadata:
    """What `.metadata` says, with the place of every chunk."""
    path = folder / ".metadata"
    with _whole(path):
        return _metadata(read_pickle(read_bytes(path), path, _ALLOWED), path)


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Whatever damaged bytes end in is said of the file, with what to do."""
    try:
        with reading(path):
            yield
    except Refused as error:
        raise Refused(f"{error}; {DAMAGED_CHECKPOINT}") from error
    except ValueError as error:
        why = getattr(error, "why", "") or in_short(error, 400).removeprefix(str(path)).lstrip(
            ": "
        )
        raise damaged(path, why, DAMAGED_CHECKPOINT) from error


def _metadata(said: Any, path: Path) -> Metadata:
    try:
        state = _state(said, "Metadata")
        held: dict[str, Any] = state["state_dict_metadata"]
        tensors: dict[str, Any] = {name: _tensor(held[name]) for name in held}
        places = {}
        for index, info in state["storage_data"].items():
            where, what = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
            offset = _sizes(where["offset"])
            found = MetadataIndex(where["fqn"], offset)
            places[found] = _place(tensors[where["fqn"]], offset, what)
    except (LookupError, TypeError, AttributeError, ValueError, StopIteration) as error:
        if isinstance(error, (Damaged, Refused)):
            raise
        why = f"it describes no checkpoint ({type(error).__name__})"
        raise damaged(path, why) from None
    return Metadata(tensors, storage_data=places)


def read_older(folder: Path, places: list[Place]) -> Iterator[tuple[Place, Tensor]]:
    """Chunks in the order of their files, with what they hold."""
    for place in places:
        path = folder / place["file"]
        if not path.exists():
            raise damaged(folder, f"it has no {place['file']}", DAMAGED_CHECKPOINT)
        size = regular_file(path).stat().st_size
        if place["start"] + place["bytes"] > size:
            raise damaged(
                path, f"it ends at byte {size:,}, inside of a part", DAMAGED_CHECKPOINT
            )
        check_limit("unpacked", place["bytes"], path, f"has {place['bytes']:,} bytes in a part")
        with _whole(path):
            tensor = _part(path, place)
        yield place, tensor


def _part(path: Path, place: Place) -> Tensor:
    with path.open("rb") as file:
        file.seek(place["start"])
        data = file.read(place["bytes"])
    tensor = read_torch_file(io.BytesIO(data), path)
    if not isinstance(tensor, Tensor) or list(tensor.shape) != place["shape"]:
        raise damaged(path, f"the part from byte {place['start']:,} on is another tensor")
    return tensor


def _state(value: Any, kind: str) -> dict[str, Any]:
    """The fields of a described dataclass of torch.distributed.checkpoint."""
    if not isinstance(value, StandIn) or value.name.rpartition(".")[2] != kind:
        raise TypeError
    return dict(value.state)


def _sizes(value: Any) -> torch.Size:
    if not isinstance(value, StandIn) or value.name != "torch.Size":
        raise TypeError
    (sizes,) = value.args
    if not all(type(n) is int and 0 <= n < 2**63 for n in sizes) or len(sizes) > 64:
        raise TypeError
    return torch.Size(sizes)


def _tensor(value: Any) -> TensorStorageMetadata:
    state = _state(value, "TensorStorageMetadata")
    properties = value.state["properties"].state
    dtype = properties[0]
    if not isinstance(dtype, Name):
        raise TypeError
    chunks = [
        ChunkStorageMetadata(_sizes(chunk["offsets"]), _sizes(chunk["sizes"]))
        for chunk in (_state(each, "ChunkStorageMetadata") for each in state["chunks"])
    ]
    return TensorStorageMetadata(
        TensorProperties(_FLAT[dtype.path]), _sizes(state["size"]), chunks
    )


def _place(tensor: TensorStorageMetadata, offset: torch.Size, info: dict[str, Any]) -> Place:
    name, start, length = info["relative_path"], info["offset"], info["length"]
    if not _FILE.fullmatch(name) or type(start) is not int or type(length) is not int:
        raise TypeError
    if start < 0 or length < 0 or info.get("transform_descriptors"):
        raise TypeError
    chunk = next(chunk for chunk in tensor.chunks if chunk.offsets == offset)
    return {"file": name, "start": start, "bytes": length, "shape": list(chunk.sizes)}

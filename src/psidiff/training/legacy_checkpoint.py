"""Checkpoints of earlier versions: the files of torch.distributed.checkpoint, read as data.

`.metadata` is a pickle, and `.distcp` files hold a file of torch.save for each chunk. What
they describe is read without running any of it. They have no checksums but those of the zip
archives inside; the next checkpoint of the run is written as `checkpoint_parts` writes it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checksums import as_damage, damaged, reading
from ..files import DTYPES
from ..limits import check_limit, read_bytes, regular_file
from ..pickles import StandIn, read_pickle
from ..torch_files import read_torch_file
from .checkpoint_parts import Index, Place, is_size

_ALLOWED = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.serialization._get_layout",
    "torch.Size",
    *(str(dtype) for dtype in DTYPES.values()),
    "pathlib",
}
_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")


def older_index(folder: Path) -> Index:
    """What `.metadata` says: the shape of each tensor, and the place of every chunk."""
    path, places = folder / ".metadata", {}
    with as_damage(path, "it describes no checkpoint"), reading(path):
        state = _state(read_pickle(read_bytes(path), path, _ALLOWED), "Metadata")
        for index, info in state["storage_data"].items():
            where = _state(index, "MetadataIndex")
            places[where["fqn"], _sizes(where["offset"])] = _place(_state(info, "_StorageInfo"))
        held: dict[str, Any] = state["state_dict_metadata"]
        return {"tensors": {name: _tensor(name, held[name], places) for name in held}}


def read_older(folder: Path, places: list[Place]) -> Iterator[Tensor]:
    """What lies in places, which are in the order of their files."""
    for place in places:
        path = folder / place["file"]
        if not path.exists():
            raise damaged(folder, f"it has no {place['file']}")
        size = regular_file(path).stat().st_size
        if place["start"] + place["bytes"] > size:
            raise damaged(path, f"it ends at byte {size:,}, inside of a part")
        check_limit("unpacked", place["bytes"], path, f"has {place['bytes']:,} bytes in a part")
        with as_damage(path), reading(path), path.open("rb") as file:
            file.seek(place["start"])
            tensor = read_torch_file(io.BytesIO(file.read(place["bytes"])), path)
        if not isinstance(tensor, Tensor) or list(tensor.shape) != place["shape"]:
            raise damaged(path, f"the part from byte {place['start']:,} on is another tensor")
        yield tensor


def _state(value: Any, kind: str) -> dict[str, Any]:
    """The fields of a described dataclass of torch.distributed.checkpoint."""
    if not isinstance(value, StandIn) or value.name.rpartition(".")[2] != kind:
        raise TypeError(f"no {kind}")
    return dict(value.state)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, StandIn) or value.name != "torch.Size":
        raise TypeError("no size")
    (sizes,) = value.args
    if not is_size(*sizes) or len(sizes) > 64:
        raise TypeError("no size")
    return tuple(sizes)


def _tensor(name: str, value: Any, places: dict[Any, Place]) -> dict[str, Any]:
    state, chunks = _state(value, "TensorStorageMetadata"), []
    for each in state["chunks"]:
        chunk = _state(each, "ChunkStorageMetadata")
        offset, shape = _sizes(chunk["offsets"]), list(_sizes(chunk["sizes"]))
        chunks.append({"offset": offset, "shape": shape, **places[name, offset]})
    return {"shape": _sizes(state["size"]), "chunks": chunks}


def _place(info: dict[str, Any]) -> Place:
    name, start, length = info["relative_path"], info["offset"], info["length"]
    counts = is_size(start, length)
    if not _FILE.fullmatch(name) or not counts or info.get("transform_descriptors"):
        raise TypeError("no place")
    return {"file": name, "start": start, "bytes": length}

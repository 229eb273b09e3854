"""CIFAR-10 and MNIST in the formats of their authors."""

from __future__ import annotations

import gzip
import io
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ..checksums import reading
from ..limits import BoundedStream, check_limit, read_bytes, read_text, regular_file
from ..pickles import StandIn, read_pickle

Raw = tuple[np.ndarray, np.ndarray, list[str]]
"""Pixels (N, 3, 32, 32) or (N, H, W), labels (N,), names of classes where known."""


class NoSuchSplit(ValueError):
    """Images without such a split: none of its files is there."""


_ARRAYS = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}


def read_cifar_binary(path: Path, split: str) -> Raw:
    """CIFAR-10's records of 3,073 bytes: the label, then red, green and blue."""
    records = []
    for name in _cifar_batches(path, split, ".bin"):
        raw = np.frombuffer(read_bytes(name), np.uint8)
        if len(raw) == 0 or len(raw) % 3073:
            raise ValueError(f"{name} must hold records of 3073 bytes, got {len(raw)} bytes")
        records.append(raw.reshape(-1, 3073))
    joined = np.concatenate(records)
    meta = path / "batches.meta.txt"
    classes = read_text(meta).split() if meta.is_file() else []
    return joined[:, 1:].reshape(-1, 3, 32, 32), joined[:, 0], classes


def read_cifar_pickle(path: Path, split: str) -> Raw:
    """CIFAR-10's pickles, as data."""
    batches = [_batch(name) for name in _cifar_batches(path, split, "")]
    pixels, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    meta = path / "batches.meta"
    names = _unpickle(meta).get(b"label_names", []) if meta.is_file() else []
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise ValueError(f"{meta} must hold a list of names")
    return pixels, labels, [name.decode("latin1") for name in names]


def _batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, 3, 32, 32) and labels (n,) of one file."""
    content = _unpickle(path)
    labels, pixels = content.get(b"labels"), _array(content.get(b"data"))
    if pixels is None or pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise ValueError(f"{path} does not hold a batch of CIFAR-10: (n, 3072) bytes as data")
    if not isinstance(labels, list) or not all(type(n) is int and 0 <= n < 256 for n in labels):
        raise ValueError(f"{path} does not hold a batch of CIFAR-10: a list of labels")
    return pixels.reshape(-1, 3, 32, 32), np.array(labels, np.int64)


def _unpickle(path: Path) -> dict[Any, Any]:
    content = read_pickle(read_bytes(path), path, {"numpy.ndarray", "numpy.dtype", *_ARRAYS})
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary, got {type(content).__name__}")
    return content


def _array(value: Any) -> np.ndarray | None:
    """The array of uint8 that a pickle describes; None: it describes none."""
    if not isinstance(value, StandIn) or value.name not in _ARRAYS:
        return None
    if not isinstance(value.state, tuple) or len(value.state) != 5:
        return None
    _, shape, dtype, by_columns, raw = value.state
    if not isinstance(dtype, StandIn) or dtype.args[:1] not in ((b"u1",), ("u1",)):
        return None
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        return None
    if not isinstance(raw, bytes) or math.prod(shape) != len(raw) or len(shape) > 4:
        return None
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if by_columns is True else "C")


def read_idx(path: Path, split: str) -> Raw:
    """MNIST's idx files, compressed or not: a magic number, the sizes, the bytes."""
    part = "train" if split == "train" else "t10k"
    if not any(path.glob(f"{part}-*-ubyte*")):
        raise NoSuchSplit(f"{path} lacks {part}-images-idx3-ubyte, with or without .gz")
    images = _idx(path, f"{part}-images?idx3-ubyte", 2051)
    return images, _idx(path, f"{part}-labels?idx1-ubyte", 2049), []


def _cifar_batches(path: Path, split: str, suffix: str) -> list[Path]:
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    files = [path / (name + suffix) for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        kind = NoSuchSplit if len(absent) == len(files) else ValueError
        raise kind(f"{path} lacks {absent[0]}, which CIFAR-10's {split} split has")
    return files


def _idx(path: Path, pattern: str, magic: int) -> np.ndarray:
    found = sorted(path.glob(pattern)) + sorted(path.glob(pattern + ".gz"))
    if not found:
        raise ValueError(f"{path} lacks {pattern.replace('?', '-')}, with or without .gz")
    name, rank = regular_file(found[0]), magic % 256
    with name.open("rb") as file, reading(name):
        stream: Any = gzip.GzipFile(fileobj=file) if name.suffix == ".gz" else file
        whole = io.BufferedReader(BoundedStream(stream, name.stat().st_size, name), 2**16)
        head = whole.read(4 * (1 + rank))
        if len(head) < 4 * (1 + rank) or struct.unpack_from(">I", head)[0] != magic:
            raise ValueError(f"{name} must begin with the magic number {magic}")
        shape = struct.unpack_from(f">{rank}I", head, 4)
        count = math.prod(shape)
        check_limit("unpacked", count, name, f"says that it holds {count:,} bytes")
        raw = bytearray()  # it grows: a header's promise takes no memory
        while len(raw) <= count and (part := whole.read(2**20)):
            raw += part
    if len(raw) != count:
        more = "more" if len(raw) > count else len(raw)
        raise ValueError(f"{name} must hold {count} bytes, got {more}")
    return np.frombuffer(raw, np.uint8).reshape(shape)

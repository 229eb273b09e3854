"""CIFAR-10 and MNIST in the formats of their authors."""

from __future__ import annotations

import gzip
import math
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

Raw = tuple[np.ndarray, np.ndarray, list[str]]
"""Pixels (N, 3, 32, 32) or (N, H, W), labels (N,), names of classes where known."""


def read_cifar_binary(path: Path, split: str) -> Raw:
    """CIFAR-10's records of 3,073 bytes: the label, then red, green and blue."""
    records = []
    for name in _cifar_batches(path, split, ".bin"):
        raw = np.fromfile(name, np.uint8)
        if len(raw) == 0 or len(raw) % 3073:
            raise ValueError(f"{name} must hold records of 3073 bytes, got {len(raw)} bytes")
        records.append(raw.reshape(-1, 3073))
    joined = np.concatenate(records)
    meta = path / "batches.meta.txt"
    classes = meta.read_text().split() if meta.is_file() else []
    return joined[:, 1:].reshape(-1, 3, 32, 32), joined[:, 0], classes


def read_cifar_pickle(path: Path, split: str) -> Raw:
    """CIFAR-10's pickles. Nothing that they name is imported or run."""
    batches = [_unpickle(name) for name in _cifar_batches(path, split, "")]
    meta = path / "batches.meta"
    names = _unpickle(meta).get(b"label_names", []) if meta.is_file() else []
    try:
        pixels = np.concatenate([batch[b"data"].array() for batch in batches])
        labels = np.concatenate([np.array(batch[b"labels"], np.int64) for batch in batches])
        classes = [name.decode() for name in names]
        pixels = pixels.reshape(-1, 3, 32, 32)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold the batches of CIFAR-10: {error}") from None
    return pixels, labels, classes


def read_idx(path: Path, split: str) -> Raw:
    """MNIST's idx files, compressed or not: a magic number, the sizes, the bytes."""
    part = "train" if split == "train" else "t10k"
    images = _idx(path, f"{part}-images?idx3-ubyte", 2051)
    return images, _idx(path, f"{part}-labels?idx1-ubyte", 2049), []


def _cifar_batches(path: Path, split: str, suffix: str) -> list[Path]:
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    files = [path / (name + suffix) for name in names]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{path} lacks {file.name}, which CIFAR-10's {split} split has")
    return files


def _idx(path: Path, pattern: str, magic: int) -> np.ndarray:
    found = sorted(path.glob(pattern)) + sorted(path.glob(pattern + ".gz"))
    if not found:
        raise ValueError(f"{path} lacks {pattern.replace('?', '-')}, with or without .gz")
    try:
        raw = found[0].read_bytes()
        raw = gzip.decompress(raw) if found[0].suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{found[0]} cannot be read: {error}") from None
    rank = magic % 256
    head = 4 * (1 + rank)
    if len(raw) < head or struct.unpack_from(">I", raw)[0] != magic:
        raise ValueError(f"{found[0]} must begin with the magic number {magic}")
    shape = struct.unpack_from(f">{rank}I", raw, 4)
    if len(raw) - head != math.prod(shape):
        raise ValueError(
            f"{found[0]} must hold {math.prod(shape)} bytes, got {len(raw) - head}"
        )
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


class _Array:
    """numpy.ndarray as CIFAR-10's pickles spell it: it keeps the bytes, and does nothing."""

    shape: tuple[int, ...] = ()
    raw = b""
    order: Literal["C", "F"] = "C"

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        _, self.shape, dtype, columns_first, self.raw = state
        if not isinstance(dtype, _Dtype) or dtype.name not in (b"u1", "u1"):
            raise pickle.UnpicklingError("its arrays must be of uint8")
        self.order = "F" if columns_first else "C"

    def array(self) -> np.ndarray:
        return np.frombuffer(self.raw, np.uint8).reshape(self.shape, order=self.order)


class _Dtype:
    """numpy.dtype, as a name."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None: ...


def _encode(text: Any, encoding: Any) -> bytes:
    """How Python 2's pickles are given bytes by Python 3; no codec is looked up by name."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it asks for the codec {encoding!r}")
    return text.encode("latin1") if isinstance(text, str) else bytes(text)


class _Unpickler(pickle.Unpickler):
    """pickle's own, with our answer to the few names that are known."""

    known: ClassVar[dict[str, Any]] = {
        "numpy.ndarray": _Array,
        "numpy.dtype": _Dtype,
        "numpy.core.multiarray._reconstruct": _Array,
        "numpy._core.multiarray._reconstruct": _Array,
        "_codecs.encode": _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
        return self.known[f"{module}.{name}"]


def _unpickle(path: Path) -> dict[Any, Any]:
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path} was not loaded: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary, got {type(content).__name__}")
    return content

"""The files in a folder of samples: what it is for, and its shards.

A shard is a .npz of tokens, with the pixels of images; text also comes as lines of JSON. All
of them say their version and carry a checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..checksums import damaged, with_checksum
from ..data.codec import Codec
from ..files import (
    FORMAT_VERSION,
    load_arrays,
    read_json_lines,
    read_object,
    save_arrays,
    write_whole,
)

MANIFEST = "sampling.json"
_LARGEST = 2**31 - 1  # of a token id


def shard_path(folder: Path, number: int, suffix: str = "npz") -> Path:
    return folder / f"shard-{number:05d}.{suffix}"


def as_lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    """Lines of JSON with version and checksum. Half a surrogate pair, which UTF-8 does not
    have, is written as its escape."""
    held = (with_checksum({"format_version": FORMAT_VERSION, **each}) for each in records)
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in held)
    return text.encode("utf-8", "backslashreplace")


# The manifest


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= _LARGEST


def _is_words(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "asked": _is_words,
    "shard_size": _is_count,
    "batch_size": _is_count,
    "parameters": _is_text,
    "codec": lambda value: value is None or _is_text(value),
}


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the samples in a folder are, each value of the kind that it should be."""
    path = folder / MANIFEST
    held = read_object(path)
    for name, fits in _FIELDS.items():
        if not fits(held.get(name)):
            raise damaged(path, f"its {name!r} cannot be {str(held.get(name))[:40]!r}")
    return held


def codec_fingerprint(codec: Codec | None) -> str | None:
    """Equal where the same ids mean the same; None where nobody knows what they mean."""
    if codec is None:
        return None
    described = json.dumps(codec.describe(), sort_keys=True)
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


# Shards


@dataclass(frozen=True)
class Shard:
    """Samples of a folder, and what they cost."""

    tokens: np.ndarray  # (n, L)
    nfe: float
    head_rows: int
    labels: np.ndarray | None = None  # (n,)
    images: np.ndarray | None = None  # (n, H, W) or (n, H, W, 3)
    number: int | None = None  # which of the folder's it is; earlier versions did not say

    def write(self, path: Path) -> None:
        arrays: dict[str, Any] = {
            "tokens": self.tokens,
            "nfe": np.float64(self.nfe),
            "head_rows": np.int64(self.head_rows),
        }
        if self.labels is not None:
            arrays["labels"] = self.labels
        if self.images is not None:
            arrays["images"] = self.images
        if self.number is not None:
            arrays["number"] = np.int64(self.number)
        save_arrays(path, arrays)


def read_shard(path: Path) -> Shard:
    """A shard whose arrays fit together."""
    held = load_arrays(path)
    tokens = held.get("tokens")
    if tokens is None or tokens.ndim != 2 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise damaged(path, "it holds no rows of tokens")
    if tokens.min() < 0 or tokens.max() > _LARGEST:
        raise damaged(path, "it holds numbers that are no tokens")
    cost = [held.get(name, np.zeros(())) for name in ("nfe", "head_rows")]
    if any(each.shape != () or each.dtype.kind not in "iuf" for each in cost):
        raise damaged(path, "what its samples cost is not a number each")
    nfe, rows = (float(each) for each in cost)
    if not (np.isfinite([nfe, rows]).all() and nfe >= 0 and rows >= 0):
        raise damaged(path, "what its samples cost is not a number of passes")
    labels, images = held.get("labels"), held.get("images")
    if labels is not None and (
        labels.shape != tokens.shape[:1] or labels.dtype.kind not in "iu"
    ):
        raise damaged(path, "its labels are not one for each sample")
    if images is not None and (
        images.ndim not in (3, 4) or len(images) != len(tokens) or images.dtype != np.uint8
    ):
        raise damaged(path, "its images are not one for each sample")
    number, named = held.get("number"), _number(path)
    if None not in (number, named) and str(number) != str(named):
        raise damaged(path, f"it holds shard {str(number)[:40]}")
    return Shard(tokens, nfe, int(rows), labels, images, named)


def _number(path: Path) -> int | None:
    """The number that a file has by its name."""
    digits = path.stem.removeprefix("shard-")
    return int(digits) if digits.isdecimal() else None


def write_lines(path: Path, first: int, records: Iterable[Mapping[str, Any]]) -> None:
    """The text of a shard whose first sample has this number."""
    numbered = ({"index": first + i, **each} for i, each in enumerate(records))
    write_whole(path, as_lines(numbered))


def check_lines(path: Path, first: int, count: int) -> None:
    """Raise where the text of a shard is not there as it was written."""
    found = [record.get("index") for record in read_json_lines(path)]
    if found != list(range(first, first + count)):
        raise damaged(path, f"it has not the samples {first} to {first + count - 1}")

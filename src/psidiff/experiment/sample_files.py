"""Files of samples: folders of shards with what they are for, and lines of JSON.

A shard is a .npz of tokens, with the pixels of images; text also comes as lines of JSON. All
files in a folder say their version and carry a checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checksums import damaged, with_checksum
from ..files import (
    FORMAT_VERSION,
    load_arrays,
    read_json_lines,
    read_object,
    save_arrays,
    write_atomic,
)
from ..model import Model
from ..registry import fits

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


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_count(value: Any) -> bool:
    return _is_id(value) and value > 0


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "asked": lambda value: fits(value, dict) and all(fits(v, str) for v in value.values()),
    "shard_size": _is_count,
    "batch_size": _is_count,
    "parameters": lambda value: fits(value, str),
    "codec": lambda value: fits(value, str | None),
}


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the samples in a folder are, each value of the kind that it should be."""
    path = folder / MANIFEST
    held = read_object(path)
    for name, is_right in _FIELDS.items():
        if not is_right(held.get(name)):
            raise damaged(path, f"its {name!r} cannot be {str(held.get(name))[:40]!r}")
    return held


def codec_fingerprint(codec: Any) -> str | None:
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
        save_arrays(path, {n: np.asarray(v) for n, v in vars(self).items() if v is not None})


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
    write_atomic(path, as_lines(numbered))


def check_lines(path: Path, first: int, count: int) -> None:
    """Raise where the text of a shard is not there as it was written."""
    found = [record.get("index") for record in read_json_lines(path)]
    if found != list(range(first, first + count)):
        raise damaged(path, f"it has not the samples {first} to {first + count - 1}")


# Samples made before, whoever made them


def read_samples(path: Path) -> tuple[Tensor, Tensor | None]:
    """Tokens, and labels if there are any, from shards or from lines of JSON with "tokens"."""
    parts = _of_shards(path) if path.is_dir() else _of_lines(path)
    rows = [torch.from_numpy(np.asarray(tokens, np.int64)) for tokens, _ in parts]
    if len({row.shape[1] for row in rows}) > 1:
        raise ValueError(f"{path} has samples of unequal length")
    known = [
        torch.from_numpy(np.asarray(each, np.int64)) for _, each in parts if each is not None
    ]
    return torch.cat(rows), torch.cat(known) if len(known) == len(rows) else None


def _of_shards(folder: Path) -> list[tuple[Any, Any]]:
    """Tokens (n, L) and labels (n,) or None, of each shard."""
    shards = [read_shard(path) for path in sorted(folder.glob("shard-*.npz"))]
    if not shards:
        raise ValueError(f"{folder} has no shards of samples in it")
    return [(shard.tokens, shard.labels) for shard in shards]


def _of_lines(path: Path) -> list[tuple[Any, Any]]:
    """Tokens (1, L) and labels (1,) or None, of each line."""
    if not path.exists():
        raise ValueError(f"there are no samples at {path}")
    records = read_json_lines(path, whole=True)
    if not records:
        raise ValueError(f"{path} is empty: there are no samples to judge")
    parts = []
    for number, record in enumerate(records, 1):
        row, label = record.get("tokens"), record.get("label")
        if not isinstance(row, list) or not row or not all(map(_is_id, row)):
            raise ValueError(f'{path} has a line that is no JSON with "tokens": line {number}')
        if label is not None and not _is_id(label):
            raise ValueError(f"{path} has a label that is no number in line {number}")
        parts.append(([row], None if label is None else [label]))
    return parts


def check_same_codec(path: Path, tokens: Tensor, model: Model) -> None:
    """Samples whose tokens mean something else are not judged."""
    if (path / MANIFEST).exists():
        held = read_manifest(path)
        known = held.get("codec")  # folders of earlier versions do not say it
        if known is not None and known != codec_fingerprint(model.codec):
            name = held["asked"].get("model", "another model")
            raise ValueError(
                f"{path} has samples of {name}, whose tokens mean something "
                "else than this model's"
            )
    codec = model.codec
    if codec is None:
        return
    if bool(((tokens < 0) | (tokens >= codec.vocab_size)).any()):
        raise ValueError(
            f"{path} has token ids that this model does not have: they end at "
            f"{codec.vocab_size}"
        )
    if codec.length not in (None, tokens.shape[1]):
        raise ValueError(
            f"{path} has samples of {tokens.shape[1]} tokens, this model {codec.length}"
        )

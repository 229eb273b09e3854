"""Samples made before, read from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..files import read_json_lines
from ..model import Model
from .shard_files import MANIFEST, codec_fingerprint, read_manifest, read_shard


def read_samples(path: Path) -> tuple[Tensor, Tensor | None]:
    """Tokens, and labels if there are any, from shards or from lines of JSON with "tokens"."""
    rows, labels = _of_shards(path) if path.is_dir() else _of_lines(path)
    if len({row.shape[1] for row in rows}) > 1:
        raise ValueError(f"{path} has samples of unequal length")
    known = [each for each in labels if each is not None]
    return torch.cat(rows), torch.cat(known) if len(known) == len(rows) else None


def _of_shards(folder: Path) -> tuple[list[Tensor], list[Tensor | None]]:
    shards = [read_shard(path) for path in sorted(folder.glob("shard-*.npz"))]
    if not shards:
        raise ValueError(f"{folder} has no shards of samples in it")
    labels = [None if s.labels is None else _long(s.labels) for s in shards]
    return [_long(shard.tokens) for shard in shards], labels


def _of_lines(path: Path) -> tuple[list[Tensor], list[Tensor | None]]:
    if not path.exists():
        raise ValueError(f"there are no samples at {path}")
    records = read_json_lines(path, whole=True)
    if not records:
        raise ValueError(f"{path} is empty: there are no samples to judge")
    rows: list[Tensor] = []
    labels: list[Tensor | None] = []
    for number, record in enumerate(records, 1):
        row, label = record.get("tokens"), record.get("label")
        if not isinstance(row, list) or not row or not all(map(_is_id, row)):
            raise ValueError(f'{path} has a line that is no JSON with "tokens": line {number}')
        if label is not None and not _is_id(label):
            raise ValueError(f"{path} has a label that is no number in line {number}")
        rows.append(torch.tensor([row]))
        labels.append(None if label is None else torch.tensor([label]))
    return rows, labels


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _long(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


def check_fit(path: Path, tokens: Tensor, model: Model) -> None:
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

"""Samples made before, read from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..files import read_json
from ..model import Model
from .shards import MANIFEST, codec_fingerprint


def read_samples(path: Path) -> tuple[Tensor, Tensor | None]:
    """Tokens, and labels if there are any, from shards or from lines of JSON with "tokens"."""
    if path.is_dir():
        parts: list[Tensor] = []
        labels: list[Any] = []
        for shard in sorted(path.glob("shard-*.npz")):
            with np.load(shard) as held:
                parts.append(torch.from_numpy(held["tokens"]).long())
                labels += held["labels"].tolist() if "labels" in held.files else []
        if not parts:
            raise ValueError(f"{path} has no shards of samples in it")
        return torch.cat(parts), torch.tensor(labels) if labels else None
    if not path.is_file():
        raise ValueError(f"there are no samples at {path}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        held = [json.loads(line) for line in lines if line.strip()]
        rows, labels = [line["tokens"] for line in held], [line.get("label") for line in held]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{path} has a line that is no JSON with "tokens"') from error
    if not rows:
        raise ValueError(f"{path} is empty: there are no samples to judge")
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{path} has samples of unequal length")
    known = None not in labels
    return torch.tensor(rows), torch.tensor(labels) if known else None


def check_fit(path: Path, tokens: Tensor, model: Model) -> None:
    """Samples whose tokens mean something else are not judged."""
    manifest = path / MANIFEST
    if manifest.is_file():
        held = read_json(manifest)
        known = held.get("codec")  # folders of earlier versions do not say it
        if known is not None and known != codec_fingerprint(model.codec):
            raise ValueError(
                f"{path} has samples of {held['asked']['model']}, whose tokens mean something "
                "else than this model's"
            )
    size = getattr(model.codec, "vocab_size", None)
    length = getattr(model.codec, "length", None)
    if size is not None and bool(((tokens < 0) | (tokens >= size)).any()):
        raise ValueError(
            f"{path} has token ids that this model does not have: they end at {size}"
        )
    if length is not None and tokens.shape[1] != length:
        raise ValueError(f"{path} has samples of {tokens.shape[1]} tokens, this model {length}")

"""Statistics of real images, kept in PSIDIFF_CACHE: a network takes minutes to look at them.

The key is what the images and the network are, not what they are called. A file appears whole;
while one process computes it, others wait; the least recently used go where there are too many.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from ..files import FORMAT_VERSION, folder_of, parts_in
from ..locks import Lock, Locked
from .feature_statistics import FeatureStatistics
from .image_metrics import image_statistics
from .inception import FeatureExtractor

_VERSION = 1  # of how images become statistics
_MOST = 4 * 2**30  # bytes of all files
_PATIENCE = 3600.0  # seconds until another process is taken for stuck
_BATCH = 100


def cached_statistics(
    pixels: np.ndarray, features: FeatureExtractor, source: str = ""
) -> FeatureStatistics:
    """The statistics of images, from the cache where they are there.

    Args:
        pixels: the images, (N, C, H, W) of uint8.
        features: what looks at them; without a `fingerprint` nothing is kept.
        source: which images they are, in words.

    Returns:
        Their statistics, which `image_metrics` takes as its reference.

    Example:
        >>> import psidiff.evaluation.inception as inception
        >>> pixels = np.zeros((12, 1, 2, 2), np.uint8)
        >>> cached_statistics(pixels, inception.PIXELS, "black squares").count
        12
    """
    fingerprint = getattr(features, "fingerprint", None)
    if fingerprint is None:
        return _computed(pixels, features, source)
    key = hashlib.sha256(f"{_VERSION} {FORMAT_VERSION} {fingerprint} {pixels.shape} ".encode())
    key.update(np.ascontiguousarray(pixels).data)
    path = folder_of("PSIDIFF_CACHE") / "features" / f"{key.hexdigest()[:32]}.safetensors"
    held = _read(path, features.name)
    if held is None:
        with _alone(path):
            held = _read(path, features.name)  # another process may have been faster
            if held is None:
                held = _computed(pixels, features, source)
                _keep(held, path)
    held.source = source
    return held


def _computed(pixels: np.ndarray, features: FeatureExtractor, source: str) -> FeatureStatistics:
    batches = torch.from_numpy(pixels).split(_BATCH)
    return image_statistics(batches, features, source)


def _read(path: Path, features: str) -> FeatureStatistics | None:
    """What is there, now the most recently used; None: nothing, or a damaged file."""
    with suppress(OSError, ValueError, KeyError):
        held = FeatureStatistics.load(path)
        if held.features == features:
            os.utime(path)
            return held
    return None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nobody else computes the same meanwhile, where the cache can be written."""
    with ExitStack() as held:
        with suppress(OSError, Locked):
            lock = Lock(path.with_suffix(".lock"), "computing statistics of images")
            held.enter_context(lock.when_free(_PATIENCE, 0.2))
        yield


def _keep(held: FeatureStatistics, path: Path) -> None:
    """Write a file, and remove those that were not used for longest where there are too
    many bytes, and what killed processes left."""
    with suppress(OSError):  # a cache that others own, or a full disk
        held.save(path)
        for part in parts_in(path.parent):
            if time.time() - part.stat().st_mtime > _PATIENCE:
                part.unlink(missing_ok=True)
        files = {each: each.stat() for each in path.parent.glob("*.safetensors")}
        total = 0
        for each in sorted(files, key=lambda f: -files[f].st_mtime_ns):
            total += files[each].st_size
            if total > _MOST and each != path:
                each.unlink(missing_ok=True)

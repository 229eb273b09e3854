"""What stays of features that pass by in chunks: their moments, with a sample of rows.

All of it is on the CPU; sums are float64.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..checksums import damaged, reading
from ..files import FORMAT_VERSION, load_tensors, save_tensors
from ..kernels.counter_rng import fold_in
from ..types import as_count

KEEP = 10_000  # rows of a sample
SLICE = 1000  # rows that are in float64 at a time
_EMPTY = torch.iinfo(torch.int64).max  # the key of a place that no row has yet


class FeatureStatistics:
    """Count n, mean m and scatter S = sum (x - m)(x - m)^T of features, and a sample of them.

    `features` is the name of what computed them, `source` says from which images. The sample
    is the 10,000 rows with the smallest keys; a key is a function of (seed, row number). So
    nothing depends on chunks, nor on the order of merges if shards number their rows apart.
    """

    def __init__(self, features: str, source: str = "", seed: int = 0) -> None:
        self.features = features
        self.source = source
        self.count: int = 0
        self.seed: int = as_count("seed", seed, least=0)
        self.mean: Tensor = torch.zeros(0, dtype=torch.float64)
        self.scatter: Tensor = torch.zeros(0, 0, dtype=torch.float64)
        self._rows = torch.zeros(0, 0)  # float32: a sample needs no more
        self._keys = torch.full((KEEP,), _EMPTY)
        self._root: tuple[int, Tensor] | None = None  # of how many images

    @property
    def dimension(self) -> int:
        return len(self.mean)

    @property
    def covariance(self) -> Tensor:
        """C = S / (n - 1)"""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least two images, got {self.count}")
        return self.scatter / (self.count - 1)

    @property
    def root(self) -> Tensor:
        """C^(1/2), found once for the images there are: a reference has many to be held to."""
        if self._root is None or self._root[0] != self.count:
            values, vectors = torch.linalg.eigh(self.covariance)
            self._root = self.count, vectors * values.clamp(min=0).sqrt() @ vectors.T
        return self._root[1]

    @property
    def reservoir(self) -> Tensor:
        """At most 10,000 of the rows, each as likely as any other; in the order of keys."""
        order = self._keys.argsort()
        return self._rows[order[self._keys[order] < _EMPTY]]

    def add(self, features: Tensor, first: int | None = None) -> None:
        """Rows (N, d); `first` is the number of the first one, by default the count so far."""
        if features.ndim != 2:
            raise ValueError(f"features must have shape (N, d), got {tuple(features.shape)}")
        self.expect(features.shape[1])
        bad = int((~features.isfinite()).any(1).sum())
        if bad:
            raise ValueError(
                f"{bad} of {len(features)} images have features ({self.features}) that are "
                "NaN or infinite"
            )
        keys = row_keys(self.seed, self.count if first is None else first, len(features))
        if not len(features):
            return
        for rows, key in zip(features.split(SLICE), keys.split(SLICE), strict=True):
            rows = rows.detach().cpu()
            self._draw(rows.float(), key)
            rows = rows.double()
            mean = rows.mean(0)
            rows = rows - mean
            self.scatter.addmm_(rows.T, rows)
            self._shift(len(rows), mean)

    def merge(self, other: FeatureStatistics) -> None:
        """Take in what other images gave."""
        check_same_features(self, other)
        if other.count:
            held = other._keys < _EMPTY
            self.expect(other.dimension)
            self._draw(other._rows[held], other._keys[held])
            self.scatter += other.scatter
            self._shift(other.count, other.mean)

    def _shift(self, count: int, mean: Tensor) -> None:
        """S += (m' - m)(m' - m)^T n n' / (n + n'), then n and m move."""
        total, apart = self.count + count, mean - self.mean
        self.scatter.addr_(apart, apart, alpha=self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.count = total

    def _draw(self, rows: Tensor, keys: Tensor) -> None:
        """Rows with smaller keys take the places of those with the largest."""
        stays = torch.zeros(KEEP + len(keys), dtype=torch.bool)
        stays[torch.cat((self._keys, keys)).topk(KEEP, largest=False).indices] = True
        leave, enter = ~stays[:KEEP], stays[KEEP:]
        self._rows[leave], self._keys[leave] = rows[enter], keys[enter]

    def expect(self, dimension: int) -> None:
        if not self.dimension:
            self.mean = torch.zeros(dimension, dtype=torch.float64)
            self.scatter = torch.zeros(dimension, dimension, dtype=torch.float64)
            self._rows = torch.empty(KEEP, dimension)
        if dimension != self.dimension:
            raise ValueError(
                f"features ({self.features}) have {self.dimension} dimensions, got {dimension}"
            )

    def save(self, path: str | Path) -> None:
        """A safetensors file that `load` reads."""
        held = self._keys < _EMPTY
        parts = {"mean": self.mean, "scatter": self.scatter}
        parts |= {"sample": self._rows[held], "keys": self._keys[held]}
        about = {"features": self.features, "source": self.source}
        about |= {"count": str(self.count), "seed": str(self.seed)}
        save_tensors(Path(path), parts, about)

    @classmethod
    def load(cls, path: str | Path) -> FeatureStatistics:
        """What `save` wrote."""
        if not Path(path).is_file():
            raise ValueError(f"there are no statistics at {path}: that is no file")
        parts, about = load_tensors(Path(path))
        if (version := about.get("format_version")) != str(FORMAT_VERSION):
            raise ValueError(
                f"{path} has format_version {version}; this psidiff reads {FORMAT_VERSION}"
            )
        with reading(path):
            held = cls(about["features"], about["source"], int(about["seed"]))
            d = len(parts["mean"])
            sizes = {"mean": (d,), "scatter": (d, d), "sample": (len(parts["keys"]), d)}
            for name, size in sizes.items():
                if parts[name].shape != size or not parts[name].is_floating_point():
                    raise damaged(path, f"its {name} is not of size {size}")
            held.expect(d)
            held.mean, held.scatter = parts["mean"], parts["scatter"]
            held.count = int(about["count"])
            held._draw(parts["sample"], parts["keys"])
        return held


def check_same_features(a: FeatureStatistics, b: FeatureStatistics) -> None:
    if a.features != b.features:
        raise ValueError(
            f"features {a.features!r} cannot be compared with features {b.features!r}"
        )


def row_keys(seed: int, first: int, count: int) -> Tensor:
    """A random number in [0, 2^63) for each of `count` row numbers."""
    zero = torch.zeros((), dtype=torch.int64)
    rows = torch.arange(first, first + count) + fold_in(zero, seed)
    return (fold_in(zero, rows) >> 1) & (2**63 - 1)

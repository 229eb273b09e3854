"""How far generated images are from real ones: FID, KID, Inception Score, precision, recall.

Features are read in chunks; only `FeatureStatistics` are kept. Numbers made without the
real Inception network never have those three names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.images import check_images
from ..types import as_count, check_shape
from .feature_statistics import SLICE, FeatureStatistics, check_same_features, row_keys
from .inception import FeatureExtractor
from .metric_result import MetricResult, mean_of, share
from .precision_recall import precision_recall

SUBSETS, SUBSET_SIZE = 100, 1000  # of the kernel distance
SPLITS = 10  # of the classifier score


class InceptionScore:
    """exp(mean_x KL(p(y|x) || p(y))) in each of ten parts, p(y) the mean of p(y|x) there.

    Of every ten images in a row each goes to another part, by chance.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.count: int = 0
        self._images = torch.zeros(SPLITS, dtype=torch.float64)
        self._entropy = torch.zeros(SPLITS, dtype=torch.float64)  # the sum of -H(y|x)
        self._labels = torch.zeros(SPLITS, 0, dtype=torch.float64)  # the sum of p(y|x)

    def add(self, probabilities: Tensor) -> None:
        """p(y|x) (N, classes), in the order of the images."""
        p = probabilities.detach().cpu().double()
        if not bool(((p >= 0).all(1) & ((p.sum(1) - 1).abs() < 1e-3)).all()):
            raise ValueError("probabilities must not be negative, and each row must sum to 1")
        if not self._labels.shape[1]:
            self._labels = torch.zeros(SPLITS, p.shape[1], dtype=torch.float64)
        check_shape("probabilities", p, (len(p), self._labels.shape[1]))
        part = _parts(self.seed, self.count, len(p))
        self._images.index_add_(0, part, torch.ones(len(p), dtype=torch.float64))
        self._entropy.index_add_(0, part, torch.special.xlogy(p, p).sum(1))
        self._labels.index_add_(0, part, p)
        self.count += len(p)

    @property
    def values(self) -> list[float]:
        """The score of each part."""
        p = self._labels / self._images[:, None]
        information = self._entropy / self._images - torch.special.xlogy(p, p).sum(1)
        return information.exp().tolist()


def frechet_distance(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """|m_a - m_b|^2 + tr C_a + tr C_b - 2 |C_a^(1/2) C_b^(1/2)|_*

    The nuclear norm is tr (C_a C_b)^(1/2) without the square root of a rounding error.
    """
    return _distance(a, b, torch.linalg.svdvals(a.root @ b.root))


def _distance(a: FeatureStatistics, b: FeatureStatistics, S: Tensor) -> float:
    """From the singular values S of C_a^(1/2) C_b^(1/2)."""
    apart = (a.mean - b.mean).square().sum()
    size = a.covariance.trace() + b.covariance.trace()
    return max(0.0, (apart + size - 2 * S.sum()).item())


def frechet_error(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """The standard error of the distance from a's images; b is held fixed.

    The infinitesimal jackknife: sd(I(x)) / sqrt(n), over the sample of a, of the influence
    I(x) = 2 (m_a - m_b).y + y.y - y.T y of a row, y = x - m_a. T = C_b^(1/2) V S^-1 V^T
    C_b^(1/2) is the optimal transport, with C_a^(1/2) C_b^(1/2) = U S V^T.
    """
    _, S, Vh = torch.linalg.svd(a.root @ b.root)
    return _error(a, b, S, Vh)


def _error(a: FeatureStatistics, b: FeatureStatistics, S: Tensor, Vh: Tensor) -> float:
    """From the singular values and right vectors of C_a^(1/2) C_b^(1/2)."""
    kept = S / S[0] > len(S) * torch.finfo(S.dtype).eps
    half_transport = b.root @ Vh[kept].T * S[kept].rsqrt()
    influence = []
    for rows in a.reservoir.split(SLICE):
        y = rows.double() - a.mean
        moved = (y @ half_transport).square().sum(1)
        influence.append(2 * y @ (a.mean - b.mean) + y.square().sum(1) - moved)
    return torch.cat(influence).std().item() / math.sqrt(a.count)


def kernel_distance(x: Tensor, y: Tensor) -> float:
    """Unbiased MMD^2 of rows (m, d) and (n, d) with k(x, y) = (x.y / d + 1)^3"""
    x, y = x.double(), y.double()
    return (_among(_kernels(x, x)) + _among(_kernels(y, y)) - 2 * _kernels(x, y).mean()).item()


def _kernels(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3


def _among(k: Tensor) -> Tensor:
    """The mean over pairs of different rows."""
    return (k.sum() - k.trace()) / (len(k) * (len(k) - 1))


def subset_pairs(
    rows: tuple[int, int], size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers (size,) of both sides, for each of the subsets."""
    rng = np.random.default_rng(seed)
    for _ in range(SUBSETS):
        a, b = (torch.from_numpy(rng.choice(n, size, replace=False)) for n in rows)
        yield a, b


def image_statistics(
    images: Iterable[Tensor], features: FeatureExtractor, source: str = "", seed: int = 0
) -> FeatureStatistics:
    """The statistics of batches of uint8 images (N, C, H, W), such as a reference to keep."""
    held = FeatureStatistics(features.name, source, seed)
    for found, _ in _features(images, features):
        held.add(found)
    return held


def image_metrics(
    generated: Iterable[Tensor],
    reference: Iterable[Tensor] | FeatureStatistics,
    features: FeatureExtractor,
    seed: int = 0,
) -> list[MetricResult]:
    """FID, KID and, where the features come with probabilities, the Inception Score; precision
    and recall.

    Batches are uint8 (N, C, H, W). With other features than Inception's the numbers are called
    Fréchet distance, kernel distance and classifier score, and all of them name the features.
    """
    if not isinstance(reference, FeatureStatistics):
        reference = image_statistics(reference, features, seed=seed)
    made, score = FeatureStatistics(features.name, seed=seed + 1), InceptionScore(seed)
    check_same_features(made, reference)
    for found, probabilities in _features(generated, features):
        made.add(found)
        if probabilities is not None:
            score.add(probabilities)
    for side, count in (("generated", made.count), ("real", reference.count)):
        if count < SPLITS:
            raise ValueError(f"{side} images must be at least {SPLITS}, got {count}")
    made.expect(reference.dimension)
    measures = [_frechet(made, reference, features), _kernel(made, reference, features, seed)]
    measures += [_score(score, features)] if score.count == made.count else []
    return measures + [
        replace(each, name=_named(features, each.name, each.name))
        for each in precision_recall(made, reference, _protocol(made, reference))
    ]


def nearest_labels(tokens: Tensor, real: Tensor, labels: Tensor, neighbours: int = 5) -> Tensor:
    """The label that most of the nearest real images (N, L) have, ties to the nearest: (B,)."""
    found, real = [torch.zeros(0, dtype=torch.int64)], real.double()
    for part in tokens.split(SLICE):
        distance = torch.cdist(part.double(), real)
        order = distance.argsort(-1)[:, :neighbours]
        votes = F.one_hot(labels[order], int(labels.max()) + 1).sum(1).double()
        votes += 0.5 * F.one_hot(labels[order[:, 0]], votes.shape[1])
        found.append(votes.argmax(-1))
    return torch.cat(found)


def label_agreement(
    tokens: Tensor, wanted: Tensor, real: Tensor, labels: Tensor, neighbours: int = 5
) -> MetricResult:
    """The share of images (B, L) whose nearest real images have the label they should have."""
    if not len(tokens):
        raise ValueError("there are no images to judge")
    found = nearest_labels(tokens.cpu(), real.cpu(), labels.cpu(), neighbours)
    measured = share("label agreement", found == wanted.cpu(), of="images")
    judge = {"judge": f"{neighbours} nearest of {len(real)} real images, by pixels"}
    return replace(measured, protocol={**measured.protocol, **judge})


def image_batches(images: Sequence[np.ndarray], size: int = 100) -> Iterator[Tensor]:
    """Images (H, W) or (H, W, C) of uint8, as samples are, in batches (N, C, H, W)."""
    for start in range(0, len(images), as_count("size", size)):
        batch = torch.from_numpy(np.stack(images[start : start + size]))
        yield batch[:, None] if batch.ndim == 3 else batch.permute(0, 3, 1, 2)


def _frechet(
    made: FeatureStatistics, real: FeatureStatistics, features: FeatureExtractor
) -> MetricResult:
    protocol = _protocol(made, real)
    protocol["error"] = "infinitesimal jackknife over generated images, reference fixed"
    _, S, Vh = torch.linalg.svd(made.root @ real.root)  # once: it takes seconds
    value, error = _distance(made, real, S), _error(made, real, S, Vh)
    return MetricResult(_named(features, "FID", "Fréchet distance"), value, error, "", protocol)


def _kernel(
    made: FeatureStatistics, real: FeatureStatistics, features: FeatureExtractor, seed: int
) -> MetricResult:
    """The mean over subsets of m rows, unbiased. Its error counts that they overlap.

    With a variance of s per row, subsets of m out of n and n' rows vary by
    v = s (1/m - 1/n + 1/m - 1/n'), and the mean of B of them by s (1/n + 1/n') + v/B.
    """
    a, b = made.reservoir, real.reservoir
    m = min(SUBSET_SIZE, len(a) // 2, len(b) // 2)
    pairs = subset_pairs((len(a), len(b)), m, seed)
    values = [kernel_distance(a[i], b[j]) for i, j in pairs]
    spread = float(np.std(values, ddof=1))
    rows = 1 / len(a) + 1 / len(b)
    error = spread * math.sqrt(rows / (2 / m - rows) + 1 / SUBSETS)
    protocol = _protocol(made, real)
    protocol |= {"kernel": "(x.y / d + 1)^3", "subsets": SUBSETS, "size": m, "seed": seed}
    protocol |= {"rows": [len(a), len(b)], "error": "from the spread of subsets, both sides"}
    name = _named(features, "KID", "kernel distance")
    return MetricResult(name, float(np.mean(values)), error, "", protocol)


def _score(score: InceptionScore, features: FeatureExtractor) -> MetricResult:
    """The mean over splits. What is usually printed after ± is sqrt(10) times its error."""
    protocol: dict[str, Any] = {"features": features.name, "generated": score.count}
    protocol |= {"splits": SPLITS, "seed": score.seed, "error": "of the mean over splits"}
    name = _named(features, "Inception Score", "classifier score")
    return mean_of(name, score.values, "", protocol)


def _protocol(made: FeatureStatistics, real: FeatureStatistics) -> dict[str, Any]:
    counts = {"generated": made.count, "reference": real.count}
    return {"features": made.features, **counts, "source": real.source}


def _named(features: FeatureExtractor, real: str, plain: str) -> str:
    return real if features.is_inception else f"{plain} (features: {features.name})"


def _features(
    images: Iterable[Tensor], features: FeatureExtractor
) -> Iterator[tuple[Tensor, Tensor | None]]:
    for batch in images:
        check_images("images", batch)
        if not len(batch):
            continue
        found, probabilities = features(batch)
        for part in (found, probabilities):
            if part is not None and (part.ndim != 2 or len(part) != len(batch)):
                raise ValueError(
                    f"features {features.name!r} must give a row for each of {len(batch)} "
                    f"images, got shape {tuple(part.shape)}"
                )
        yield found, probabilities


def _parts(seed: int, first: int, count: int) -> Tensor:
    """The part of each row: the rank of its key among those of its ten."""
    start = first - first % SPLITS
    tens = -(-(first + count - start) // SPLITS)
    ranks = row_keys(seed, start, tens * SPLITS).view(tens, SPLITS).argsort(1).argsort(1)
    return ranks.flatten()[first - start :][:count]

"""MAUVE: how far apart two sets of texts are in the clusters of their features."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from .metric_result import MetricResult, check_some
from .scoring_lm import INSTALL
from .text_metrics import xlogx


def mauve(
    features_p: np.ndarray,
    features_q: np.ndarray,
    features: str = "given",
    clusters: int | None = None,
    scaling: float | int = 5,
    seed: int = 0,
) -> MetricResult:
    """MAUVE of two sets of features (N, d): the area under their divergence curve.

    Our own implementation of the published definition: rows of length 1, the principal
    components with 90% of the variance, k-means of both sets together (scikit-learn's; a tenth
    as many clusters as the smaller set has rows), then `divergence_area`. Only numbers with
    equal features, clusters and numbers of texts compare. Error: jackknife over the texts of
    both sets, clusters held fixed.
    """
    made, real = np.asarray(features_p), np.asarray(features_q)
    if made.ndim != 2 or real.ndim != 2 or made.shape[1] != real.shape[1]:
        shapes = f"{made.shape} and {real.shape}"
        raise ValueError(f"MAUVE needs features (N, d) of one width d, got shapes {shapes}")
    if min(len(made), len(real)) < 2:
        raise ValueError("MAUVE needs two texts or more on both sides")
    clusters = clusters or max(2, round(min(len(made), len(real)) / 10))
    labels = _clusters(np.concatenate([made, real]), clusters, seed)
    p = np.bincount(labels[: len(made)], minlength=clusters)
    q = np.bincount(labels[len(made) :], minlength=clusters)
    variance = _left_out(p, lambda less: divergence_area(less, q, scaling))
    variance += _left_out(q, lambda less: divergence_area(p, less, scaling))
    protocol = {
        "features": features,
        "samples": len(made),
        "reference": len(real),
        "clusters": clusters,
        "scaling": scaling,
        "seed": seed,
        "error": "jackknife over texts, clusters fixed",
    }
    value = divergence_area(p, q, scaling)
    return MetricResult(
        f"MAUVE (features: {features})", value, math.sqrt(variance), "", protocol
    )


def divergence_area(p: np.ndarray, q: np.ndarray, scaling: float | int = 5) -> float:
    """The area under (exp(-c KL(q | r)), exp(-c KL(p | r))), r = w p + (1 - w) q, 0 < w < 1."""
    p, q = p / p.sum(), q / q.sum()
    w = np.linspace(1e-6, 1 - 1e-6, 25)[:, None]
    r = w * p + (1 - w) * q
    x, y = ((xlogx(s) - s * np.log(np.where(s, r, 1))).sum(-1) for s in (q, p))
    x, y = np.r_[1, np.exp(-scaling * x), 0], np.r_[0, np.exp(-scaling * y), 1]
    return float(((x[:-1] - x[1:]) * (y[:-1] + y[1:])).sum() / 2)


def trigrams(texts: Sequence[str]) -> np.ndarray:
    """The plainest features for `mauve`: the character trigrams of a text, hashed to 1,024."""
    kind = _sklearn("feature_extraction.text").HashingVectorizer
    hashed = kind(analyzer="char", ngram_range=(3, 3), n_features=1024)
    return hashed.transform(texts).toarray()


def trigram_mauve(texts: Sequence[str], reference: Sequence[str]) -> MetricResult:
    """MAUVE by character trigrams."""
    check_some(texts, "MAUVE")
    return mauve(trigrams(texts), trigrams(reference), "character trigrams")


def _left_out(counts: np.ndarray, statistic: Callable[[np.ndarray], float]) -> float:
    """The jackknife's variance of a statistic of counts: those of a kind are alike."""
    kinds = np.flatnonzero(counts)
    values = [statistic(counts - np.eye(len(counts), dtype=int)[kind]) for kind in kinds]
    weights = counts[kinds]
    mean = np.average(values, weights=weights)
    spread = float((weights * (np.array(values) - mean) ** 2).sum())
    return spread * (counts.sum() - 1) / counts.sum()


def _clusters(rows: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """The number of the cluster that each row is in."""
    rows = _sklearn("preprocessing").normalize(rows)
    rows = _sklearn("decomposition").PCA(0.9, svd_solver="full").fit_transform(rows)
    means = _sklearn("cluster").KMeans(clusters, n_init=5, max_iter=500, random_state=seed)
    return means.fit(rows).labels_


def _sklearn(module: str) -> Any:
    try:
        return import_module(f"sklearn.{module}")
    except ImportError as error:
        raise ValueError(f"MAUVE needs scikit-learn: {INSTALL}") from error

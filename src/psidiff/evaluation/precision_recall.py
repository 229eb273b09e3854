"""Precision and recall of images in a space of features, by k nearest neighbours.

Kynkäänniemi et al., "Improved Precision and Recall Metric for Assessing Generative Models",
2019. A set of rows stands for the union of balls around them, each as large as the distance to
the k-th nearest of the others. Distances are float64, and are taken block by block.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .feature_statistics import SLICE, FeatureStatistics
from .metric_result import MetricResult, share

NEIGHBOURS = 3
MOST = 10_000  # rows of each side
_ROUNDING = 1e-12  # of a squared distance, as a part of the squared lengths: it is 0 below
_EDGE = 1 + 1e-9  # a copy of the k-th neighbour is inside, whatever was rounded


def precision_recall(
    made: FeatureStatistics, real: FeatureStatistics, protocol: dict[str, Any]
) -> list[MetricResult]:
    """The share of generated rows within the balls of real ones, and the other way round.

    As many of each, since balls around few rows are large: at most 10,000, of those that the
    statistics keep.
    """
    count = min(len(made.reservoir), len(real.reservoir), MOST)
    rows = made.reservoir[:count], real.reservoir[:count]
    radii = neighbour_radii(rows[0]), _radii_of(real, real.count, count)
    about = protocol | {"neighbours": NEIGHBOURS, "rows": count}
    found = []
    for name, one, other in (("precision", 0, 1), ("recall", 1, 0)):
        within = share(name, inside(rows[one], rows[other], radii[other]))
        how = {"interval": within.protocol["interval"]}
        how["error"] = f"{within.protocol['error']}, the other images fixed"
        found.append(replace(within, protocol=about | how))
    return found


def neighbour_radii(rows: Tensor, k: int = NEIGHBOURS) -> Tensor:
    """The squared distance (N,) of each row (N, d) to the k-th nearest of the others."""
    radii = []
    for start in range(0, len(rows), SLICE):
        nearest = torch.empty(len(rows[start : start + SLICE]), 0, dtype=torch.float64)
        for first in range(0, len(rows), SLICE):
            apart = squared_distances(
                rows[start : start + SLICE], rows[first : first + SLICE], rows[0]
            )
            if first == start:
                apart.fill_diagonal_(torch.inf)
            nearest = torch.cat((nearest, apart), 1)
            nearest = nearest.topk(min(k, nearest.shape[1]), largest=False).values
        radii.append(nearest.max(1).values)
    return torch.cat(radii)


def inside(rows: Tensor, others: Tensor, radii: Tensor) -> Tensor:
    """Whether each row (N, d) lies in one of the balls around others (M, d): (N,)."""
    found = []
    for part in rows.split(SLICE):
        is_in = torch.zeros(len(part), dtype=torch.bool)
        for first in range(0, len(others), SLICE):
            apart = squared_distances(part, others[first : first + SLICE], others[0])
            is_in |= (apart <= _EDGE * radii[first : first + SLICE]).any(1)
        found.append(is_in)
    return torch.cat(found)


def squared_distances(x: Tensor, y: Tensor, origin: Tensor) -> Tensor:
    """|x_i - y_j|^2 (N, M) in float64; 0 for equal rows, whatever was rounded."""
    x, y = x.double() - origin.double(), y.double() - origin.double()
    lengths = x.square().sum(1)[:, None] + y.square().sum(1)
    apart = lengths - 2 * x @ y.T
    return apart.where(apart > _ROUNDING * lengths, 0)


@lru_cache(maxsize=1)  # the same real images for every cell of a comparison
def _radii_of(real: FeatureStatistics, images: int, count: int) -> Tensor:
    """The radii around so many rows of statistics that hold so many images."""
    return neighbour_radii(real.reservoir[:count])

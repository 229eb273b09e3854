"""Whether an image shows the class it was asked to show, by the real images nearest to it."""

from __future__ import annotations

import torch
from torch import Tensor

from .metric_result import MetricResult
from .sudoku_metrics import share


def nearest_labels(tokens: Tensor, real: Tensor, labels: Tensor, neighbours: int = 5) -> Tensor:
    """The label that most of the nearest real images (N, L) have, ties to the nearest: (B,)."""
    distance = torch.cdist(tokens.double(), real.double())
    order = distance.argsort(-1)[:, :neighbours]
    votes = torch.nn.functional.one_hot(labels[order], int(labels.max()) + 1).sum(1).double()
    votes += 0.5 * torch.nn.functional.one_hot(labels[order[:, 0]], votes.shape[1])
    return votes.argmax(-1)


def label_agreement(
    tokens: Tensor, wanted: Tensor, real: Tensor, labels: Tensor, neighbours: int = 5
) -> MetricResult:
    """The share of images (B, L) whose nearest real images have the label they should have."""
    if not len(tokens):
        raise ValueError("there are no images to judge")
    found = nearest_labels(tokens.cpu(), real.cpu(), labels.cpu(), neighbours)
    measured = share("label agreement", found == wanted.cpu(), of="images")
    judge = {"judge": f"{neighbours} nearest of {len(real)} real images, by pixels"}
    return MetricResult(
        measured.name, measured.value, measured.stderr, "", {**measured.protocol, **judge}
    )

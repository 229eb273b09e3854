"""What samples of images are measured by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..evaluation.image_metrics import SPLITS, image_batches, image_metrics, label_agreement
from ..evaluation.inception import FeatureExtractor
from ..evaluation.metric_result import MetricResult
from ..evaluation.metrics import SampleSet
from ..model import Decoded
from .sample_evaluator import SampleEvaluator, entropy_1


@dataclass
class ImageEvaluator(SampleEvaluator):
    """Label agreement where there are labels, and distances in features."""

    real: SampleSet
    labels: Tensor | None
    features: FeatureExtractor
    wanted: Tensor | None = (
        None  # of the samples; None: each class in turn, as `sampling_inputs` says
    )

    def __post_init__(self) -> None:
        named = f"Fréchet distance (features: {self.features.name})"
        distance = "FID" if self.features.is_inception else named
        labelled = self.labels is not None
        self.quality, self.better = (
            ("label agreement", "high") if labelled else (distance, "low")
        )

    def sampling_inputs(self, count: int) -> dict[str, Any]:
        if self.labels is None:
            return {}
        return {"labels": torch.arange(count) % (int(self.labels.max()) + 1)}

    def check_counts(self, samples: int) -> None:
        """Raise ValueError if there are too few images for `quality`."""
        real = len(self.real.images)
        if self.labels is None and min(samples, real) < SPLITS:
            raise ValueError(
                f"images without labels are compared by {self.quality}, which needs {SPLITS} "
                f"samples (--samples) and {SPLITS} real images, got {samples} and {real}"
            )

    def evaluate(self, made: Decoded) -> list[MetricResult]:
        tokens, found = made.tokens.cpu(), []
        if self.labels is not None:
            wanted = (
                self.sampling_inputs(len(tokens))["labels"]
                if self.wanted is None
                else self.wanted
            )
            asked = wanted <= self.labels.max()  # the null class asks for nothing
            if bool(asked.any()):
                chosen = tokens[asked], wanted[asked]
                found.append(label_agreement(*chosen, self.real.tokens, self.labels))
        if min(len(tokens), len(self.real.images)) >= SPLITS:
            generated, real = image_batches(made.images), image_batches(self.real.images)
            found += image_metrics(generated, real, self.features)
        return [*found, entropy_1(tokens)]

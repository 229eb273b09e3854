"""What samples of images are measured by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..evaluation.image_metrics import SPLITS, image_batches, image_metrics, label_agreement
from ..evaluation.inception import PIXELS, FeatureExtractor
from ..evaluation.metric_result import MetricResult
from ..evaluation.metrics import Metric, SampleSet
from ..model import Decoded
from ..types import check_choice
from .image_sets import ReferenceImages, as_arrays, read_sample_images
from .sample_evaluator import SampleEvaluator, entropy_1

PUBLISHED_SAMPLES = 50_000
_PROTOCOLS = ("exact", "paper", "released")


@dataclass
class ImageEvaluator(SampleEvaluator):
    """Distances to real images in features, and label agreement where there are labels.

    The quality is the distance where the features were named or there are no labels.

    real, labels: some real images, for label agreement and the user's metrics. reference: all
    that distances are to. num_classes: that the model can be asked for. wanted: the labels that
    samples made before were asked for; None: each class in turn, as `sampling_inputs` says.
    """

    real: SampleSet
    labels: Tensor | None
    reference_images: ReferenceImages
    features: FeatureExtractor | None = None
    num_classes: int | None = None
    wanted: Tensor | None = None
    protocol: str = "exact"

    def __post_init__(self) -> None:
        self.looks = self.features or PIXELS
        distance = f"Fréchet distance (features: {self.looks.name})"
        self.quality, self.better = "FID" if self.looks.is_inception else distance, "low"
        if self.features is None and self.labels is not None:
            self.quality, self.better = "label agreement", "high"

    def sampling_inputs(self, count: int) -> dict[str, Any]:
        if self.num_classes is None:
            return {}
        return {"labels": torch.arange(count) % self.num_classes}

    def check_counts(self, samples: int) -> None:
        """Raise ValueError if there are too few images for `quality`."""
        real = len(self.reference_images)
        if self.quality != "label agreement" and min(samples, real) < SPLITS:
            raise ValueError(
                f"images are compared by {self.quality}, which needs {SPLITS} samples "
                f"(--samples) and {SPLITS} real images, got {samples} and {real}"
            )

    def follow(self, protocol: str, samples: int) -> None:
        """Judge so many samples as the paper says it did ("paper"), or as its released code
        does, which mirrors the real images at random ("released").

        ValueError where the number would be another one; "exact" is for any.
        """
        check_choice("protocol", protocol, _PROTOCOLS)
        self.protocol = protocol
        if protocol == "exact":
            return
        how = (
            f"--protocol {protocol} is FID and Inception Score of {PUBLISHED_SAMPLES:,} samples"
        )
        if not self.looks.is_inception:
            raise ValueError(f"{how}: --features names the file of the Inception network")
        if samples != PUBLISHED_SAMPLES:
            raise ValueError(f"{how}, got {samples:,}")
        if not self.reference_images.complete:
            source = self.reference_images.source
            raise ValueError(f"{how} against a whole training set, which {source} is not")
        if protocol == "released":
            self.reference_images = self.reference_images.mirrored()

    def evaluate(self, made: Decoded) -> list[MetricResult]:
        tokens, found = made.tokens.cpu(), []
        if self.labels is not None:
            wanted = self.wanted
            if wanted is None:
                wanted = self.sampling_inputs(len(tokens))["labels"]
            asked = wanted <= self.labels.max()  # the null class asks for nothing
            if bool(asked.any()):
                chosen = tokens[asked], wanted[asked]
                found.append(label_agreement(*chosen, self.real.tokens, self.labels))
        if len(tokens) >= SPLITS:
            found += self.distances(image_batches(made.images))
        return [*found, entropy_1(tokens)]

    def distances(self, batches: Iterable[Tensor]) -> list[MetricResult]:
        """FID and the like of generated images; none where there are too few real ones."""
        if len(self.reference_images) < SPLITS:
            return []
        real = self.reference_images.statistics(self.looks)
        found = image_metrics(batches, real, self.looks)
        if self.protocol == "exact":
            return found
        said = {"protocol": self.protocol}
        return [replace(each, protocol=said | each.protocol) for each in found]

    def evaluate_files(
        self, path: Path, metrics: Sequence[Metric], protocol: str
    ) -> list[MetricResult]:
        """These metrics, or all numbers, of images in files of which nobody knows tokens."""
        pixels = read_sample_images(path)
        self.reference_images.check_shape(pixels.shape[1:], f"{path} has")
        self.follow(protocol, len(pixels))
        if metrics:
            samples = SampleSet(None, (), as_arrays(pixels))
            return [metric(samples, self.real) for metric in metrics]
        self.check_counts(len(pixels))
        return self.distances(torch.from_numpy(pixels).split(100))

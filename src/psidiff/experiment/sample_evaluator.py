"""What measures samples, and which of its numbers is their quality.

An evaluator is made once for a model and measures every cell of a comparison by one protocol.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor

from ..evaluation.metric_result import MetricResult
from ..evaluation.metrics import METRICS, Metric, SampleSet
from ..model import Decoded


class SampleEvaluator(ABC):
    """Measures samples; `better`, "high" or "low", says which way `quality` should go.

    entropy: the name of the measure of variety; real: real data to compare with.
    """

    quality: str
    better: str
    entropy = "entropy-1"
    real: SampleSet | None

    def sampling_inputs(self, count: int) -> dict[str, Any]:
        """What samples are asked for: labels, clues."""
        return {}

    @abstractmethod
    def evaluate(self, made: Decoded) -> list[MetricResult]:
        """All numbers that samples of this kind have."""

    def chosen(self, made: Decoded, metrics: Sequence[Metric]) -> list[MetricResult]:
        """These metrics, the same numbers by the same names as among all."""
        samples = sample_set(made)
        return [self._metric(metric, samples) for metric in metrics]

    @cached_property
    def reference(self) -> dict[str, float]:
        """The same numbers of real data, where they mean something."""
        return {} if self.real is None else {"entropy-1": entropy_1(self.real.tokens).value}

    def _metric(self, metric: Metric, samples: SampleSet) -> MetricResult:
        return metric(samples, self.real)


def sample_set(made: Decoded) -> SampleSet:
    """Samples as metrics read them: of text all tokens, whatever ends in it."""
    made = replace(made, whole=True)
    kind = None if made.codec is None else made.codec.kind
    texts = made.text if kind in ("text", "puzzle") else ()
    return SampleSet(made.tokens.cpu(), texts, made.images if kind == "image" else ())


def entropy_1(tokens: Tensor) -> MetricResult:
    """Of the tokens over all samples."""
    return METRICS["entropy-1"](SampleSet(tokens.cpu()))

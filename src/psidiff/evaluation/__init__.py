"""Measuring: likelihoods, metrics of samples, language models that score text, exact checks."""

from .metric_result import MetricResult
from .metrics import METRICS, Metric, SampleSet, metrics_named
from .nll import Likelihood, likelihood
from .sequence_nll import (
    MeanEstimate,
    SequenceScore,
    autoregressive_nll,
    estimate_mean,
    is_greedy_in_one_pass,
    sequence_nelbo,
)

__all__ = [
    "METRICS",
    "Likelihood",
    "MeanEstimate",
    "Metric",
    "MetricResult",
    "SampleSet",
    "SequenceScore",
    "autoregressive_nll",
    "estimate_mean",
    "is_greedy_in_one_pass",
    "likelihood",
    "metrics_named",
    "sequence_nelbo",
]

"""Training: what to minimise at which step, and the average of the weights."""

from .curriculum import Curriculum, Phase
from .ema import EMA
from .objective import (
    Batch,
    CrossEntropy,
    Nelbo,
    NextToken,
    Objective,
    RelaxedNelbo,
    random_spans,
    stratified_times,
)

__all__ = [
    "EMA",
    "Batch",
    "CrossEntropy",
    "Curriculum",
    "Nelbo",
    "NextToken",
    "Objective",
    "Phase",
    "RelaxedNelbo",
    "random_spans",
    "stratified_times",
]

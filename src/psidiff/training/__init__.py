"""Training: what to minimise at which step, and the loop that does it, stopped or not."""

from ..distributed import Processes
from .batch import Batch, Order, random_spans, stratified_times
from .config import Settings
from .curriculum import Curriculum, Phase
from .metrics_log import Log, read_log
from .objective import CrossEntropy, Nelbo, NextToken, Objective, RelaxedNelbo
from .optimizers import EMA
from .trainer import Trainer

__all__ = [
    "EMA",
    "Batch",
    "CrossEntropy",
    "Curriculum",
    "Log",
    "Nelbo",
    "NextToken",
    "Objective",
    "Order",
    "Phase",
    "Processes",
    "RelaxedNelbo",
    "Settings",
    "Trainer",
    "random_spans",
    "read_log",
    "stratified_times",
]

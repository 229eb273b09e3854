"""Training: what to minimise at which step, and the loop that does it, stopped or not."""

from ..distributed import Processes
from .batch import Batch, random_spans, stratified_times
from .config import Settings
from .curriculum import Curriculum, Phase
from .ema import EMA
from .metrics_log import Log, read_log
from .objective import CrossEntropy, Nelbo, NextToken, Objective, RelaxedNelbo
from .shuffling import Order
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

"""Plans, kappa rules, wrapped denoisers, and the loop that walks a plan."""

from .confident import Confident
from .corrector import Corrector
from .filters import Cached, MinP, Nucleus, Temperature, TopK
from .guidance import Guidance, Guided, Interval, Ramp
from .kappa import (
    DFM,
    Cap,
    Confidence,
    Constant,
    ForwardBackward,
    Kappa,
    Loop,
    Memory,
    Rescale,
    RescaleReleased,
    parse_kappa,
)
from .loop import Samples, sample
from .plan import Step, plan
from .trace import Trace

__all__ = [
    "DFM",
    "Cached",
    "Cap",
    "Confidence",
    "Confident",
    "Constant",
    "Corrector",
    "ForwardBackward",
    "Guidance",
    "Guided",
    "Interval",
    "Kappa",
    "Loop",
    "Memory",
    "MinP",
    "Nucleus",
    "Ramp",
    "Rescale",
    "RescaleReleased",
    "Samples",
    "Step",
    "Temperature",
    "TopK",
    "Trace",
    "parse_kappa",
    "plan",
    "sample",
]

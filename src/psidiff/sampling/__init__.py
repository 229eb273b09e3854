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
from .presets import PRESETS, Preset, preset
from .trace import Trace
from .words import parse_corrector, parse_guidance, parse_predictor

__all__ = [
    "DFM",
    "PRESETS",
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
    "Preset",
    "Ramp",
    "Rescale",
    "RescaleReleased",
    "Samples",
    "Step",
    "Temperature",
    "TopK",
    "Trace",
    "parse_corrector",
    "parse_guidance",
    "parse_kappa",
    "parse_predictor",
    "plan",
    "preset",
    "sample",
]

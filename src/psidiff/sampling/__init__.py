"""Plans, kappa rules, wrapped denoisers, and the loop that walks a plan."""

from .confident import Confident
from .corrector import Corrector, parse_corrector
from .filters import Cached, MinP, Nucleus, Temperature, TopK
from .guidance import Guidance, Interval, Ramp, parse_guidance
from .kappa import (
    DFM,
    KAPPAS,
    LEFT_TO_RIGHT,
    Cap,
    Confidence,
    Constant,
    ConstantReleased,
    ForwardBackward,
    Kappa,
    Loop,
    LoopReleased,
    Memory,
    Rescale,
    RescaleReleased,
    parse_kappa,
)
from .loop import Samples, sample
from .plan import Step, plan
from .sampler import (
    OPTIONS,
    PRESETS,
    Sampler,
    format_options,
    parse_options,
    parse_predictor,
    preset,
    read_option,
)
from .trace import Trace

__all__ = [
    "DFM",
    "KAPPAS",
    "LEFT_TO_RIGHT",
    "OPTIONS",
    "PRESETS",
    "Cached",
    "Cap",
    "Confidence",
    "Confident",
    "Constant",
    "ConstantReleased",
    "Corrector",
    "ForwardBackward",
    "Guidance",
    "Interval",
    "Kappa",
    "Loop",
    "LoopReleased",
    "Memory",
    "MinP",
    "Nucleus",
    "Ramp",
    "Rescale",
    "RescaleReleased",
    "Sampler",
    "Samples",
    "Step",
    "Temperature",
    "TopK",
    "Trace",
    "format_options",
    "parse_corrector",
    "parse_guidance",
    "parse_kappa",
    "parse_options",
    "parse_predictor",
    "plan",
    "preset",
    "read_option",
    "sample",
]

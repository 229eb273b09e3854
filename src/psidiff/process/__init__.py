"""Sections 2-3 of the paper: priors, schedules, posteriors, the loss, exact draws."""

from .nelbo import nelbo
from .posterior import (
    Mixture,
    corrupt,
    marginal,
    maximal,
    posterior,
    psi,
    to_leave_one_out,
    to_plain,
)
from .prior import Masked, Mixed, Prior, Uniform, Unigram, categorical
from .schedule import Cosine, LogLinear, NoiseSchedule

__all__ = [
    "Cosine",
    "LogLinear",
    "Masked",
    "Mixed",
    "Mixture",
    "NoiseSchedule",
    "Prior",
    "Uniform",
    "Unigram",
    "categorical",
    "corrupt",
    "marginal",
    "maximal",
    "nelbo",
    "posterior",
    "psi",
    "to_leave_one_out",
    "to_plain",
]

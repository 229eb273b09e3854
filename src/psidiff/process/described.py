"""Priors and schedules as the plain data of files and configs, and back."""

from __future__ import annotations

from typing import Any

from ..registry import Registry
from .prior import Masked, Mixed, Prior, Uniform, Unigram
from .schedule import Cosine, LogLinear, NoiseSchedule

PRIORS = Registry("prior", Prior)
PRIORS.register("masked")(Masked)
PRIORS.register("uniform")(Uniform)
PRIORS.register("mixed")(Mixed)
PRIORS.register("unigram")(Unigram)
SCHEDULES = Registry("schedule", NoiseSchedule)
SCHEDULES.register("loglinear", "loglinear", "loglinear:1e-5")(LogLinear)
SCHEDULES.register("cosine")(Cosine)


def prior_over(words: str, num_tokens: int, mask_id: int | None = None, **known: Any) -> Prior:
    """The prior that words mean over so many tokens.

    Args:
        words: such as uniform, mixed:uniform=.2, or FILE.py:NAME of a file that was imported.
        num_tokens: the size of the vocabulary.
        mask_id: the mask in it; None: a prior with a mask gets one token more.
        known: other parameters, for priors that have them, such as counts.
    """
    more = mask_id is None and "mask_id" in PRIORS.parameters(words)
    mask = num_tokens if mask_id is None else mask_id
    return PRIORS.parse(words, vocab_size=num_tokens + more, mask_id=mask, **known)


def describe(value: Prior | NoiseSchedule) -> dict[str, Any]:
    """A prior or a schedule as plain data, which `prior_from` and `schedule_from` read."""
    return (PRIORS if isinstance(value, Prior) else SCHEDULES).to_dict(value)


def prior_from(described: Any) -> Prior:
    """{"name": "mixed", "vocab_size": 50258, "mask_id": 50257, "uniform": 0.1} -> Mixed(...)"""
    return PRIORS.from_dict(described)


def schedule_from(described: Any) -> NoiseSchedule:
    """{"name": "loglinear", "eps": 0.001} -> LogLinear(0.001)"""
    return SCHEDULES.from_dict(described)

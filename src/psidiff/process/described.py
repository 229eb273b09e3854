"""Priors and schedules as the plain data of files and configs, and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..checksums import in_short
from ..options import check_options
from .prior import Masked, Mixed, Prior, Uniform, Unigram
from .schedule import Cosine, LogLinear, NoiseSchedule

_PRIORS = {"masked": Masked, "uniform": Uniform, "mixed": Mixed, "unigram": Unigram}
_SCHEDULES = {"loglinear": LogLinear, "cosine": Cosine}


def describe(thing: Any) -> dict[str, Any]:
    """A prior or a schedule as plain data."""
    return {"name": type(thing).__name__.lower(), **asdict(thing)}


def prior_from(described: Any) -> Prior:
    """{"name": "mixed", "vocab_size": 50258, "mask_id": 50257, "uniform": 0.1} -> Mixed(...)"""
    return _from("prior", _PRIORS, described)


def schedule_from(described: Any) -> NoiseSchedule:
    """{"name": "loglinear", "eps": 0.001} -> LogLinear(0.001)"""
    return _from("schedule", _SCHEDULES, described)


def _from(what: str, known: dict[str, Any], described: Any) -> Any:
    if not isinstance(described, dict):
        names = ", ".join(known)
        raise ValueError(
            f'{what} must be a dict with a "name" ({names}) and what it needs, '
            f"got {in_short(described)}"
        )
    options = dict(described)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{in_short(name)} is not one of {', '.join(known)}")
    check_options(f"{what} {name}", known[name], options)
    return known[name](**options)

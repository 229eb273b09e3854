"""Priors and schedules as the plain data of configs, and back."""

from __future__ import annotations

from typing import Any

from ..model import _PRIORS, _SCHEDULES, _describe, _make
from ..process import NoiseSchedule, Prior

describe = _describe


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
            f"got {described!r}"
        )
    try:
        return _make(known, described)
    except TypeError as error:
        raise ValueError(f"{what} {described} cannot be made: {error}") from error

"""Words for predictors, guidance and correctors, as command lines and servers take them."""

from __future__ import annotations

import re
from typing import Any

from .confident import Confident
from .corrector import Corrector
from .guidance import Guidance, Interval, Ramp
from .kappa import NUMBER, check_window

_SIGNED = rf"-?{NUMBER}"
_CONFIDENT: dict[str, tuple[str, Any]] = {
    "probability": ("by", "probability"),
    "margin": ("by", "margin"),
    "entropy": ("by", "entropy"),
    "argmax": ("argmax", True),
    "take-back": ("take_back", True),
    "commit": ("commit", True),
}


def parse_predictor(text: str) -> str | Confident:
    """markov, maximal, confident, or confident: and any of its settings, apart by commas"""
    text = str(text).strip()
    if text in ("markov", "maximal"):
        return text
    name, colon, words = text.partition(":")
    settings = [_setting(word.strip()) for word in words.split(",")] if colon else []
    known = dict(each for each in settings if each is not None)
    if name != "confident" or len(known) < len(settings):
        raise ValueError(
            f"{text!r} is no predictor; these are: markov, maximal, confident, "
            "confident:margin, confident:entropy,threshold=.3, "
            "confident:probability,gumbel=1,argmax,take-back, confident:argmax,commit"
        )
    return Confident(**known)


def _setting(word: str) -> tuple[str, Any] | None:
    match = re.fullmatch(rf"(threshold|gumbel)=({NUMBER})", word)
    return (match[1], float(match[2])) if match else _CONFIDENT.get(word)


def parse_guidance(text: str, on: str = "x") -> Guidance:
    """2, ramp:3, ramp:3^2 (its power), or 2@.1-.6 (t from .1 to .6)"""
    text = str(text).strip()
    if match := re.fullmatch(rf"ramp:({_SIGNED})(?:\^({NUMBER}))?", text):
        return Guidance(Ramp(float(match[1]), float(match[2] or 1)), on)
    match = re.fullmatch(rf"({_SIGNED})(?:@({NUMBER})-({NUMBER}))?", text)
    if match is None:
        raise ValueError(f"{text!r} is no guidance; these are: 2, 2@.1-.6, ramp:3, ramp:3^2")
    if match[2] is None:
        return Guidance(float(match[1]), on)
    t_off, t_on = float(match[2]), float(match[3])
    check_window(t_on, t_off)
    return Guidance(Interval(float(match[1]), t_on, t_off), on)


def parse_corrector(text: str) -> Corrector:
    """2x12, sweeps by size, or 2x12:uncertain"""
    text = str(text).strip()
    match = re.fullmatch(r"([0-9]+)x([0-9]+)(?::(random|uncertain))?", text)
    if match is None:
        raise ValueError(
            f"{text!r} is no corrector; these are: 2x12 (sweeps x size), 2x12:uncertain"
        )
    return Corrector(int(match[1]), int(match[2]), match[3] or "random")

"""A sampler on one line: a rule for kappa, and settings as name=value."""

from __future__ import annotations

from typing import Any

_SETTINGS: dict[str, Any] = {
    "predictor": str,
    "corrector": str,
    "preset": str,
    "last": str,
    "guidance": str,
    "nucleus": str,
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "top_k": int,
}


def parse_sampler(text: str) -> dict[str, Any]:
    """constant:0@.05-.6 predictor=maximal corrector=2x12 last=greedy, for `Model.sample`

    Without a rule it is "auto": the preset's, or what the model recommends.
    """
    said: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or ":" in name:
            name, value = "kappa", word
        name = name.replace("-", "_")
        if name in said:
            raise ValueError(f"the sampler {text!r} says {name} twice")
        said[name] = value if name == "kappa" else _value(name, value)
    if not said:
        raise ValueError("a sampler is a rule such as cap:.02, settings as name=value, or both")
    return {"kappa": "auto", **said}


def _value(name: str, value: str) -> Any:
    if name not in _SETTINGS:
        raise ValueError(f"a sampler has no {name!r}; it may have {', '.join(_SETTINGS)}")
    try:
        return _SETTINGS[name](value)
    except ValueError:
        raise ValueError(f"{name} of a sampler must be a number, got {value!r}") from None

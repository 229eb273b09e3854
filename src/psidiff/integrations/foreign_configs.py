"""Configs of diffusers' discrete schedulers, read for a PsiScheduler: what it shares it takes,
the rest is named in a warning and kept for the way back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

_INSTEAD = {
    "entropy_bound": "predictor='confident:entropy,threshold=...'",
    "t_max": "temperature=...",
    "t_min": "temperature=...",
    "threshold": "predictor='confident:threshold=...'",
    "editing_threshold": "kappa='cap:...', which corrects tokens by chance",
    "minimal_topk": "num_inference_steps=..., which says how many are left to a step",
}
"""Options of EntropyBoundScheduler and BlockRefinementScheduler without a meaning in a mixture,
and what does their work."""


def warn_of_foreign(config: Mapping[str, Any]) -> None:
    """Name the values of another scheduler's config that are not used."""
    name = config.get("_class_name", "the other scheduler")
    found = {key: config[key] for key in _INSTEAD if config.get(key) is not None}
    if found and "kappa" not in config:  # ours keeps such values from a way there
        listed = ", ".join(f"{key}={value!r}" for key, value in found.items())
        warnings.warn(
            f"PsiScheduler does not use {listed} of {name}: it keeps them for the way back",
            stacklevel=3,
        )


def refuse_foreign(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that a PsiScheduler does not have."""
    for name in options:
        if name in _INSTEAD:
            raise ValueError(f"PsiScheduler has no {name}: say {_INSTEAD[name]}")

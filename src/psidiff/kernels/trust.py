"""A kernel is compared with its plain form the first time a device runs it.

Triton and GPUs differ; where a kernel cannot be built, or is wrong, a warning says so and the
plain form goes on alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

try:
    import_module("triton")
except ImportError:  # no GPU, or no Triton for it
    has_triton = False
else:
    has_triton = True

_verdicts: dict[tuple[Any, torch.device], bool] = {}


def trusted(
    kernel: Callable[..., Any],
    device: torch.device,
    fast: Callable[[], tuple[Tensor, ...]],
    plain: Callable[[], tuple[Tensor, ...]],
) -> bool:
    """Whether `kernel` may be used on `device`: asked once, by running both on something."""
    if (kernel, device) not in _verdicts:
        trouble = _trouble(fast, plain)
        if trouble:
            name = kernel.__module__.rpartition(".")[2]
            warnings.warn(f"the kernel {name} is not used: {trouble}", stacklevel=3)
        _verdicts[kernel, device] = not trouble
    return _verdicts[kernel, device]


def _trouble(
    fast: Callable[[], tuple[Tensor, ...]], plain: Callable[[], tuple[Tensor, ...]]
) -> str:
    try:
        near = all(_near(*pair) for pair in zip(fast(), plain(), strict=True))
    except Exception as error:  # whatever a compiler may say
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "" if near else "it is wrong here"


def _near(got: Tensor, want: Tensor) -> bool:
    """Numbers within 2% in norm; of tokens, nine in ten."""
    if not want.is_floating_point():
        return bool((got == want).float().mean() >= 0.9)
    return bool((got.float() - want.float()).norm() <= 0.02 * want.float().norm())

"""A kernel is compared with its plain form, on inputs that are always the same, before use.

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

_verdicts: dict[tuple[Any, ...], bool] = {}


def trusted(
    kernel: Callable[..., Any],
    variant: tuple[Any, ...],
    device: torch.device,
    fast: Callable[[], tuple[Tensor, ...]],
    plain: Callable[[], tuple[Tensor, ...]],
) -> bool:
    """Whether `kernel` may be used on `device`: asked once for each variant of its code, by
    running both forms on fixed inputs."""
    key = (kernel, *variant, device)
    if key not in _verdicts:
        trouble = _trouble(fast, plain)
        if trouble:
            name = kernel.__module__.rpartition(".")[2]
            warnings.warn(f"the kernel {name} is not used: {trouble}", stacklevel=3)
        _verdicts[key] = not trouble
    return _verdicts[key]


def _trouble(
    fast: Callable[[], tuple[Tensor, ...]], plain: Callable[[], tuple[Tensor, ...]]
) -> str:
    try:
        near = all(_near(*pair) for pair in zip(fast(), plain(), strict=True))
    except Exception as error:  # whatever a compiler may say
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "" if near else "it is wrong here"


def _near(got: Tensor, want: Tensor) -> bool:
    """All tokens are the same; the numbers of each row are within its rounding."""
    if not want.is_floating_point():
        return torch.equal(got, want)
    rounding = 1e-3 if got.dtype is torch.float32 else 1e-2
    error, size = ((v.float().view(len(v), -1).norm(dim=1)) for v in (got - want, want))
    return bool((error <= rounding * size + 1e-6 * size.max()).all())

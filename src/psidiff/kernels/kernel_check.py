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
    _found = False
else:
    _found = True
has_triton: bool = _found

Work = Callable[..., tuple[Tensor, Tensor]]
_results: dict[tuple[Any, ...], bool] = {}


def matches_reference(
    kernel: Work,
    variant: tuple[Any, ...],
    device: torch.device,
    on_fixed: Callable[[Work], tuple[Tensor, Tensor]],
    fast: Work,
    plain: Work,
) -> bool:
    """Whether `kernel` may be used on `device`: found once for each variant of its code, by
    calling both forms of it, fast and plain, on fixed inputs."""
    key = (kernel, *variant, device)
    if key not in _results:
        trouble = "it is wrong here"
        try:
            if all(_near(*pair) for pair in zip(on_fixed(fast), on_fixed(plain), strict=True)):
                trouble = ""
        except Exception as error:  # whatever a compiler may say
            trouble = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if trouble:
            name = kernel.__module__.rpartition(".")[2]
            warnings.warn(f"the kernel {name} is not used: {trouble}", stacklevel=3)
        _results[key] = not trouble
    return _results[key]


def _near(got: Tensor, want: Tensor) -> bool:
    """All tokens are the same; the numbers of each row are within its rounding."""
    if not want.is_floating_point():
        return torch.equal(got, want)
    rounding = 1e-3 if got.dtype is torch.float32 else 1e-2
    error, size = ((v.float().view(len(v), -1).norm(dim=1)) for v in (got - want, want))
    return bool((error <= rounding * size + 1e-6 * size.max()).all())

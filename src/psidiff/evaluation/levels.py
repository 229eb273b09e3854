"""How alpha falls in time while a bound is integrated over it."""

from __future__ import annotations

from torch import Tensor

LEAST_LEVEL = 1e-9  # denoisers take -log alpha; the sampler asks no lower either


def falling(t: Tensor) -> tuple[Tensor, Tensor]:
    """alpha = 1 - t^3 and its slope: from 1 to 0, so that no term is missing at either end.

    The bound does not depend on how alpha falls, but its variance does: with 1 - t it would not
    be finite; 1 - t^3 did best on rows of text (docs/log.md), 1 - t^2 is about as good.
    """
    return 1 - t**3, -3 * t**2

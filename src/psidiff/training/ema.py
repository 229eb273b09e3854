"""An exponential moving average of a network's parameters."""

from __future__ import annotations

import torch
from torch import nn

from ..distributed import own


class EMA:
    """An exponential moving average of a network's parameters.

    shadow <- d shadow + (1 - d) parameter, d = min(decay, (1 + n)/(10 + n)) at update n.

    Args:
        network: its parameters are copied.
        decay: in [0, 1).

    Example:
        >>> from psidiff.training import EMA
        >>> network = torch.nn.Linear(2, 1)
        >>> ema = EMA(network)
        >>> ema.update(network)
        >>> bool((ema.shadow["weight"] == network.weight).all())
        True
    """

    def __init__(self, network: nn.Module, decay: float = 0.9999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {decay:g}")
        self.decay, self.updates = decay, 0
        self.shadow = {n: p.detach().clone() for n, p in network.named_parameters()}

    def rate(self) -> float:
        """The decay of the latest update: young averages forget faster."""
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        self.updates += 1
        parameters = dict(network.named_parameters())
        names = list(self.shadow)
        torch._foreach_lerp_(
            [own(self.shadow[n]) for n in names],
            [own(parameters[n]) for n in names],
            1 - self.rate(),
        )

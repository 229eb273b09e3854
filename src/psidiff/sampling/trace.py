"""A record of what happened to each token, for those who want to look."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..types import Tokens
from .plan import Step


@dataclass
class Trace:
    """Pass it as `on_step`: tokens and routes after every step, on the CPU."""

    steps: list[Step] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    routes: list[Tensor] = field(default_factory=list)

    def __call__(self, i: int, step: Step, z: Tokens, route: Tensor) -> None:
        self.steps.append(step)
        self.tokens.append(z.to("cpu", torch.int32))
        self.routes.append(route.to("cpu", torch.int8))

    def counts(self) -> Tensor:
        """How often each position was kept, predicted and renoised: (3, B, L)."""
        routes = torch.stack(self.routes)
        return torch.stack([(routes == r).sum(0) for r in range(3)])

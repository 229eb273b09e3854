"""What the engine works on: a sample of a request, whose turn it has, and what it is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ..request import Request
from .errors import ApiError
from .samples import Bias, Frame, Sampling


@dataclass(eq=False)
class Turn:
    """What all samples of a request share: its cost, and when it would be over."""

    cost: int
    finish: float
    quick: bool = False  # its steps are made without those of others
    samplings: dict[int, Sampling] = field(default_factory=dict)  # by the id of their request


@dataclass(frozen=True)
class Finished:
    """A sample is done: its tokens (L,), and how often the network saw it."""

    tokens: Tensor
    passes: int


Event = Frame | Finished | ApiError
Tell = Callable[[Event], None]


@dataclass(eq=False)
class Task:
    """Sample `index` of a request. `tell` is called in the engine's thread.

    drafts    it hears of every step; streams: of the first, and of those that may have made
              tokens final
    deadline  on time.monotonic's clock
    """

    request: Request
    index: int
    tell: Tell
    bias: Bias = ()
    drafts: bool = False
    streams: bool = False
    deadline: float = float("inf")
    cancelled: bool = False
    started: bool = field(default=False, init=False)  # its first step was or is being made
    begun: float = field(default_factory=time.monotonic)
    turn: Turn = field(default_factory=lambda: Turn(0, 0.0), init=False)
    cost: int = field(default=0, init=False)  # of a step

    def cancel(self) -> None:
        """Nobody wants it: it makes no step after the one that may be running now."""
        self.cancelled = True

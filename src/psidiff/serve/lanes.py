"""A sample in the making: one sequence, its plan, and how far along it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data.infill import FREE
from ..kernels.counter_rng import Purpose, Stream, draw_key
from ..process.posterior import PREDICTORS
from ..process.prior import Masked, Prior
from ..request import Request
from ..sampling import Guidance, Step
from ..types import working_dtype
from .shaping import Shaping

if TYPE_CHECKING:
    from ..model import Model

_TOGETHER = ("temperature", "top_k", "top_p", "min_p", "nucleus", "guidance", "predictor")


@dataclass(frozen=True)
class Frame:
    """A sample after a step: tokens and routes (L,); the first `settled` never change again."""

    number: int
    step: Step
    tokens: Tensor
    route: Tensor
    settled: int


def goes_together(model: Model, request: Request) -> bool:
    """Whether a request is of the kind that `batch.advance` knows: a Psi-sampler on x."""
    guidance, predictor = (request.options.get(n) for n in ("guidance", "predictor"))
    return (
        model.prior is not None
        and all(name in _TOGETHER for name in request.options)
        and (guidance is None or guidance.on == "x")
        and (predictor is None or predictor in PREDICTORS)
    )


def windows_of(request: Request) -> int:
    """How many windows have something to make: each of them walks the plan once."""
    given = request.rows(0, 1)
    free = torch.ones(request.length) > 0 if given is None else given[0] == FREE
    count = 0
    for start in request.starts:
        here = slice(start, start + request.window)
        count += bool(free[here].any())
        free[here] = False
    return count


class Lane:
    """Sample `index` of a request, window after window, as `generate` makes it."""

    def __init__(self, model: Model, request: Request, index: int, shaping: Shaping) -> None:
        assert model.prior is not None
        self.request, self.shaping = request, shaping
        self.prior: Prior = model.prior
        self.device = model.device
        self.index = request.first_index + index
        self.steps = request.steps
        self.predictor = PREDICTORS[request.options.get("predictor") or "markov"]
        self.guidance: Guidance | None = request.options.get("guidance")
        self.label = None if request.labels is None else int(request.labels[index])
        given = request.rows(0, request.num_samples)
        empty = torch.full((request.length,), FREE)
        self.whole = empty if given is None else given[index].clone()  # on the CPU
        self.passes, self.number, self.i = 0, -1, 0
        self._from = _last_change(self.prior, self.steps)
        self._windows = self._waiting()
        self._keys = torch.Generator().manual_seed(request.seed)
        self._drawn = 0
        self.done = not self._open()

    @property
    def step(self) -> Step:
        """The next one."""
        return self.steps[self.i]

    @property
    def settles(self) -> bool:
        """Whether the last step may have made tokens final."""
        return self.i == 0 or self.i >= self._from

    def take(self, z: Tensor, route: Tensor, confidence: Tensor, passes: int) -> None:
        """A step was made; after the last one of a window the next window opens."""
        self._last, self._shown = self.step, (self.here, z, route)
        self.z, self.confidence = z, confidence
        self.passes, self.i, self.number = self.passes + passes, self.i + 1, self.number + 1
        if self.i == len(self.steps):
            self.whole[self.here] = z.cpu()
            self.done = not self._open()

    def frame(self) -> Frame:
        """The sample after the last step."""
        here, z, route = self._shown
        tokens = self.whole.to(torch.int32, copy=True)  # many may wait for a slow client
        routes = torch.zeros(len(tokens), dtype=torch.int8)
        tokens[here], routes[here] = z.cpu(), route.cpu()
        return Frame(self.number, self._last, tokens, routes, self._settled(tokens))

    def _waiting(self) -> Iterator[tuple[int, slice]]:
        """Number and place of each window in which something is free."""
        for number, start in enumerate(self.request.starts):
            here = slice(start, start + self.request.window)
            if bool((self.whole[here] == FREE).any()):
                yield number, here

    def _open(self) -> bool:
        """Start the next window; window w takes the seed's key number w."""
        number, here = next(self._windows, (None, slice(0)))
        if number is None:
            return False
        for _ in range(self._drawn, number + 1):
            self.key = draw_key(self._keys)
        self._drawn = number + 1
        given = self.whole[here].to(self.device)
        stream = Stream(self.key, (1, len(given)), self.index, self.device)
        noise = self.prior.from_bits(stream.bits(0, Purpose.START))[0]
        self.here, self.i, self.free = here, 0, given == FREE
        self.z = torch.where(self.free, noise, given)
        self.conditioned = not bool(self.free.all())
        dtype = working_dtype(self.device)
        self.confidence = torch.full_like(self.z, torch.inf, dtype=dtype)
        return True

    def _settled(self, tokens: Tensor) -> int:
        """How many of the first tokens are final: given, made by a window before, unmasked."""
        fixed = self.whole != FREE
        if self.i >= self._from:
            made = tokens[self.here]
            fixed[self.here] |= (made != FREE) & (made != self.prior.mask_id)
        return int(fixed.long().cumprod(0).sum())


def _last_change(prior: Prior, steps: tuple[Step, ...]) -> int:
    """The step from which on a token that is no mask stays; never, but for masks."""
    if not isinstance(prior, Masked):
        return len(steps) + 1
    renoising = [i for i, step in enumerate(steps) if callable(step.kappa) or step.kappa != 1]
    return renoising[-1] + 1 if renoising else 0

"""A Trace of samplers that are not ours, from what they tell while they run.

model.generate(..., streamer=recorder)        transformers: put, put_draft, end
pipe(..., callback_on_step_end=recorder)      diffusers
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..sampling.plan import Step, causal_plan
from ..sampling.step import KEPT, PREDICTED
from ..sampling.trace import Trace
from ..types import FREE, as_count


class Recorder:
    """Frames as they come; `trace` is all of them, for `Trace.save` and `psidiff replay`.

    num_steps   how many steps a canvas may take: the times of drafts fall from 1 in equal
                parts. A pipeline's scheduler knows better
    about       as Trace takes it: model, sampler, codec

    PsiScheduler says what was kept, predicted or renoised; for others a token that changed
    counts as predicted. A callback sees a canvas before the pipeline commits it.
    """

    def __init__(self, num_steps: int = 48, about: dict[str, Any] | None = None) -> None:
        self.num_steps, self.about = as_count("num_steps", num_steps), about or {}
        self.ended = False
        self._frames: list[tuple[int, Step, Tensor, Tensor]] = []  # start, step, z, route
        self._done: list[Tensor] = []  # the prompt, and canvases that were committed
        self._prompt = 0
        self._now: Tensor | None = None  # the canvas in the making
        self._count = 0  # its frames

    def put(self, value: Tensor) -> None:
        """The prompt, then every canvas that is done."""
        value = _rows(value)
        if self._now is None and not self._done:
            self._prompt = value.shape[1]
        else:  # it may not end as its last draft
            self._add(Step(0.0, 1.0, 1.0), value)
        self._commit(value)

    def put_draft(self, value: Tensor) -> None:
        """The canvas so far."""
        self._add(self._equal_part(), _rows(value))

    def end(self) -> None:
        self.ended = True

    def __call__(
        self, pipe: Any, number: int, index: int, tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """After step `index` of a canvas, or of a block at the end of the sequence."""
        self.num_steps = getattr(pipe.scheduler, "num_inference_steps", self.num_steps)
        if index == 0 and self._now is not None:
            self._commit(self._now if "canvas" in tensors else self._now[:, :0])
        tokens = _rows(tensors["canvas"] if "canvas" in tensors else tensors["block_x"])
        taken = getattr(pipe.scheduler, "taken", None) or self._equal_part()
        route = getattr(pipe.scheduler, "route", None)
        if route is not None:
            route = F.pad(route.cpu(), (tokens.shape[1] - route.shape[1], 0))
        self._add(taken, tokens, route)
        return {}

    @property
    def trace(self) -> Trace:
        """All frames at their places in the whole, -1 where nothing is yet."""
        if not self._frames:
            raise ValueError("nothing was recorded yet: pass this as streamer or callback")
        width = max(start + z.shape[1] for start, _, z, _ in self._frames)
        done = torch.cat([self._frames[0][2][:, :0], *self._done], 1)
        given = (torch.arange(width) < self._prompt).int().tolist()
        trace = Trace({**self.about, "given": [given] * len(done)})
        for i, (start, step, z, route) in enumerate(self._frames):
            tokens = torch.cat((done[:, :start], z), 1)
            rest = width - tokens.shape[1]
            trace(i, step, F.pad(tokens, (0, rest), value=FREE), F.pad(route, (start, rest)))
        return trace

    def _add(self, step: Step, z: Tensor, route: Tensor | None = None) -> None:
        if route is None:
            before = torch.full_like(z, FREE) if self._now is None else self._now
            route = torch.full_like(z, PREDICTED, dtype=torch.int8)
            if before.shape == z.shape:
                route[z == before] = KEPT
        start = sum(each.shape[1] for each in self._done)
        self._frames.append((start, step, z, route))
        self._now, self._count = z, self._count + 1

    def _commit(self, canvas: Tensor) -> None:
        self._done.append(canvas)
        self._now, self._count = None, 0

    def _equal_part(self) -> Step:
        return causal_plan(self.num_steps)[min(self._count, self.num_steps - 1)]


def _rows(value: Tensor) -> Tensor:
    """(B, L) on the CPU, a copy."""
    return torch.atleast_2d(value.detach()).to("cpu", torch.int64, copy=True)

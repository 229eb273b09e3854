"""Correction at a fixed level: redraw a few tokens from what all the others say of them.

p_s(z^l | z without l) = alpha_s x_theta + (1 - alpha_s) pi for a leave-one-out denoiser. One
token at a time, chosen without looking at it, leaves p_s as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, absorb, uniform
from ..types import Tokens, as_count
from .kappa import Memory
from .network import weights_of
from .plan import Step
from .step import Outcome, Run


@dataclass(frozen=True)
class Corrector:
    """After every step but the last, `sweeps` passes that redraw about `size` tokens each.

    select="random" takes `size` free positions at random. "uncertain" takes each with chance
    size/n times (1 - max x_theta) K/(K-1), which depends on the other tokens only.
    """

    sweeps: int = 1
    size: int = 1
    select: str = "random"

    def __post_init__(self) -> None:
        as_count("sweeps", self.sweeps)
        as_count("size", self.size)
        if self.select not in ("random", "uncertain"):
            raise ValueError(f"select must be 'random' or 'uncertain', got {self.select!r}")

    def __call__(
        self, run: Run, i: int, step: Step, z: Tokens, memory: Memory, route: Tensor
    ) -> tuple[Tokens, Tensor, Memory]:
        """The sweeps after step i, at its level alpha_s."""
        for sweep in range(self.sweeps):
            out = Outcome(run, -1 - i * self.sweeps - sweep, z, memory)
            out.route = route.clone()
            self._sweep(run, out, step, z)
            z, route, memory = out.done()
        return z, route, memory

    def _sweep(self, run: Run, out: Outcome, step: Step, z: Tokens) -> None:
        ticket = uniform(absorb(out.state, int(Purpose.SELECT)), run.dtype)
        share = self.size / run.free.sum(-1, keepdim=True).clamp(min=self.size)
        if self.select == "random":
            order = ticket.masked_fill(~run.free, 2).argsort(-1)
            first = torch.arange(z.shape[1], device=z.device).expand_as(z) < self.size
            chosen = torch.zeros_like(run.free).scatter(-1, order, first) & run.free
        else:
            chosen = run.free & (ticket < share)  # the most that any certainty allows
        clean = chosen & (out.coin() < step.alpha_s)
        renoised = chosen & ~clean
        vocab_size = run.prior.vocab_size
        needed = clean if self.select == "random" else chosen
        for at, (logits,) in run.network.rows(z, step.t, step.alpha_s, needed):
            weights, total = weights_of(logits)
            if self.select == "uncertain":
                doubt = (1 - 1 / total[:, 0]) * vocab_size / (vocab_size - 1)  # max weight is 1
                accepted = ticket[at] < share[at[0], 0] * doubt
                renoised[at] &= accepted
                drawn = accepted & clean[at]
            else:
                drawn = torch.ones_like(at[0], dtype=torch.bool)
            out.predict((at[0][drawn], at[1][drawn]), weights[drawn], total[drawn])
        out.renoise(renoised)

"""The confident decoder: redraw everything, keep what x_theta is sure of, renoise the rest.

For masks it is the usual most-confident-first decoder; for other priors its self-correcting
twin. It looks at values, so it does not keep the marginals of the forward process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.counter import Purpose, absorb, exponential
from ..types import Tokens
from .kappa import Memory
from .network import weights_of
from .plan import Step
from .step import Outcome, Run


@dataclass(frozen=True)
class Confident:
    """gumbel: how many times t of Gumbel noise join the score; argmax: do not sample x_hat."""

    gumbel: float = 0.0
    argmax: bool = False

    def __post_init__(self) -> None:
        if not self.gumbel >= 0:
            raise ValueError(f"gumbel must be >= 0, got {self.gumbel:g}")

    def __call__(
        self, run: Run, i: int, step: Step, z: Tokens, memory: Memory
    ) -> tuple[Tokens, torch.Tensor, Memory]:
        """x_hat ~ x_theta everywhere; the share alpha_s of it with the best scores stays."""
        out = Outcome(run, i, z, memory)
        drawn = run.free & (run.pi[z] > 0)  # elsewhere x_theta is z, beyond doubt
        score = torch.zeros(z.shape, dtype=run.dtype, device=z.device)
        for at, (logits,) in run.network.rows(z, step.t, step.alpha_t, drawn):
            weights, total = weights_of(logits)
            out.predict(at, weights, total, greedy=self.argmax or step.greedy)
            score[at] = out.confidence[at].to(score).log()
        if self.gumbel:
            race = exponential(absorb(out.state, int(Purpose.SELECT)), run.dtype)
            score = score - drawn * self.gumbel * step.t * race.log()
        rank = score.masked_fill(~run.free, -torch.inf).argsort(
            dim=-1, descending=True, stable=True
        )
        keep = (step.alpha_s * run.free.sum(-1, keepdim=True) + 0.5).floor()
        best = torch.zeros_like(run.free).scatter(
            -1, rank, torch.arange(z.shape[1], device=z.device) < keep
        )
        out.renoise(run.free & ~best)
        return out.done()

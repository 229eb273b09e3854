"""Which tokens a leave-one-out sweep redraws, as DiscreteDDIMScheduler chooses them: by a score
that may look at the token itself. Such a choice does not leave the marginals as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, exponential, fold_in
from ..sampling.step import LogitSource, OutputBuilder, StepOutput
from ..sampling.step_batch import StepBatch
from ..types import as_count, as_number, check_choice

SELECTIONS = ("lowest_log_margin", "lowest_maxprob", "lowest_current_prob")


@dataclass(frozen=True)
class ScoredCorrector:
    """Redraw the `size` least sure tokens of each sequence at the level of the last step.

    select  by p = alpha_s x_theta + (1 - alpha_s) pi at a position: lowest_log_margin, p of the
            token there over the most probable other one; lowest_maxprob, the largest p;
            lowest_current_prob, p of the token there
    tau     temperature of the Gumbel noise of the ranks; lower is greedier
    """

    size: int = 1
    select: str = "lowest_log_margin"
    tau: float = 1.0

    def __post_init__(self) -> None:
        as_count("corrector_k", self.size)
        check_choice("corrector_selection", self.select, SELECTIONS)
        if not as_number("corrector_selection_tau", self.tau) > 0:
            raise ValueError(f"corrector_selection_tau must be above 0, got {self.tau:g}")

    def __call__(self, batch: StepBatch, source: LogitSource) -> StepOutput:
        """One sweep."""
        out, free = OutputBuilder(batch), batch.free
        doubt = torch.full_like(free, -torch.inf, dtype=batch.pi.dtype)
        for (rows,) in source.rows(out, free):
            z = batch.z.view(-1)[rows.at]
            doubt.view(-1)[rows.at] = self._doubt(batch, rows.x.to(batch.pi), z)
        noise = exponential(fold_in(batch.rng_state, int(Purpose.SELECT)), doubt.dtype)
        rank = (doubt / self.tau - noise.log()).topk(min(self.size, free.shape[1])).indices
        chosen = torch.zeros_like(free).scatter(-1, rank, True) & free
        clean = chosen & (batch.uniform() < batch.numbers.alpha_s)
        for (rows,) in source.rows(out, clean):
            out.predict(rows)
        out.renoise(chosen & ~clean)
        return out.done()

    def _doubt(self, batch: StepBatch, x: Tensor, z: Tensor) -> Tensor:
        """Of rows (n, K) with tokens z (n,), the more the less sure."""
        alpha = batch.numbers.alpha_s
        log_p = (alpha * x + (1 - alpha) * batch.pi).log()
        here = log_p.gather(-1, z[:, None])[:, 0]
        if self.select == "lowest_current_prob":
            return -here
        (first, second), best = log_p.topk(2).values.unbind(-1), log_p.argmax(-1)
        if self.select == "lowest_maxprob":
            return -first
        return torch.where(best == z, second, first) - here

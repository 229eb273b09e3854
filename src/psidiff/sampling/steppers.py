"""Other steps with the signature of `psi_step`: guided on posteriors, x_0 first, left to right.

Equal steppers move sequences of different requests together. Confident decoders and correctors
are steppers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, blocked_race, fold_in
from ..process.posterior import Mixture, markov, noise_probability
from .guidance import guided_posterior
from .logit_sources import CausalLogits
from .step import (
    PREDICTED,
    DrawnRows,
    LogitSource,
    OutputBuilder,
    StepOutput,
    WeightRows,
    psi_step,
)
from .step_batch import StepBatch

Stepper = Callable[[StepBatch, Any], StepOutput]  # the second: its source of logits


@dataclass(frozen=True)
class GuidedPosterior:
    """Psi with guidance on posteriors: every product of two q is normalised by itself (Eq. 10).

    With probability (1-kappa)(1-alpha_s) the unguided pi, with kappa the product of the two
    q_{s|t}, else that of the two q_{0|t}. Not a small mixture, so each row is a full draw, and
    what a product changes counts as predicted.
    """

    weight: float

    def __call__(self, batch: StepBatch, source: LogitSource) -> StepOutput:
        out, u, numbers = OutputBuilder(batch), batch.uniform(), batch.numbers
        noise = (1 - numbers.kappa) * (1 - numbers.alpha_s)
        renoised = batch.free & (u < noise)
        needed = batch.free & ~renoised & (batch.pi_z > 0) & (numbers.noise > 0)
        through = u < noise + numbers.kappa  # by q_{s|t}, else by q_{0|t}
        for pair in source.rows(out, needed, pair=True):
            at = pair[0].at
            z, xs = batch.z.view(-1)[at], [rows.x.to(batch.pi) for rows in pair]
            mixtures = [self._mixture(batch, at, x, through.view(-1)[at]) for x in xs]
            probs = guided_posterior(mixtures, xs, batch.pi, z, self.weight)
            before = None if out.confidence is None else out.confidence.view(-1)[at]
            tokens = out.predict(WeightRows(at, probs, probs.sum(-1, keepdim=True)))
            changed = tokens != z
            out.route.view(-1)[at] = changed.to(torch.int8) * PREDICTED
            if before is not None:
                sure = xs[0].gather(-1, tokens[:, None])[:, 0]  # of x_theta, not of the product
                out.remember(at, torch.where(changed, sure, before))
        out.renoise(renoised)
        return out.done()

    def _mixture(self, batch: StepBatch, at: Tensor, x: Tensor, through: Tensor) -> Mixture:
        alpha_s, alpha_t = (
            batch.at(each, at) for each in (batch.numbers.alpha_s, batch.numbers.alpha_t)
        )
        x_z = x.gather(-1, batch.z.view(-1)[at][:, None])[:, 0]
        p_noise = noise_probability(batch.pi_z.view(-1)[at], x_z, alpha_t)
        forth = markov(p_noise, alpha_s, alpha_t)
        keep = torch.where(through, forth.keep, 1 - p_noise)
        predict = torch.where(through, forth.predict, p_noise)
        return Mixture(keep, predict, torch.where(through, forth.renoise, 0))


def sample_x0_first(batch: StepBatch, source: LogitSource) -> StepOutput:
    """x_hat ~ x_theta, then z_s ~ Psi_{s|t}(. | z_t, x_hat), where x_theta is p(x_l | z).

    The mean over x_hat of the posterior, where `psi_step` takes the posterior at the mean. With
    x_theta converted to leave-one-out there, the two are the same law.
    """
    return psi_step(batch, _DrawnFirst(source))


@dataclass(frozen=True)
class _DrawnFirst:
    """Rows of another source, each with a token drawn from it: x is sure of that one."""

    source: LogitSource
    dense = False

    @property
    def builder(self) -> type[OutputBuilder]:
        return self.source.builder

    def rows(
        self, out: OutputBuilder, needed: Tensor, pair: bool = False
    ) -> Iterator[tuple[DrawnRows]]:
        for (rows,) in self.source.rows(out, needed):
            greedy = out.batch.at(out.batch.numbers.greedy, rows.at) > 0
            drawn = rows.draw(out.batch, greedy)
            same = (drawn == out.batch.z.view(-1)[rows.at]).to(out.batch.pi)
            sure = rows.probability_of(drawn)
            yield (DrawnRows(rows.at, same, drawn, sure, rows.place),)


def causal_step(batch: StepBatch, source: CausalLogits) -> StepOutput:
    """The next token of each sequence from those before it; z is FREE where none is yet."""
    out, position = OutputBuilder(batch), batch.segments[0].index
    free = batch.free[:, position]
    if bool(free.any()):
        bits = fold_in(batch.rng_state[:, position], int(Purpose.DRAW))
        tokens = blocked_race(source.next_probs(out, position), bits)
        out.z[:, position] = torch.where(free, tokens, batch.z[:, position])
        out.route[:, position] = free.to(torch.int8) * PREDICTED
    return out.done()

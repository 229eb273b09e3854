"""Other steps with the signature of `psi_step`: guided on posteriors, x_0 first, left to right.

Equal steppers move sequences of different requests together. Confident decoders and correctors
are steppers, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, absorb, block_race
from ..process.posterior import Mixture, markov, noise_probability
from .guidance import guided_posterior
from .logit_sources import CausalLogits
from .routes import PREDICTED
from .step import LogitSource, OutputBuilder, StepOutput, unnormalized_probs
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
        for at, logits in source.rows(out, needed, pair=True):
            z, xs, mixtures = batch.z.view(-1)[at], [], []
            for each in logits:
                weights, total = unnormalized_probs(each)
                xs.append((weights / total).to(batch.pi))
                mixtures.append(self._mixture(batch, at, xs[-1], through.view(-1)[at]))
            probs = guided_posterior(mixtures, xs, batch.pi, z, self.weight)
            before = None if out.confidence is None else out.confidence.view(-1)[at]
            tokens = out.predict(at, probs, probs.sum(-1, keepdim=True))
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
    drawn, out, u = OutputBuilder(batch), OutputBuilder(batch), batch.uniform()
    can_be_noise = batch.free & (batch.pi_z > 0) & (batch.numbers.noise > 0)
    for at, (logits,) in source.rows(drawn, can_be_noise):
        drawn.predict(at, *unnormalized_probs(logits))
    x_hat, numbers = drawn.z, batch.numbers
    p = noise_probability(batch.pi_z, (x_hat == batch.z).to(u), numbers.alpha_t)
    p = torch.where(can_be_noise, p, 0)
    predict, renoise = (
        numbers.predict_slope * p,
        numbers.renoise_slope * p + numbers.renoise_offset,
    )
    chosen = can_be_noise & (u < predict)
    out.z = torch.where(chosen, x_hat, batch.z)
    out.route = chosen.to(torch.int8) * PREDICTED
    if out.confidence is not None and drawn.confidence is not None:
        out.confidence = torch.where(chosen, drawn.confidence, out.confidence)
    out.renoise(batch.free & ~chosen & (u < predict + renoise))
    out.passes, out.head_rows = drawn.passes, drawn.head_rows
    return out.done()


def causal_step(batch: StepBatch, source: CausalLogits) -> StepOutput:
    """The next token of each sequence from those before it; z is FREE where none is yet."""
    out, position = OutputBuilder(batch), batch.segments[0].index
    free = batch.free[:, position]
    if bool(free.any()):
        bits = absorb(batch.rng_state[:, position], int(Purpose.DRAW))
        tokens = block_race(source.next_probs(out, position), bits)
        out.z[:, position] = torch.where(free, tokens, batch.z[:, position])
        out.route[:, position] = free.to(torch.int8) * PREDICTED
    return out.done()

"""One step of a Psi-sampler: one uniform number per token, the network only where it decides.

The order is predict (u < W_x), renoise (u < W_x + W_pi), keep. 1 - W_keep grows with the
probability that z_t is noise, which is at most 1, so a token whose u exceeds the value there is
kept whatever the network says: its row of the output layer is never evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, block_race
from ..types import Tokens
from .routes import KEPT, PREDICTED, RENOISED, bound_routes, choose_routes
from .step_batch import StepBatch

LogitRows = tuple[Tensor, tuple[Tensor, ...]]  # flat positions (n,), and logits (n, K) of them


@dataclass(frozen=True)
class StepOutput:
    """z_s, routes and confidence (B, L) after a step, and what it cost.

    passes: forward passes of each sequence; head_rows: rows of the output layer in all.
    """

    z: Tokens
    route: Tensor
    confidence: Tensor | None
    passes: list[int]
    head_rows: int

    def then(self, after: StepOutput) -> StepOutput:
        """This and what was done after it, as one."""
        return StepOutput(
            after.z,
            torch.where(after.route != KEPT, after.route, self.route),
            after.confidence,
            [a + b for a, b in zip(self.passes, after.passes, strict=True)],
            self.head_rows + after.head_rows,
        )

    def split(self, batch: StepBatch) -> list[StepOutput]:
        """The share of each segment; head rows are counted with the first."""
        if len(batch.segments) == 1:
            return [self]
        counts, width = [segment.count for segment in batch.segments], self.z.shape[1]
        z, route = self.z.split(counts), self.route.split(counts)
        confidence: list[Any] = [None] * len(counts)
        if self.confidence is not None:
            confidence = list(self.confidence.split(counts))
        shares, start, head_rows = [], 0, self.head_rows
        for segment, *tensors in zip(batch.segments, z, route, confidence, strict=True):
            length, stop = segment.length, start + segment.count
            if length < width:
                tensors = [t if t is None else t[:, :length].contiguous() for t in tensors]
            z_s, routes, known = tensors
            shares.append(StepOutput(z_s, routes, known, self.passes[start:stop], head_rows))
            start, head_rows = stop, 0
        return shares


class OutputBuilder:
    """z_s in the making: all tokens are kept until something else is said of them."""

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch
        self.z = batch.z.clone()
        self.route = torch.zeros_like(batch.z, dtype=torch.int8)
        self.confidence = None if batch.confidence is None else batch.confidence.clone()
        self.passes, self.head_rows = [0] * len(batch.z), 0

    def predict(
        self, at: Tensor, weights: Tensor, total: Tensor, greedy: bool | Tensor = False
    ) -> Tensor:
        """Draw tokens at flat positions (n,) from rows of x_theta = weights / total."""
        if greedy is True:
            tokens = weights.argmax(-1)
        else:
            tokens = block_race(weights, self.batch.bits(at, Purpose.DRAW))
            if isinstance(greedy, Tensor) and bool(greedy.any()):
                tokens = torch.where(greedy, weights.argmax(-1), tokens)
        self.z.view(-1)[at] = tokens
        self.route.view(-1)[at] = PREDICTED
        if self.confidence is not None:
            self.remember(at, (weights.gather(-1, tokens[:, None]) / total)[:, 0])
        return tokens

    def remember(self, at: Tensor, confidence: Tensor) -> None:
        """How sure x_theta was at flat positions (n,)."""
        if self.confidence is not None:
            self.confidence.view(-1)[at] = confidence.to(self.confidence)

    def renoise(self, where: Tensor) -> None:
        """Draw the tokens at True (B, L) from the prior."""
        at = where.flatten().nonzero()[:, 0]
        if len(at) and self.batch.prior is not None:
            bits = self.batch.bits(at, Purpose.NOISE)
            self.z.view(-1)[at] = self.batch.prior.from_bits(bits)
            self.route.view(-1)[at] = RENOISED

    def done(self) -> StepOutput:
        """Nothing is remembered of a mask."""
        confidence, batch = self.confidence, self.batch
        if (
            confidence is not None
            and batch.prior is not None
            and batch.prior.mask_id is not None
        ):
            confidence = confidence.masked_fill(self.z == batch.prior.mask_id, torch.inf)
        return StepOutput(self.z, self.route, confidence, self.passes, self.head_rows)


@runtime_checkable
class LogitSource(Protocol):
    """Rows of logits for the positions of a batch that need them.

    dense: psi steps evaluate every position that can be noise, for the same tokens.
    """

    dense: bool

    def rows(
        self, out: OutputBuilder, needed: Tensor, pair: bool = False
    ) -> Iterator[LogitRows]:
        """Processed logits of `out.batch` at the needed (B, L) positions, chunk by chunk.

        One tensor (n, K), guided on x if at all; with `pair` the conditional and the
        unconditional one. Passes and rows are counted in `out`.
        """
        ...


def psi_step(batch: StepBatch, source: LogitSource) -> StepOutput:
    """z_s ~ Psi_{s|t}(. | z_t) of each sequence (Eq. 12), or the most probable token."""
    out, numbers, u = OutputBuilder(batch), batch.numbers, batch.uniform()
    can_be_noise = (batch.pi_z > 0) & (numbers.noise > 0)
    p = can_be_noise.to(u)  # the largest it can be
    limit, renoised, needed = bound_routes(
        u,
        batch.free,
        batch.masked,
        can_be_noise,
        numbers.predict_slope * p,
        numbers.renoise_slope * p + numbers.renoise_offset,
    )
    if source.dense:
        needed = batch.free & can_be_noise
    for at, (logits,) in source.rows(out, needed):
        weights, total = unnormalized_probs(logits)
        p = noise_probability_at(batch, at, weights, total)
        slope, again, offset, greedy = (batch.at(number, at) for number in numbers[5:])
        chosen, renoised.view(-1)[at] = choose_routes(
            u.view(-1)[at], slope * p, again * p + offset, limit.flatten()[at]
        )
        if isinstance(greedy, Tensor):
            greedy = greedy > 0
            chosen = chosen | greedy
        elif greedy:
            chosen = torch.ones_like(chosen)
        hit = chosen.nonzero()[:, 0]  # once: it synchronises with the GPU
        greedy = greedy[hit] if isinstance(greedy, Tensor) else bool(greedy)
        out.predict(at[hit], weights[hit], total[hit], greedy)
    out.renoise(renoised)
    return out.done()


def noise_probability_at(
    batch: StepBatch, at: Tensor, weights: Tensor, total: Tensor
) -> Tensor:
    """P(z_t is noise) at flat positions (n,), where it can be."""
    z = batch.z.view(-1)[at]
    x_z = (weights.gather(-1, z[:, None]) / total)[:, 0].to(batch.pi)
    noise = batch.at(batch.numbers.noise, at) * batch.pi_z.view(-1)[at]
    return noise / (batch.at(batch.numbers.alpha_t, at) * x_z + noise)


def unnormalized_probs(logits: Tensor) -> tuple[Tensor, Tensor]:
    """exp(l - max) (n, K), and its sum (n, 1): x_theta without dividing."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True)
    if not bool(total.isfinite().all()):
        raise ValueError("the denoiser returned NaN, or a row in which no token is possible")
    return weights, total

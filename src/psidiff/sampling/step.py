"""One step of a Psi-sampler: one uniform number per token, the network only where it decides.

u < W_predict: predicted; u < W_predict + W_renoise: renoised; else kept. Both weights grow with
p, the probability that z_t is noise, which is at most 1. So a token whose u exceeds their sum
there is kept whatever the network says: its row of the output layer is never evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, blocked_race
from ..types import Tokens
from .step_batch import StepBatch, is_mask

KEPT, PREDICTED, RENOISED = 0, 1, 2
NO_NUMBER = "the denoiser returned NaN, or a row in which no token is possible"


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
        shares, start, head_rows = list[StepOutput](), 0, self.head_rows
        for segment in batch.segments:
            part = slice(start, start + segment.count)
            z, route, confidence = (
                None if each is None else each[part, : segment.length].contiguous()
                for each in (self.z, self.route, self.confidence)
            )
            assert z is not None and route is not None
            shares.append(StepOutput(z, route, confidence, self.passes[part], head_rows))
            start, head_rows = part.stop, 0
        return shares


@dataclass(frozen=True)
class WeightRows:
    """Rows of x_theta = weights (n, K) / total (n, 1) at flat positions `at` (n,)."""

    at: Tensor
    weights: Tensor
    total: Tensor

    @classmethod
    def of_logits(cls, at: Tensor, logits: Tensor) -> WeightRows:
        """exp(l - max), and its sum: x_theta without dividing."""
        weights = (logits - logits.amax(-1, keepdim=True)).exp_()
        total = weights.sum(-1, keepdim=True)
        if not bool(total.isfinite().all()):
            raise ValueError(NO_NUMBER)
        return cls(at, weights, total)

    @property
    def x(self) -> Tensor:
        """x_theta, (n, K)."""
        return self.weights / self.total

    @property
    def place(self) -> Tensor:
        """Where to write: all rows are in use."""
        return self.at

    def probability_of_z(self, batch: StepBatch) -> Tensor:
        """x_theta at the present token of each row, (n,)."""
        return self.probability_of(batch.z.view(-1)[self.at])

    def select(self, hit: Tensor) -> WeightRows:
        """Some of the rows."""
        return WeightRows(self.at[hit], self.weights[hit], self.total[hit])

    def draw(self, batch: StepBatch, greedy: bool | Tensor = False) -> Tensor:
        """A token of each row, (n,); greedy, for all or (n,): the most probable one."""
        if greedy is True:
            return self.weights.argmax(-1)
        tokens = blocked_race(self.weights, batch.bits(self.at, Purpose.DRAW))
        if isinstance(greedy, Tensor) and bool(greedy.any()):
            tokens = torch.where(greedy, self.weights.argmax(-1), tokens)
        return tokens

    def probability_of(self, tokens: Tensor) -> Tensor:
        """x_theta at a token of each row, (n,)."""
        return (self.weights.gather(-1, tokens[:, None]) / self.total)[:, 0]


@dataclass(frozen=True)
class DrawnRows:
    """Rows of x_theta, of each of which a token was drawn at once; all are (n,).

    x_z          x_theta at the present token
    probability  x_theta at the drawn one
    place        where to write: `at`, or behind the end if a row is not in use
    """

    at: Tensor
    x_z: Tensor
    tokens: Tensor
    probability: Tensor
    place: Tensor

    def probability_of_z(self, batch: StepBatch) -> Tensor:
        """x_theta at the present token of each row."""
        return self.x_z

    def select(self, hit: Tensor) -> DrawnRows:
        """Some of the rows."""
        each = (self.at, self.x_z, self.tokens, self.probability, self.place)
        return DrawnRows(*(values[hit] for values in each))

    def draw(self, batch: StepBatch, greedy: bool | Tensor = False) -> Tensor:
        """What was drawn."""
        return self.tokens

    def probability_of(self, tokens: Tensor) -> Tensor:
        """Of what was drawn."""
        return self.probability


Rows = WeightRows | DrawnRows


class OutputBuilder:
    """z_s in the making: all tokens are kept until something else is said of them."""

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch
        self.z: Tensor = batch.z.clone()
        self.route: Tensor = torch.zeros_like(batch.z, dtype=torch.int8)
        self.confidence: Tensor | None = (
            None if batch.confidence is None else batch.confidence.clone()
        )
        self.passes: list[int] = [0] * len(batch.z)
        self.head_rows: int = 0

    def predict(self, rows: Rows, greedy: bool | Tensor = False) -> Tensor:
        """Draw a token from each row."""
        tokens = rows.draw(self.batch, greedy)
        self.z.view(-1)[rows.at] = tokens
        self.route.view(-1)[rows.at] = PREDICTED
        if self.confidence is not None:
            self.remember(rows.at, rows.probability_of(tokens))
        return tokens

    def remember(self, at: Tensor, confidence: Tensor) -> None:
        """How sure x_theta was at flat positions (n,)."""
        if self.confidence is not None:
            self.confidence.view(-1)[at] = confidence.to(self.confidence)

    def choose(
        self,
        rows: Rows,
        predicted: Tensor,
        renoised: Tensor,
        changed: Tensor,
        greedy: bool | Tensor,
    ) -> Tensor:
        """Draw where predicted (n,). Returns renoised (B, L) with what `changed` (n,) says."""
        renoised.view(-1)[rows.at] = changed
        hit = predicted.nonzero()[:, 0]  # once: it synchronises with the GPU
        self.predict(rows.select(hit), greedy[hit] if isinstance(greedy, Tensor) else greedy)
        return renoised

    def renoise(self, where: Tensor) -> None:
        """Draw the tokens at True (B, L) from the prior."""
        at = where.flatten().nonzero()[:, 0]
        if len(at) and self.batch.prior is not None:
            bits = self.batch.bits(at, Purpose.NOISE)
            self.z.view(-1)[at] = self.batch.prior.from_bits(bits)
            self.route.view(-1)[at] = RENOISED

    def done(self) -> StepOutput:
        """Nothing is remembered of a mask."""
        confidence = self.confidence
        if confidence is not None:
            confidence = confidence.masked_fill(is_mask(self.batch.prior, self.z), torch.inf)
        return StepOutput(self.z, self.route, confidence, self.passes, self.head_rows)


@runtime_checkable
class LogitSource(Protocol):
    """Rows of x_theta for the positions of a batch that need them.

    dense: psi steps evaluate every position that can be noise, for the same tokens.
    builder: what psi steps write into.
    """

    dense: bool

    @property
    def builder(self) -> type[OutputBuilder]: ...

    def rows(
        self, out: OutputBuilder, needed: Tensor, pair: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        """Rows at the needed (B, L) positions of `out.batch`, chunk by chunk.

        One `Rows`, guided on x if at all; with `pair` the conditional and the unconditional
        one. Passes and rows are counted in `out`.
        """
        ...


def psi_step(batch: StepBatch, source: LogitSource) -> StepOutput:
    """z_s ~ Psi_{s|t}(. | z_t) of each sequence (Eq. 12), or the most probable token."""
    out, numbers, u = source.builder(batch), batch.numbers, batch.uniform()
    can_be_noise = (batch.pi_z > 0) & (numbers.noise > 0)
    p = can_be_noise.to(u)  # the largest it can be: exact for masks, and where it is 0
    predict = numbers.predict_slope * p
    limit = predict + (numbers.renoise_slope * p + numbers.renoise_offset)
    certain = is_mask(batch.prior, batch.z) | ~can_be_noise
    renoised = batch.free & certain & (u >= predict) & (u < limit)
    needed = batch.free & can_be_noise
    if not source.dense:
        needed = needed & (u < torch.where(certain, predict, limit))
    for (rows,) in source.rows(out, needed):
        at = rows.at
        p = noise_probability_at(batch, at, rows.probability_of_z(batch))
        slope, again, offset, greedy = (batch.at(number, at) for number in numbers[5:])
        predict, coin, greedy = slope * p, u.flatten()[at], greedy > 0
        both = torch.minimum(predict + (again * p + offset), limit.flatten()[at])
        predicted = (coin < predict) | greedy
        renoised = out.choose(rows, predicted, renoised, ~predicted & (coin < both), greedy)
    out.renoise(renoised)
    return out.done()


def noise_probability_at(batch: StepBatch, at: Tensor, x_z: Tensor) -> Tensor:
    """P(z_t is noise) at flat positions (n,) where it can be, from x_theta at z_t."""
    noise = batch.at(batch.numbers.noise, at) * batch.pi_z.view(-1)[at]
    return noise / (batch.at(batch.numbers.alpha_t, at) * x_z.to(batch.pi) + noise)

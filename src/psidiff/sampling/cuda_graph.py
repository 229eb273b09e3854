"""Psi steps of fixed shapes, which a GPU can replay: no step waits for the host.

`step.psi_step` over rows of another kind. There are not as many rows of the head as the coins
ask for, but a capacity that they exceed with a chance below 1e-14. Should they, the steps are
made again with a `LazyLogits`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, fold_in
from ..kernels.graph_recorder import GraphRecorder
from ..process.posterior import Predictor
from ..process.prior import Prior
from ..types import Tokens
from .filters import Chain, SequenceFilters, head_of
from .logit_sources import LEAST_LEVEL, LazyLogits, checked
from .plan import Step
from .step import (
    NO_NUMBER,
    PREDICTED,
    RENOISED,
    DrawnRows,
    LogitSource,
    OutputBuilder,
    StepOutput,
    psi_step,
)
from .step_batch import StepBatch, StepNumbers, step_numbers

_LEAST_ROWS = 64
_CHUNK = 2**24  # logits in memory at a time
_LEAST_USES = 24  # of a graph; to record one costs as much as some steps
_WARM_UP = 2  # steps before it is recorded


class CapacityExceeded(Exception):
    """A step needed more rows of the output layer than its CUDA graph was captured for."""


class FixedOutput(OutputBuilder):
    """z_s in the making, without a shape that depends on values."""

    def choose(
        self,
        rows: Any,
        predicted: Tensor,
        renoised: Tensor,
        changed: Tensor,
        greedy: bool | Tensor,
    ) -> Tensor:
        tokens = torch.where(predicted, rows.tokens, self.batch.z.flatten()[rows.at])
        self.z = scatter_flat(self.z, rows.place, tokens)
        self.route = scatter_flat(self.route, rows.place, predicted * PREDICTED)
        return scatter_flat(renoised, rows.place, changed)

    def renoise(self, where: Tensor) -> None:
        assert self.batch.prior is not None
        bits = fold_in(self.batch.rng_state, int(Purpose.NOISE))
        self.z = torch.where(where, self.batch.prior.from_bits(bits), self.z)
        self.route = torch.where(where, RENOISED, self.route)


@dataclass(frozen=True)
class CapacityLogits:
    """A network asked for all sequences, and its head for `capacity` rows, whatever is needed.

    For batches whose levels only the device knows.

    num_rows  counts the rows that were needed
    wrong     (2,), set where the capacity was exceeded, and where the denoiser gave no number
    filters   of all rows, or of those of each sequence
    mask      (B, L), False at padding, which only some networks know
    """

    source: LazyLogits
    capacity: int
    num_rows: Tensor
    wrong: Tensor
    filters: Chain | SequenceFilters
    mask: Tensor | None = None
    dense, builder = False, FixedOutput

    def rows(
        self, out: OutputBuilder, needed: Tensor, pair: bool = False
    ) -> Iterator[tuple[DrawnRows]]:
        """All of them at once."""
        batch = out.batch
        counted = needed.flatten().cumsum(0)
        ranks = torch.arange(1, self.capacity + 1, device=needed.device)
        place = torch.searchsorted(counted, ranks)  # of each needed row, then behind the end
        used = place < needed.numel()
        at = place.clamp(max=needed.numel() - 1)  # unused rows repeat the last token
        x_z, tokens = self._drawn(batch, at)
        self.num_rows.add_(used.sum())
        no_number = ~torch.where(used, x_z, 1).isfinite().all()
        self.wrong.logical_or_(torch.stack((needed.sum() > self.capacity, no_number)))
        yield (DrawnRows(at, x_z, tokens, x_z, place),)

    def _drawn(self, batch: StepBatch, at: Tensor) -> tuple[Tensor, Tensor]:
        """Of the rows at flat positions: x_theta at z, and a draw; chunk by chunk."""
        source, alpha = self.source, batch.numbers.alpha_t.clamp(min=LEAST_LEVEL)
        level: Any = alpha.to(torch.get_default_dtype()).view(-1, 1, 1)
        if batch.given is not None:
            level = source.level(level, batch.given)
        hidden = source.hidden(batch.z, level, batch.labels, self.mask).flatten(0, 1)
        found = []
        for part in at.split(max(_CHUNK // source.prior.vocab_size, 1)):
            logits = checked(source.prior, head_of(source.denoiser, hidden[part]))
            bits = batch.bits(part, Purpose.DRAW)
            filters = self.filters.of(part // batch.z.shape[1])
            x_z, tokens = filters.process_and_sample(logits, batch.z.flatten()[part], bits)
            found.append((x_z.to(batch.pi), tokens))
        x_z, tokens = (torch.cat(parts) for parts in zip(*found, strict=True))
        return x_z, tokens


class CudaGraphStepper:
    """A stepper for the plan of a batch: replays captured steps, and looks at them at the end.

    watched     it looks at every step, and makes it again where the capacity was exceeded
    capacities  of each step; None: it is better made the other way
    """

    def __init__(
        self,
        batch: StepBatch,
        source: LazyLogits,
        predictor: Predictor,
        steps: tuple[Step, ...],
        replay: bool = True,
    ) -> None:
        self.batch, self.source, self.watched = batch, source, False
        numbers = [step_numbers(s, predictor) if is_capturable(s) else None for s in steps]
        rows = [each or [0.0] * len(StepNumbers._fields) for each in numbers]
        self.table = torch.tensor(rows, dtype=torch.float64).to(batch.pi)
        count, most = int(batch.free.sum()), batch.free.numel()
        unmasked = has_unmasked_noise(source.prior, batch.pi)
        capacities = [each and _capacity(count, most, unmasked, each) for each in numbers]
        self.capacities = bucket_capacities(capacities) if replay else capacities
        self.uses = Counter(self.capacities)
        device = batch.free.device
        self.num_rows = torch.zeros((), dtype=torch.int64, device=device)
        self.wrong = torch.zeros(2, dtype=torch.bool, device=device)
        most = len(self.uses)
        self.recorder = GraphRecorder(self.step, device, _WARM_UP, most) if replay else None

    def __call__(self, batch: StepBatch, source: LogitSource) -> StepOutput:
        """z_s and its routes; the rows of the head are counted until `finish`."""
        before = self.num_rows.clone() if self.watched else None
        z, route = self._replayed(batch.segments[0].index, batch.z)
        if before is not None and bool(self.wrong[0]):
            self.wrong[0] = False  # that a denoiser gave no number is still said at the end
            self.num_rows.copy_(before)
            return psi_step(batch, source)
        return StepOutput(z, route, None, [1] * len(z), 0)

    def _replayed(self, i: int, z: Tokens) -> tuple[Tokens, Tensor]:
        capacity = self.capacities[i]
        assert capacity is not None
        step = torch.full((1,), i, dtype=torch.int64, device=z.device)
        if self.recorder is None or self.uses[capacity] < _LEAST_USES:
            return self.step(step, z, capacity)
        z_s, route = self.recorder(step, z, capacity)
        return z_s.clone(), route.clone()

    def finish(self) -> int:
        """How many rows of the head there were, if the capacity was never exceeded."""
        overflow, no_number = self.wrong.tolist()
        if overflow:
            raise CapacityExceeded
        if no_number:
            raise ValueError(NO_NUMBER)
        return int(self.num_rows)

    def step(self, i: Tensor, z: Tokens, capacity: int) -> tuple[Tokens, Tensor]:
        """Step i (1,) of the plan, whose numbers the host never sees."""
        row = self.table.index_select(0, i)[0]
        numbers = StepNumbers(*row.unbind())._replace(greedy=0.0)
        batch = replace(self.batch, z=z, numbers=numbers, draw=i[0])
        filters: Any = batch.segments[0].logits_processor
        logits = CapacityLogits(self.source, capacity, self.num_rows, self.wrong, filters)
        out = psi_step(batch, logits)
        return out.z, out.route


def is_capturable(step: Step) -> bool:
    """Whether a CUDA graph can hold it."""
    return not (callable(step.kappa) or step.greedy or step.alpha_t >= 1)


def _capacity(count: int, most: int, unmasked: bool, numbers: StepNumbers) -> int:
    return capacity_for(count * largest_chance(numbers, unmasked), most)


def largest_chance(numbers: StepNumbers, unmasked: bool) -> float:
    """That a token needs its row."""
    chance = numbers.predict_slope
    if unmasked:
        chance += numbers.renoise_slope + numbers.renoise_offset
    return min(chance, 1.0)


def capacity_for(mean: float, most: int) -> int:
    """Rows that uniforms can need: the mean and eight deviations, rounded up to a power of
    two."""
    wanted = max(mean + 8 * math.sqrt(mean) + 32, _LEAST_ROWS)
    return min(2 ** math.ceil(math.log2(wanted)), most)


def bucket_capacities(capacities: list[int | None]) -> list[int | None]:
    """Capacities of steps; those too rare for a graph share one of at most twice the size."""
    uses, waiting = Counter(capacities), list[int]()
    shared: dict[int | None, int] = {}
    for size in sorted(capacity for capacity in uses if capacity is not None):
        waiting = [capacity for capacity in (*waiting, size) if 2 * capacity >= size]
        if sum(uses[capacity] for capacity in waiting) >= _LEAST_USES:
            shared |= dict.fromkeys(waiting, size)
            waiting = []
    return [shared.get(capacity, capacity) for capacity in capacities]


def has_unmasked_noise(prior: Prior, pi: Tensor) -> bool:
    """Whether a token other than the mask can be noise."""
    noise = pi > 0
    if prior.mask_id is not None:
        noise[prior.mask_id] = False
    return bool(noise.any())


def scatter_flat(into: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """`into` (B, L) with values at flat indices; one behind the end takes the rest."""
    longer = torch.cat((into.flatten(), into.new_zeros(1)))
    return longer.scatter(0, at, values.to(into.dtype))[:-1].view_as(into)

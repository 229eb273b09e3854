"""Psi steps of fixed shapes, which a GPU can replay: no step waits for the host.

`step.psi_step` over rows of another kind. There are not as many rows of the head as the coins
ask for, but a capacity that they exceed with a chance below 1e-14. Should they, the steps are
made again with a `LazyLogits`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, fold_in
from ..process.posterior import Predictor
from ..types import Tokens
from .filters import Chain, head_of, hidden_of
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

    For a batch of one segment, whose level only the device knows.

    num_rows  counts the rows that were needed
    wrong     (2,), set where the capacity was exceeded, and where the denoiser gave no number
    """

    source: LazyLogits
    capacity: int
    num_rows: Tensor
    wrong: Tensor
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
        level: Any = alpha.to(torch.get_default_dtype()).view(1, 1, 1)
        if batch.given is not None:
            level = source.level(level, batch.given)
        hidden = hidden_of(source.denoiser, batch.z, level, batch.labels).flatten(0, 1)
        filtered = batch.segments[0].logits_processor
        assert isinstance(filtered, Chain)
        found = []
        for part in at.split(max(_CHUNK // source.prior.vocab_size, 1)):
            logits = checked(source.prior, head_of(source.denoiser, hidden[part]))
            bits = batch.bits(part, Purpose.DRAW)
            x_z, tokens = filtered.process_and_sample(logits, batch.z.flatten()[part], bits)
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
        self.batch, self.source, self.replay = batch, source, replay
        self.watched = False
        numbers = [step_numbers(s, predictor) if _is_capturable(s) else None for s in steps]
        rows = [each or [0.0] * len(StepNumbers._fields) for each in numbers]
        self.table = torch.tensor(rows, dtype=torch.float64).to(batch.pi)
        count, most, unmasked = int(batch.free.sum()), batch.free.numel(), _unmasked(batch)
        capacities = [each and _capacity(count, most, unmasked, each) for each in numbers]
        self.capacities = bucket_capacities(capacities) if replay else capacities
        self.uses = Counter(self.capacities)
        device = batch.free.device
        self.num_rows = torch.zeros((), dtype=torch.int64, device=device)
        self.wrong = torch.zeros(2, dtype=torch.bool, device=device)
        self.graphs: dict[int, Callable[[Tensor, Tokens], tuple[Tokens, Tensor]]] = {}
        self.pool: Any = None  # the memory that all graphs share: one runs at a time
        self.warm_up_stream: Any = None

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
        if not self.replay or self.uses[capacity] < _LEAST_USES:
            return self.step(step, z, capacity)
        with torch.cuda.device(z.device):
            if capacity not in self.graphs:
                self.graphs[capacity] = self._captured(step, z, capacity)
            return self.graphs[capacity](step, z)

    def _captured(
        self, i: Tensor, z: Tokens, capacity: int
    ) -> Callable[[Tensor, Tokens], tuple[Tokens, Tensor]]:
        """Steps of this capacity as a CUDA graph, a function of (i, z)."""
        counters, i, z = (self.num_rows, self.wrong), i.clone(), z.clone()
        before = [each.clone() for each in counters]
        self.warm_up_stream = self.warm_up_stream or torch.cuda.Stream()
        self.warm_up_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.warm_up_stream):
            for _ in range(2):  # what is compiled or tuned on the way is done here
                self.step(i, z, capacity)
        torch.cuda.current_stream().wait_stream(self.warm_up_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            z_s, route = self.step(i, z, capacity)
        self.pool = graph.pool()
        for counter, value in zip(counters, before, strict=True):
            counter.copy_(value)  # the warm-up does not count

        def replay(at: Tensor, tokens: Tokens) -> tuple[Tokens, Tensor]:
            i.copy_(at)
            z.copy_(tokens)
            graph.replay()
            return z_s.clone(), route.clone()

        return replay

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
        out = psi_step(batch, CapacityLogits(self.source, capacity, self.num_rows, self.wrong))
        return out.z, out.route


def _is_capturable(step: Step) -> bool:
    return not (callable(step.kappa) or step.greedy or step.alpha_t >= 1)


def _capacity(count: int, most: int, unmasked: bool, numbers: StepNumbers) -> int:
    """Rows that `count` uniforms can need: the mean and eight deviations, rounded up to a power
    of two."""
    chance = numbers.predict_slope
    if unmasked:
        chance += numbers.renoise_slope + numbers.renoise_offset
    mean = count * min(chance, 1.0)
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


def _unmasked(batch: StepBatch) -> bool:
    """Whether a token other than the mask can be noise."""
    pi = batch.pi.clone()
    if batch.prior is not None and batch.prior.mask_id is not None:
        pi[batch.prior.mask_id] = 0
    return bool((pi > 0).any())


def scatter_flat(into: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """`into` (B, L) with values at flat indices; one behind the end takes the rest."""
    longer = torch.cat((into.flatten(), into.new_zeros(1)))
    return longer.scatter(0, at, values.to(into.dtype))[:-1].view_as(into)

"""Psi steps of fixed shapes, which a GPU can replay: no step waits for the host.

`step.psi_step` over rows of another kind. There are not as many rows of the head as the coins
ask for, but a capacity that they exceed with a chance below 1e-14. Should they, the steps are
made again with a `LazyLogits`. Levels, numbers and filters of each sequence are tensors, so one
graph serves whatever sequences there are, of one request or of many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.counter_rng import Purpose, fold_in
from ..kernels.graph_recorder import GraphRecorder
from ..types import Tokens, traits, working_dtype
from .filters import SequenceFilters, head_of
from .logit_sources import LEAST_LEVEL, LazyLogits, checked, not_padding
from .plan import Step
from .step import (
    NO_NUMBER,
    PREDICTED,
    RENOISED,
    DrawnRows,
    OutputBuilder,
    StepOutput,
    psi_step,
)
from .step_batch import BatchSegment, StepBatch, StepNumbers

_LEAST_ROWS = 64
_CHUNK = 2**24  # logits in memory at a time
_WARM_UP, _MOST_GRAPHS = 3, 64  # to record one costs as much as three steps
_NUMBERS = len(StepNumbers._fields)


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

    found    (3,): 1 is added where the capacity was exceeded, 1 where the denoiser gave no
             number, and how many rows there were
    filters  of the rows of each sequence
    mask     (B, L), False at padding, which only some networks know
    """

    source: LazyLogits
    capacity: int
    found: Tensor
    filters: SequenceFilters
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
        overflow = needed.sum() > self.capacity
        no_number = ~torch.where(used, x_z, 1).isfinite().all()
        self.found.add_(torch.stack((overflow.long(), no_number.long(), used.sum())))
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


class StepSize(NamedTuple):
    """What a graph is recorded for, beside the shapes of its inputs.

    capacity  rows of the head
    ragged    whether some sequences are shorter
    most_k, top_p, min_p   as in `SequenceFilters`
    """

    capacity: int
    ragged: bool
    most_k: int
    top_p: bool
    min_p: bool


class CudaGraphStepper:
    """A stepper for capturable steps of sequences with `Chain.values`, without guidance.

    Args:
        source: of all sequences.
        device: where its network is.
        watched: every step is looked at, and made again where its capacity was exceeded; if
            not, `finish` says what was wrong.
        longest: batches are padded to powers of two, but sequences not beyond this; None: they
            stay as they are.
        replay: False: the same steps, not recorded.
        notify: hears that there is no memory for graphs, and steps go on without; None: raise.
    """

    def __init__(
        self,
        source: LazyLogits,
        device: torch.device,
        watched: bool,
        longest: int | None = None,
        replay: bool = True,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self.source, self.watched, self.longest, self.notify = source, watched, longest, notify
        self.traits, self.prior = traits(source.denoiser), source.prior
        like = torch.zeros((), dtype=working_dtype(device), device=device)
        self.pi = self.prior.probs(like=like)
        mask = self.prior.mask_id  # whether a token other than it can be noise
        self.unmasked = mask is None or bool(self.pi[mask] < 1)
        self.unread = torch.zeros(3, dtype=torch.int64, device=device)
        self.run: Callable[..., tuple[Tokens, Tensor, Tensor]] | None = self.step
        if replay:
            self.run = GraphRecorder(self.step, device, _WARM_UP, _MOST_GRAPHS)

    def __call__(self, batch: StepBatch, source: LazyLogits) -> StepOutput:
        """The step, by `psi_step` over the source itself where no graph can make it."""
        (count, length), inputs = batch.z.shape, self.inputs(batch)
        if self.run is None or inputs is None:
            return psi_step(batch, source)
        try:
            z, route, found = self.run(*inputs)
        except torch.OutOfMemoryError:
            if self.notify is None:
                raise
            self.notify("no GPU memory is left to record steps: they go on unrecorded")
            self.run = None
            return psi_step(batch, source)
        z, route = (each[:count, :length].clone() for each in (z, route))
        self.unread += found
        num_rows = 0
        if self.watched:
            try:
                num_rows = self.finish()
            except CapacityExceeded:
                return psi_step(batch, source)
        return StepOutput(z, route, None, [1] * count, num_rows)

    def finish(self) -> int:
        """How many rows of the head there were, if the capacity was never exceeded."""
        overflow, no_number, num_rows = self.unread.tolist()
        self.unread.zero_()
        if overflow:
            raise CapacityExceeded
        if no_number:
            raise ValueError(NO_NUMBER)
        return num_rows

    def inputs(self, batch: StepBatch) -> tuple[Any, ...] | None:
        """What `step` takes, padded; None where that is too large, or padding is not known."""
        count, length = batch.z.shape
        if self.longest is not None:
            count = _power_of_2(count)
            if self.traits.padding:
                length = min(_power_of_2(length), max(self.longest, length))
        size = self._size(batch.segments, count, length)
        most = self.source.max_tokens
        if (most and count * length > most) or (size.ragged and not self.traits.padding):
            return None
        table = torch.tensor([_row(each) for each in batch.segments], dtype=self.pi.dtype)
        counts = [each.count for each in batch.segments]
        counts[-1] += count - len(batch.z)  # padding repeats the last
        table = table.repeat_interleave(torch.tensor(counts), 0)
        table = table.pin_memory() if self.pi.is_cuda else table
        table = table.to(self.pi.device, non_blocking=True)
        tensors = (batch.z, batch.free, batch.given, batch.sample_hash, batch.labels)
        return table, size, *(_padded(each, count, length) for each in tensors)

    def _size(self, segments: Sequence[BatchSegment], count: int, length: int) -> StepSize:
        mean, values = 0.0, []
        for each in segments:
            mean += each.num_free * largest_chance(each.numbers, self.unmasked)
            values.append(each.logits_processor.values)
        _, k, top_p, log_min_p = zip(*values, strict=True)
        return StepSize(
            capacity_for(mean, count * length),
            any(each.length < length for each in segments),
            _power_of_2(int(max(k))) if max(k) else 0,
            min(top_p) < 1,
            max(log_min_p) > -math.inf,
        )

    def step(
        self,
        table: Tensor,
        size: StepSize,
        z: Tokens,
        free: Tensor,
        given: Tensor | None,
        sample_hash: Tensor,
        labels: Tensor | None,
    ) -> tuple[Tokens, Tensor, Tensor]:
        """z_s and routes (B, L), and `CapacityLogits.found`."""
        numbers = StepNumbers(*table[:, :_NUMBERS].split(1, 1))._replace(greedy=0.0)
        rest = table[:, _NUMBERS:]
        draw, lengths, labelled = rest[:, :3].long().unbind(1)
        if self.traits.num_classes is not None and labels is not None:
            labels = torch.where(labelled > 0, labels, self.traits.num_classes)
        mask = not_padding(lengths, z) if size.ragged else None
        prior, pi = self.prior, self.pi
        batch = StepBatch(prior, pi, (), numbers, sample_hash, draw, z, free, given, labels)
        found = draw.new_zeros(3)
        filters = SequenceFilters(rest[:, 3:], size.most_k, size.top_p, size.min_p)
        logits = CapacityLogits(self.source, size.capacity, found, filters, mask)
        out = psi_step(batch, logits)
        return out.z, out.route, found


def is_capturable(step: Step) -> bool:
    """Whether a CUDA graph can hold it."""
    return not (callable(step.kappa) or step.greedy or step.alpha_t >= 1)


def largest_chance(numbers: StepNumbers, unmasked: bool) -> float:
    """That a token needs its row."""
    chance = numbers.predict_slope
    if unmasked:
        chance += numbers.renoise_slope + numbers.renoise_offset
    return min(chance, 1.0)


def capacity_for(mean: float, most: int) -> int:
    """Rows that uniforms can need: the mean and eight deviations, rounded up to a power of
    two."""
    return min(_power_of_2(max(math.ceil(mean + 8 * math.sqrt(mean)) + 32, _LEAST_ROWS)), most)


def scatter_flat(into: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """`into` (B, L) with values at flat indices; one behind the end takes the rest."""
    longer = torch.cat((into.flatten(), into.new_zeros(1)))
    return longer.scatter(0, at, values.to(into.dtype))[:-1].view_as(into)


def _row(segment: BatchSegment) -> tuple[Any, ...]:
    """What `CudaGraphStepper.step` reads of a sequence."""
    values = segment.logits_processor.values
    return (*segment.numbers, segment.index, segment.length, segment.labelled, *values)


def _power_of_2(number: int) -> int:
    return 2 ** (number - 1).bit_length()


def _padded(tensor: Tensor | None, count: int, length: int) -> Tensor | None:
    """(B,) or (B, L) with zeros behind it."""
    if tensor is None:
        return None
    missing = (0, length - tensor.shape[1]) if tensor.ndim == 2 else ()
    return pad(tensor, (*missing, 0, count - len(tensor)))

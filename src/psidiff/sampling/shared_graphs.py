"""Psi steps that many requests share, as CUDA graphs of a few sizes.

A graph serves so many sequences of such a length, and so many rows of the head, whatever level,
numbers and filters each sequence has: these are tensors. What is left over is padding.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.graph_recorder import GraphRecorder
from ..types import Tokens, traits, working_dtype
from .cuda_graph import CapacityLogits, capacity_for, has_unmasked_noise, largest_chance
from .filters import SequenceFilters
from .logit_sources import LazyLogits, not_padding
from .step import NO_NUMBER, StepOutput, psi_step
from .step_batch import BatchSegment, StepBatch, StepNumbers

_MOST_GRAPHS = 64
_WARM_UP = 2  # steps of a size before it is recorded
_NUMBERS = len(StepNumbers._fields)


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


class SharedGraphStepper:
    """A stepper for segments with `Chain.values`, one kind of step and no guidance.

    Args:
        source: of all requests.
        device: where its network is.
        longest: the model's length, beyond which no sequence is padded; None: unknown.
        replay: False: the same steps, not recorded.
        notify: hears that there is no memory for graphs: from then on steps are lazy.
    """

    def __init__(
        self,
        source: LazyLogits,
        device: torch.device,
        longest: int | None = None,
        replay: bool = True,
        notify: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.source, self.longest, self.notify = source, longest, notify
        self.traits = traits(source.denoiser)
        like = torch.zeros((), dtype=working_dtype(device), device=device)
        self.pi = source.prior.probs(like=like)
        self.unmasked = has_unmasked_noise(source.prior, self.pi)
        self.run: Callable[..., tuple[Tokens, Tensor, Tensor]] | None = self.step
        if replay:
            self.run = GraphRecorder(self.step, device, _WARM_UP, _MOST_GRAPHS)

    def __call__(self, batch: StepBatch, source: LazyLogits) -> StepOutput:
        """The step; with a `LazyLogits` where no graph can make it."""
        count, length = batch.z.shape
        inputs = self.inputs(batch)
        if self.run is None or inputs is None:
            return psi_step(batch, source)
        try:
            z, route, found = self.run(*inputs)
        except torch.OutOfMemoryError:
            self.run = None
            self.notify("no GPU memory is left to record steps: from now on they are lazy")
            return psi_step(batch, source)
        overflow, no_number, num_rows = found.tolist()
        if overflow:
            return psi_step(batch, source)
        if no_number:
            raise ValueError(NO_NUMBER)
        z, route = (each[:count, :length].clone() for each in (z, route))
        return StepOutput(z, route, None, [1] * count, num_rows)

    def inputs(self, batch: StepBatch) -> tuple[Any, ...] | None:
        """What `step` takes, padded to one of few sizes; None where that is too large."""
        count, length = _power_of_2(len(batch.z)), batch.z.shape[1]
        if self.traits.padding:
            length = min(_power_of_2(length), max(self.longest or 0, length))
        size = self._size(batch.segments, count, length)
        most = self.source.max_tokens
        if (most and count * length > most) or (size.ragged and not self.traits.padding):
            return None
        rows = [_row(segment) for segment in batch.segments for _ in range(segment.count)]
        rows += rows[:1] * (count - len(rows))
        on_gpu = self.pi.is_cuda
        table = torch.tensor(rows, dtype=self.pi.dtype, pin_memory=on_gpu)
        table = table.to(self.pi.device, non_blocking=True)
        tensors = (batch.z, batch.free, batch.given, batch.sample_hash, batch.labels)
        return table, size, *(_padded(each, count, length) for each in tensors)

    def _size(self, segments: tuple[BatchSegment, ...], count: int, length: int) -> StepSize:
        mean, values = 0.0, []
        for each in segments:
            assert each.numbers is not None
            mean += each.count * each.length * largest_chance(each.numbers, self.unmasked)
            values.append(each.logits_processor.values)  # type: ignore[attr-defined]
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
        """z_s and routes (B, L); whether rows were missing, whether one had no number, and how
        many there were."""
        numbers = StepNumbers(*table[:, :_NUMBERS].split(1, 1))._replace(greedy=0.0)
        rest = table[:, _NUMBERS:]
        draw, lengths, labelled = rest[:, :3].long().unbind(1)
        if self.traits.num_classes is not None and labels is not None:
            labels = torch.where(labelled > 0, labels, self.traits.num_classes)
        prior, pi = self.source.prior, self.pi
        batch = StepBatch(prior, pi, (), numbers, sample_hash, draw, z, free, given, labels)
        mask = not_padding(lengths, z) if size.ragged else None
        num_rows, wrong = draw.new_zeros(()), free.new_zeros(2)
        filters = SequenceFilters(rest[:, 3:], size.most_k, size.top_p, size.min_p)
        logits = CapacityLogits(self.source, size.capacity, num_rows, wrong, filters, mask)
        out = psi_step(batch, logits)
        return out.z, out.route, torch.cat((wrong, num_rows[None]))


def _row(segment: BatchSegment) -> tuple[Any, ...]:
    """The numbers of a sequence, as `SharedGraphStepper.step` reads them."""
    values = segment.logits_processor.values  # type: ignore[attr-defined]
    assert segment.numbers is not None
    return (*segment.numbers, segment.index, segment.length, segment.labelled, *values)


def _power_of_2(number: int) -> int:
    return 2 ** (number - 1).bit_length()


def _padded(tensor: Tensor | None, count: int, length: int) -> Tensor | None:
    """(B,) or (B, L) with zeros behind it."""
    if tensor is None:
        return None
    missing = (0, length - tensor.shape[1]) if tensor.ndim == 2 else ()
    return pad(tensor, (*missing, 0, count - len(tensor)))

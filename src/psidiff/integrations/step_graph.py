"""What a step does beside reading logits, recorded once for all steps of a shape and replayed:
a hundred small operations, whose launches would cost more than the logits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..checksums import in_short
from ..kernels.counter_rng import Purpose, fold_in
from ..kernels.graph_recorder import GraphRecorder
from ..kernels.logit_rows import LogitBlock, RowFilters, RowResults
from ..sampling.dense_logits import DenseLogits
from ..sampling.step import PREDICTED, psi_step
from ..sampling.step_batch import StepBatch, StepNumbers
from ..sampling.steppers import sample_x0_first

Work = Callable[[], tuple[Tensor, ...]]


class StepGraph:
    """A step of fixed shapes, as functions of tensors that stay where they are.

    batch     a step of this shape; of its numbers none is kept
    marginal  x_0 is drawn first
    largest   x_theta is sure of the most probable token
    """

    def __init__(self, batch: StepBatch, marginal: bool, largest: bool) -> None:
        self.z, self.free = batch.z.clone(), batch.free.clone()
        self.key = torch.zeros((), dtype=torch.int64, device=self.z.device)
        self.index = torch.zeros((), dtype=torch.int64, device=self.z.device)
        self.numbers = batch.pi.new_zeros(len(StepNumbers._fields))
        self.marginal, self.largest = marginal, largest
        ids, numbers = torch.zeros_like(self.z).flatten(), batch.pi.new_ones(self.z.numel())
        self.found = RowResults(ids, numbers, numbers.clone(), ids.clone(), numbers.clone())
        self.batch = replace(batch, z=self.z, free=self.free, draw=self.index, confidence=None)
        self._recorded: dict[str, Work] = {}  # graphs, or the work where none can be made

    def load(self, key: Tensor, index: int, numbers: Tensor, z: Tensor, free: Tensor) -> None:
        """What differs from step to step."""
        self.index.fill_(index)
        for here, value in (
            (self.key, key), (self.numbers, numbers), (self.z, z), (self.free, free)
        ):  # fmt: skip
            here.copy_(value)

    def words(self) -> Tensor:
        """Random bits (B L,) that draw tokens."""
        return self._run("words", self._words)[0]

    def outcome(self, found: RowResults) -> tuple[Tensor, ...]:
        """z_s, routes, tokens and probabilities (B, L) as they are reported, and whether a row
        that was needed has no number."""
        for here, value in zip(self.found, found, strict=True):
            here.copy_(value)
        return tuple(each.clone() for each in self._run("outcome", self._outcome))

    def _now(self) -> StepBatch:
        numbers = StepNumbers(*self.numbers.unbind())._replace(greedy=0.0)
        places = torch.arange(len(self.z), device=self.z.device)
        return replace(self.batch, numbers=numbers, sample_hash=fold_in(self.key, places))

    def _words(self) -> tuple[Tensor, ...]:
        return (fold_in(self._now().rng_state.flatten(), int(Purpose.DRAW)),)

    def _outcome(self) -> tuple[Tensor, ...]:
        batch, found = self._now(), self.found
        block, nothing = LogitBlock(self.numbers, batch.z), RowFilters(_same)
        source = DenseLogits(block, nothing, batch, self.largest, lambda *asked: found)
        out = (sample_x0_first if self.marginal else psi_step)(batch, source)
        assert source.wrong is not None
        predicted = (out.route == PREDICTED) | (batch.numbers.alpha_s >= 1)
        return (out.z, out.route, *reported_tokens(out.z, predicted, found), source.wrong)

    def _run(self, name: str, work: Work) -> tuple[Tensor, ...]:
        """Recorded at the second use on a GPU: the first builds what is built on the way."""
        if not self.z.is_cuda:
            return work()
        if name not in self._recorded:
            self._recorded[name] = GraphRecorder(work, self.z.device, warm_up=1)
        try:
            return self._recorded[name]()
        except RuntimeError as error:
            if self._recorded[name] == work:
                raise
            why = in_short(error)
            warnings.warn(f"steps of this scheduler are not recorded: {why}", stacklevel=2)
            self._recorded[name] = work
            return work()


def reported_tokens(z: Tensor, predicted: Tensor, found: RowResults) -> tuple[Tensor, Tensor]:
    """Tokens and their probabilities (B, L): of z where predicted, else the most probable."""
    chosen = z.flatten()
    probs = torch.where(chosen == found.drawn, found.at_drawn, found.at_z)
    probs = torch.where(predicted.flatten(), probs, found.at_best)
    return torch.where(predicted, z, found.best.view_as(z)), probs.float().view_as(z)


def _same(rows: Tensor) -> Tensor:
    return rows

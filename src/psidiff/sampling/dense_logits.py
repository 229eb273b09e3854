"""Logits that a pipeline has computed, read in one pass for all positions: steps of fixed
shapes, which never wait for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, fold_in
from ..kernels.logit_rows import LogitBlock, Reading, RowFilters, RowResults, begin
from .cuda_graph import FixedOutput
from .filters import Chain, Nucleus, Temperature
from .step import DrawnRows, OutputBuilder
from .step_batch import StepBatch


class DenseOutput(FixedOutput):
    """z_s in the making from the rows of all positions."""

    def choose(
        self,
        rows: Any,
        predicted: Tensor,
        renoised: Tensor,
        changed: Tensor,
        greedy: bool | Tensor,
    ) -> Tensor:
        used = rows.place < rows.at.numel()
        hit = (predicted & used).view_as(self.z)
        self.z = torch.where(hit, rows.tokens.view_as(self.z), self.z)
        self.route = hit.to(torch.int8)  # PREDICTED is 1, KEPT 0
        if self.confidence is not None:
            sure = rows.probability.to(self.confidence).view_as(self.z)
            self.confidence = torch.where(hit, sure, self.confidence)
        return renoised | (changed & used).view_as(self.z)


@dataclass
class DenseLogits:
    """Rows of x_theta from logits, a token drawn from each, for one batch of one segment.

    largest  x_theta is sure of the most probable token
    read     what reads them; None: the logits are read
    found    what was read, once a step has asked
    """

    block: LogitBlock
    filters: RowFilters
    batch: StepBatch
    largest: bool = False
    read: Reading | None = None
    found: RowResults | None = field(init=False, default=None)
    wrong: Tensor | None = field(init=False, default=None)
    dense, builder = False, DenseOutput

    def __post_init__(self) -> None:
        self._draws = not (self.largest or self.batch.numbers.greedy)
        self._read = self.read or begin(self.block, self.filters, self._draws)

    def rows(
        self, out: OutputBuilder, needed: Tensor, pair: bool = False
    ) -> Iterator[tuple[DrawnRows]]:
        """All of them at once; `wrong` is set where a needed one has no number."""
        batch, wanted = out.batch, needed.flatten()
        bits = None
        if self._draws:
            bits = fold_in(batch.rng_state.flatten(), int(Purpose.DRAW))
        found = self.found = self._read(bits, wanted)
        self.wrong = (wanted & ~found.at_best.isfinite()).any()
        at = torch.arange(wanted.numel(), device=wanted.device)
        place = torch.where(wanted, at, wanted.numel())
        x_z, sure = found.at_z, found.at_drawn
        if self.largest:
            x_z, sure = (found.best == batch.z.flatten()).to(x_z), torch.ones_like(sure)
        out.head_rows = wanted.numel()
        yield (DrawnRows(at, x_z.to(batch.pi), found.drawn, sure, place),)


def row_filters(chain: Chain) -> RowFilters:
    """A chain of filters as the kernels know it, as far as they do."""
    temperature, top_p, keep, simple = 1.0, None, True, True
    for each in chain.filters:
        if isinstance(each, Temperature):
            temperature = each.temperature
        elif isinstance(each, Nucleus):
            top_p, keep = None if each.p == 1 else each.p, each.crossing == "keep"
        else:
            simple = False
    return RowFilters(chain, simple, temperature, top_p, keep)

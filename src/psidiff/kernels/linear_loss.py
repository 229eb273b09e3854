"""The output layer and the loss in one, for a few thousand rows at a time.

A loss here is a function of the logits of each row that says its own gradient. Logits, loss
and gradient of a chunk exist together and then go: no (B, L, K) tensor is ever held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..types import at_least_float32

Form = Callable[..., tuple[Tensor, Tensor]]
"""(logits (n, K) in float32, columns (n,) ...) -> loss (n,) and its gradient (n, K)."""

_ENTRIES = 2**25  # logits held at once: 128 MiB of float32
_CAN_STAY_WIDE = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 8)


@dataclass(frozen=True)
class RowLoss:
    """A form, and its columns: a number for each token (B, L), or for each sequence (B, 1)."""

    form: Form
    columns: tuple[Any, ...]


class Readout:
    """What a network does with its last layer when it is trained: weights (B, L) times losses.

    Given to a network's forward pass as `then`, it takes the place of the logits.
    """

    def __init__(self, loss: RowLoss, weights: Tensor, compiled: bool = False) -> None:
        self.loss, self.weights, self.compiled = loss, weights, compiled

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The weighted sum of the losses of all tokens, a scalar."""
        columns = [
            column.to(hidden.device, non_blocking=True).expand(hidden.shape[:2]).reshape(-1)
            for column in (self.weights, *self.loss.columns)
        ]
        rows = hidden.flatten(0, 1)
        low = rows.dtype
        if torch.is_autocast_enabled(rows.device.type):
            low = torch.get_autocast_dtype(rows.device.type)
        work = _compiled(self.loss.form, low) if self.compiled else self._plain(low)
        total: Tensor = _LinearLoss.apply(rows, weight, bias, low, work, *columns)
        return total

    def _plain(self, low: torch.dtype) -> Form:
        return partial(_judge, self.loss.form, low)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor,
        low: torch.dtype,
        work: Form,
        *columns: Tensor,
    ) -> Tensor:
        """Sum of weight * loss, and at once what backward will hand back."""
        with torch.autocast(rows.device.type, enabled=False):
            some, table, offset = rows.to(low), weight.to(low), bias.to(low)
            d_rows = torch.empty_like(some)
            exact = at_least_float32(rows[:0]).dtype  # of sums
            d_weight, d_bias = (torch.zeros_like(v, dtype=exact) for v in (weight, bias))
            total = torch.zeros((), device=rows.device, dtype=exact)
            size = max(1, _ENTRIES // len(weight))
            for first in range(0, len(rows), size):
                part = slice(first, first + size)
                loss, slope = work(
                    *_logits(some[part], table, offset), *(c[part] for c in columns)
                )
                total += loss.sum()
                torch.mm(slope, table, out=d_rows[part])
                d_weight += slope.T @ some[part]
                d_bias += slope.sum(0, dtype=exact)
        ctx.save_for_backward(d_rows, d_weight.to(weight), d_bias.to(bias))
        ctx.dtype, ctx.others = rows.dtype, 2 + len(columns)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = upstream
        d_rows, d_weight, d_bias = ctx.saved_tensors
        grads = (d_rows.to(ctx.dtype) * scale, d_weight * scale, d_bias * scale)
        return *(g.to(ctx.dtype) for g in grads), *(None,) * ctx.others


def _logits(rows: Tensor, table: Tensor, offset: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits, and what is still to be added to them.

    A GPU sums products of 16 bits in float32; where torch lets it, the sums stay that.
    """
    if rows.is_cuda and rows.dtype is not torch.float32 and _CAN_STAY_WIDE:
        return torch.mm(rows, table.T, out_dtype=torch.float32), offset
    return F.linear(rows, table, offset), None


def _judge(
    form: Form,
    low: torch.dtype,
    logits: Tensor,
    offset: Tensor | None,
    weights: Tensor,
    *columns: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weighted losses and slopes; between logits and slopes all is float32."""
    logits = at_least_float32(logits)
    loss, slope = form(logits if offset is None else logits + offset, *columns)
    return loss * weights, (slope * weights[:, None]).to(low)


@cache
def _compiled(form: Form, low: torch.dtype) -> Form:
    return torch.compile(partial(_judge, form, low), dynamic=False)

"""The output layer and the loss in one, for a few thousand rows at a time.

A loss here is a function of the logits of each row that says its own gradient. Logits, loss
and gradient of a chunk exist together and then go: no (B, L, K) tensor is ever held. A network
whose logits come from no linear layer has them anyway; then their gradients are all that is
held beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..types import at_least_float32
from .kernel_check import Work, has_triton, matches_reference

_ENTRIES, _ENTRIES_GPU = 2**25, 2**27  # logits held at once: 128 and 512 MiB of float32
_ALIGNED = 16
_CAN_STAY_WIDE = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 8)


@dataclass(frozen=True)
class Form:
    """A loss of rows that says its own gradient.

    plain: (logits (n, K) in float32, columns (n,) ...) -> loss (n,) and its gradient (n, K)
    kernel: the same as `_weighted_loss` of it, for GPUs with Triton
    examples: columns of some rows of K logits, on which the kernel is compared with it
    """

    plain: Work
    kernel: Work | None = None
    examples: Callable[[int], Sequence[Tensor]] | None = None


class RowLoss(NamedTuple):
    """A form, and its columns: a number for each token (B, L), or for each sequence (B, 1)."""

    form: Form
    columns: tuple[Any, ...]


@dataclass(frozen=True)
class FusedLinearLoss:
    """What a network does with its last layer when it is trained: weights (B, L) times losses.

    Given to a network's forward pass as `then`, it takes the place of the logits; those of a
    network that knows no `then` are given to it (`of_logits`).
    """

    loss: RowLoss
    weights: Tensor
    compiled: bool = False

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The weighted sum of the losses of all tokens, a scalar."""
        rows = hidden.flatten(0, 1)
        low = rows.dtype
        if torch.is_autocast_enabled(rows.device.type):
            low = torch.get_autocast_dtype(rows.device.type)
        work = self._work(rows, low, len(weight))
        made = partial(_of_hidden, low, work, self._columns(hidden))
        total: Tensor = _SumWithGradients.apply(made, rows, weight, bias)
        return total

    def of_logits(self, logits: Tensor) -> Tensor:
        """The same sum from logits (B, L, K)."""
        rows = logits.flatten(0, 1).contiguous()
        work = self._work(rows, rows.dtype, rows.shape[-1])
        made = partial(_of_logits, work, self._columns(logits))
        total: Tensor = _SumWithGradients.apply(made, rows)
        return total

    def _columns(self, like: Tensor) -> list[Tensor]:
        """Weights and columns, a number for each row."""
        shape, device = like.shape[:2], like.device
        return [
            column.to(device, non_blocking=True).expand(shape).reshape(-1).contiguous()
            for column in (self.weights, *self.loss.columns)
        ]

    def _work(self, rows: Tensor, low: torch.dtype, vocab: int) -> Work:
        """Losses and slopes (in `low`) of a chunk: by kernel, compiled, or as it stands."""
        form, known = self.loss.form, (low, vocab)
        plain = partial(_weighted_loss, form.plain, *known)
        work: Work = _compiled(_weighted_loss, form.plain, *known) if self.compiled else plain
        if form.kernel is not None and _has_kernels(rows):
            work = partial(_by_kernel, form, low, vocab, work)
        return work


class _SumWithGradients(torch.autograd.Function):
    """A sum whose gradients are made with it, and handed back by the backward pass."""

    @staticmethod
    def forward(ctx: Any, made: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
        with torch.autocast(inputs[0].device.type, enabled=False):
            total, *grads = made(*inputs)
        ctx.save_for_backward(*grads)
        ctx.dtypes = [value.dtype for value in inputs]
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = upstream
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, *(g.to(kind) * scale.to(kind) for g, kind in grads)


def _of_hidden(
    low: torch.dtype,
    work: Work,
    columns: list[Tensor],
    rows: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor, ...]:
    """Sum of weight * loss of linear outputs, and its gradients."""
    some, table, offset = rows.to(low), weight.to(low), bias.to(low)
    if more := _missing(weight):
        table, offset = F.pad(table, (0, 0, 0, more)), F.pad(offset, (0, more))
    d_rows = torch.empty_like(some)
    exact = at_least_float32(rows[:0]).dtype  # of sums
    d_weight, d_bias = (torch.zeros_like(v, dtype=exact) for v in (table, offset))
    total = torch.zeros((), device=rows.device, dtype=exact)
    for part in _chunks(rows, len(table)):
        loss, slope = work(*_logits(some[part], table, offset), *(c[part] for c in columns))
        total += loss.sum()
        torch.mm(slope, table, out=d_rows[part])
        d_weight += slope.T @ some[part]
        d_bias += slope.sum(0, dtype=exact)
    vocab = len(weight)
    return total, d_rows, d_weight[:vocab].to(weight), d_bias[:vocab].to(bias)


def _of_logits(work: Work, columns: list[Tensor], rows: Tensor) -> tuple[Tensor, ...]:
    """Sum of weight * loss of rows of logits, and its gradient."""
    total = torch.zeros((), device=rows.device, dtype=at_least_float32(rows[:0]).dtype)
    slopes = []
    for part in _chunks(rows, rows.shape[-1]):
        loss, slope = work(rows[part], None, *(c[part] for c in columns))
        total += loss.sum()
        slopes.append(slope)
    return total, slopes[0] if len(slopes) == 1 else torch.cat(slopes)


def _has_kernels(rows: Tensor) -> bool:
    return has_triton and rows.is_cuda and rows.dtype is not torch.float64


def _by_kernel(
    form: Form,
    low: torch.dtype,
    vocab: int,
    instead: Work,
    logits: Tensor,
    offset: Tensor | None,
    weights: Tensor,
    *columns: Tensor,
) -> tuple[Tensor, Tensor]:
    """By the kernel, if that gives what the plain form gives; else by what is instead."""
    assert form.kernel is not None and form.examples is not None
    kernel, examples = partial(form.kernel, low, vocab), form.examples

    def on_fixed(work: Work) -> tuple[Tensor, Tensor]:
        some = [column.to(logits.device) for column in examples(vocab)]
        g = torch.Generator(logits.device).manual_seed(0)
        wanted = (1 + len(some[0]), logits.shape[-1])
        rows = torch.randn(wanted, generator=g, device=logits.device)
        shift = None if offset is None else rows[-1].to(offset)
        return work((2 * rows[:-1]).to(logits), shift, torch.ones_like(some[-1]), *some)

    variant = (low, vocab, logits.shape[-1], logits.dtype, offset is None)
    plain = partial(_weighted_loss, form.plain, low, vocab)
    sure = matches_reference(form.kernel, variant, logits.device, on_fixed, kernel, plain)
    return (kernel if sure else instead)(logits, offset, weights, *columns)


def _missing(weight: Tensor) -> int:
    """Columns that logits on a GPU get beyond the vocabulary: a product of matrices whose rows
    do not begin at multiples of 16 bytes is several times slower there."""
    return -len(weight) % _ALIGNED if weight.is_cuda else 0


def _chunks(rows: Tensor, width: int) -> list[slice]:
    """The rows in parts of a power of two."""
    most = max(1, (_ENTRIES_GPU if rows.is_cuda else _ENTRIES) // width)
    size = 1 << (most.bit_length() - 1)
    return [slice(first, first + size) for first in range(0, len(rows), size)]


def _logits(rows: Tensor, table: Tensor, offset: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits, and what is still to be added to them.

    A GPU sums products of 16 bits in float32; where torch lets it, the sums stay that.
    """
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16) and _CAN_STAY_WIDE:
        return torch.mm(rows, table.T, out_dtype=torch.float32), offset
    return F.linear(rows, table, offset), None


def _weighted_loss(
    plain: Work,
    low: torch.dtype,
    vocab: int,
    logits: Tensor,
    offset: Tensor | None,
    weights: Tensor,
    *columns: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weighted losses and slopes; between logits and slopes all is float32. Columns beyond the
    vocabulary are not looked at, and their slopes are 0."""
    wide = at_least_float32(logits if offset is None else logits + offset)
    loss, slope = plain(wide[:, :vocab], *columns)
    slope = (slope * weights[:, None]).to(low)
    more = logits.shape[-1] - vocab
    return loss * weights, F.pad(slope, (0, more)) if more else slope


@cache
def _compiled(work: Work, *known: Any) -> Work:
    """`partial`, compiled once."""
    return torch.compile(partial(work, *known), dynamic=False)

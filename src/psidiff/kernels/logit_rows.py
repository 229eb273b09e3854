"""What a step asks of every row of logits (B, L, K) that someone computed: the most probable
token, the probability of the present one, and a draw, without a copy of the logits.

`plain` is the same in torch, in few large pieces: the fallback, and the reference in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..types import at_least_float32
from .counter_rng import blocked_race
from .kernel_check import has_triton, matches_reference
from .logit_step import RowReader

_CHUNK = {"cpu": 2**20, "cuda": 2**24}  # logits in float32 at a time
_COMPARED, _ENTRIES = 64, 2**23  # rows that a kernel is compared on, their logits
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NEARLY_ALL = 1 - 1e-6  # a top-p beyond which float32 sums say nothing
_COOL = 1e-20  # beyond it, or its inverse, a temperature needs `Temperature.rows`


@dataclass(frozen=True)
class RowFilters:
    """What becomes of a row before a token is drawn.

    apply   the whole of it, as a function of rows (n, K)
    simple  whether temperature, top_p and keep_crossing say all of it
    """

    apply: Callable[[Tensor], Tensor]
    simple: bool = False
    temperature: float = 1.0
    top_p: float | None = None
    keep_crossing: bool = True


@dataclass(frozen=True)
class LogitBlock:
    """Logits (B, L, K) where they lie, and how they differ from what tokens are drawn from.

    shift    (B, L), added to the logit of z; None: nothing
    mask_id  a token that is impossible; None: none is
    """

    logits: Tensor
    z: Tensor
    shift: Tensor | None = None
    mask_id: int | None = None

    @property
    def raw(self) -> bool:
        """Whether tokens are drawn from the logits as they are."""
        return self.shift is None and self.mask_id is None

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows (n, K) in at least float32, at which flat positions; a view where it can be."""
        size = max(
            _CHUNK.get(self.logits.device.type, _CHUNK["cpu"]) // self.logits.shape[-1], 1
        )
        for first, rows in _as_rows(self.logits, size):
            for start in range(0, len(rows), size):
                at = slice(first + start, first + min(start + size, len(rows)))
                yield at, self._changed(at_least_float32(rows[start : start + size]), at)

    def _changed(self, rows: Tensor, at: slice) -> Tensor:
        if self.shift is not None:
            z, shift = self.z.flatten()[at], self.shift.flatten()[at]
            rows = rows.scatter_add(-1, z[:, None], shift[:, None].to(rows))
        if self.mask_id is not None:
            mask = torch.full((1,), self.mask_id, device=rows.device)
            rows = rows.index_fill(-1, mask, -torch.inf)
        return rows


class RowResults(NamedTuple):
    """Of each row, (B L,): probabilities after the filters, and what was drawn."""

    best: Tensor
    at_best: Tensor  # not finite where the row has no number, or no possible token
    at_z: Tensor
    drawn: Tensor
    at_drawn: Tensor


Reading = Callable[[Tensor | None, Tensor | None], RowResults]


def begin(block: LogitBlock, filters: RowFilters, draws: bool) -> Reading:
    """Every row at once: a GPU begins to read them now, and ends when the result is called.

    It is called with bits (B L,), the words that draw, or None, and with asked (B L,): where a
    draw may be looked at; elsewhere it need not be made. None: everywhere.
    """
    if available(block, filters) and _right(block, draws, filters):
        reader = _reader(block, filters)
        return lambda bits, asked: RowResults(*reader.choose(bits))
    return lambda bits, asked: plain(block, bits, filters, asked)


def available(block: LogitBlock, filters: RowFilters) -> bool:
    """A GPU with Triton, and numbers that the kernels know."""
    logits = block.logits
    return (
        has_triton
        and logits.is_cuda
        and logits.dtype in _DTYPES
        and filters.simple
        and _COOL < filters.temperature < 1 / _COOL
        and (filters.top_p is None or filters.top_p < _NEARLY_ALL)
    )


def by_kernel(block: LogitBlock, bits: Tensor | None, filters: RowFilters) -> RowResults:
    """As `plain`, by `logit_step`."""
    return RowResults(*_reader(block, filters).choose(bits))


def _reader(block: LogitBlock, filters: RowFilters) -> RowReader:
    how = (filters.temperature, filters.top_p, filters.keep_crossing)
    return RowReader(block.logits, block.z, *how, block.shift, block.mask_id)


def plain(
    block: LogitBlock, bits: Tensor | None, filters: RowFilters, asked: Tensor | None = None
) -> RowResults:
    """As `begin` finds it, in torch. On a CPU only what is asked is drawn."""
    z, found = block.z.flatten(), list[RowResults]()
    for at, rows in block.pieces():
        rows = filters.apply(rows)
        top, best = rows.amax(-1), rows.argmax(-1)
        weights = (rows - top[:, None]).exp_()
        total = weights.sum(-1)
        at_z = weights.gather(-1, z[at, None])[:, 0] / total
        drawn = best
        if bits is not None:
            drawn = _draw(weights, bits[at], best, None if asked is None else asked[at])
        at_drawn = weights.gather(-1, drawn[:, None])[:, 0] / total
        found.append(RowResults(best, 1 / total, at_z, drawn, at_drawn))
    return RowResults(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _draw(weights: Tensor, bits: Tensor, best: Tensor, asked: Tensor | None) -> Tensor:
    if weights.is_cuda or asked is None:
        return blocked_race(weights, bits)
    if not bool(asked.any()):
        return best
    if bool(asked.all()):
        return blocked_race(weights, bits)
    return best.index_put((asked,), blocked_race(weights[asked], bits[asked]))


def shaped(block: LogitBlock, filters: RowFilters) -> Tensor:
    """The logits after the filters, in their own dtype, (B, L, K)."""
    made = torch.empty(block.logits.shape, dtype=block.logits.dtype, device=block.logits.device)
    rows = made.flatten(0, 1)
    for at, piece in block.pieces():
        rows[at] = filters.apply(piece)
    return made


def _as_rows(logits: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """(B, L, K) as rows, and the number of the first: all at once without a copy; where the
    sequences lie apart as many as `size` rows hold, or one."""
    count, length, _ = logits.shape
    if count == 1 or logits.stride(0) == length * logits.stride(1):
        yield 0, logits.flatten(0, 1)
        return
    together = max(size // max(length, 1), 1)
    for i in range(0, count, together):
        yield i * length, logits[i : i + together].flatten(0, 1)


def _right(block: LogitBlock, draws: bool, filters: RowFilters) -> bool:
    """Whether the kernels find in rows of this kind what `plain` finds."""
    width, device, dtype = block.logits.shape[-1], block.logits.device, block.logits.dtype
    shifted, masked = block.shift is not None, block.mask_id is not None

    def on_fixed(form: Any) -> Any:
        g = torch.Generator(device).manual_seed(0)
        count = min(_COMPARED, max(_ENTRIES // width, 1))
        logits = (3 * torch.randn(1, count, width, generator=g, device=device)).to(dtype)
        z = torch.randint(width, (1, count), generator=g, device=device)
        shift = torch.randn(1, count, generator=g, device=device) if shifted else None
        bits = torch.randint(-(2**63), 2**63 - 1, (count,), generator=g, device=device)
        fixed = LogitBlock(logits, z, shift, width // 2 if masked else None)
        return form(fixed, bits if draws else None, filters)

    how = (filters.temperature, filters.top_p, filters.keep_crossing)
    variant = (width, dtype, shifted, masked, draws, *how)
    forms: tuple[Any, Any] = (by_kernel, plain)
    return matches_reference(forms[0], variant, device, on_fixed, *forms)

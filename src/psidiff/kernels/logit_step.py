"""Rows of logits read where they lie, in their own dtype: kernels for `logit_rows.by_kernel`.

A row is cut into the blocks of `counter_rng.blocked_race`. One pass takes the largest logit of
each block and the sum of its weights; what a race needs after that is the winning block alone.
For top-p further passes, each with seven thresholds, narrow a bracket around the edge above
which tokens are kept; then the sums are taken again, of what is kept. Several programs share
a row, and no pass waits for the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .counter_rng import MULTIPLY, WEYL, block_size
from .kernel_check import has_triton

_SUM_TILE, _SUM_BLOCKS, _SUM_WARPS = 2048, 32, 1  # of a program that sums blocks
_PASS_ROWS, _PASS_WARPS, _PASS_PROGRAMS = 512, 4, 8192  # of one that compares with thresholds
_PASSES = {
    2: 4,
    4: 6,
}  # by bytes of a logit: then a bracket nearly always holds one value
_EDGES = 8  # a bracket in so many equal parts

if has_triton:
    import triton
    import triton.language as tl

    from .fused_sampling import _exponential, _mixed

    @triton.jit
    def _here(logits, by_batch, by_place, length):  # type: ignore[no-untyped-def]
        """Where this program's row begins."""
        row = tl.program_id(0).to(tl.int64)
        return logits + (row // length) * by_batch + (row % length) * by_place

    @triton.jit
    def _values(  # type: ignore[no-untyped-def]
        here,
        k,
        inside,
        by_token,
        own,
        shift,
        scale,
        mask,
        SHIFTED: tl.constexpr,
        MASKED: tl.constexpr,
    ):
        """The logits at k as they are drawn from; -inf outside and at the mask."""
        value = tl.load(here + k * by_token, mask=inside, other=-float("inf")).to(tl.float32)
        if SHIFTED:
            value += tl.where(k == own, shift, 0.0)
        if MASKED:
            value = tl.where(k == mask, -float("inf"), value)
        return value * scale

    @triton.jit
    def _weight(value, most):  # type: ignore[no-untyped-def]
        """exp(value - most)"""
        return tl.exp2((value - most) * 1.4426950408889634)

    @triton.jit
    def _block_sums(  # type: ignore[no-untyped-def]
        logits, by_batch, by_place, by_token, zs, shifts, scale, mask, length, width,
        size, blocks,
        most, sums, brackets, extremes, each,
        SHIFTED: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr,
        BLOCKS: tl.constexpr, SIZE: tl.constexpr,
    ):  # fmt: skip
        """Of `each` blocks: the largest value and the sum of weights relative to it.

        CUT: the largest values are known; the sum is of what is kept, and the least and the
        largest value in the bracket are stored as well.
        """
        row, part = tl.program_id(0), tl.program_id(1)
        here = _here(logits, by_batch, by_place, length)
        own = tl.load(zs + row)
        shift = tl.load(shifts + row) if SHIFTED else 0.0
        j = tl.arange(0, SIZE)
        first = part * each
        last = tl.minimum(first + each, blocks)
        if CUT:
            low, high = tl.load(brackets + row * 3), tl.load(brackets + row * 3 + 1)
            edge = tl.load(brackets + row * 3 + 2)
            least = tl.full((BLOCKS,), float("inf"), tl.float32)
            largest = tl.full((BLOCKS,), -float("inf"), tl.float32)
        for start in range(first, last, BLOCKS):
            b = start + tl.arange(0, BLOCKS)
            at = row.to(tl.int64) * blocks + b
            k = b[:, None] * size + j[None, :]
            inside = (j[None, :] < size) & (k < width) & (b[:, None] < last)
            value = _values(here, k, inside, by_token, own, shift, scale, mask, SHIFTED, MASKED)
            if CUT:
                top = tl.load(most + at, mask=b < last, other=0.0)
                between = (value > low) & (value <= high)
                least = tl.minimum(least, tl.min(tl.where(between, value, float("inf")), 1))
                largest = tl.maximum(
                    largest, tl.max(tl.where(between, value, -float("inf")), 1)
                )
                weight = tl.where(value > edge, _weight(value, top[:, None]), 0.0)
            else:
                top = tl.max(value, 1)
                tl.store(most + at, top, mask=b < last)
                top = tl.where(top == -float("inf"), 0.0, top)
                weight = _weight(value, top[:, None])
            tl.store(sums + at, tl.sum(weight, 1), mask=b < last)
        if CUT:
            at = (row.to(tl.int64) * tl.num_programs(1) + part) * 2
            tl.store(extremes + at, tl.min(least, 0))
            tl.store(extremes + at + 1, tl.max(largest, 0))

    @triton.jit
    def _start(  # type: ignore[no-untyped-def]
        most, sums, blocks, width, p, tops, targets, lows, edges,
        NUM_BLOCKS: tl.constexpr, EDGES: tl.constexpr,
    ):  # fmt: skip
        """The first bracket of each row, and the mass that its kept tokens may not pass.

        Tokens below (1-p)/K together weigh less than 1-p, so the bracket may begin there.
        """
        row = tl.program_id(0)
        b = tl.arange(0, NUM_BLOCKS)
        at = row.to(tl.int64) * blocks + b
        top = tl.load(most + at, mask=b < blocks, other=-float("inf"))
        highest = tl.max(top, 0)
        held = tl.load(sums + at, mask=b < blocks, other=0.0)
        total = tl.sum(held * _weight(top, highest), 0)
        tl.store(tops + row, highest)
        tl.store(targets + row, p * total)
        low = highest + tl.log(total * ((1.0 - p) * 0.999 / width))
        tl.store(lows + row, tl.minimum(low, highest - 1e-6 * tl.abs(highest) - 1e-30))
        i = tl.arange(0, EDGES)
        tl.store(edges + row * EDGES + i, tl.zeros((EDGES,), tl.float32) + highest)

    @triton.jit
    def _bracket(  # type: ignore[no-untyped-def]
        lows,
        edges,
        masses,
        target,
        parts,
        FIRST: tl.constexpr,
        PARTS: tl.constexpr,
        EDGES: tl.constexpr,
    ):
        """(low, high] after a pass: mass(value > high) <= target < mass(value > low)."""
        row = tl.program_id(0)
        i = tl.arange(0, EDGES)
        edge = tl.load(edges + row * EDGES + i)
        low = tl.load(lows + row)
        found = tl.full((), EDGES - 1, tl.int32)
        if not FIRST:
            part = tl.arange(0, PARTS)
            at = (row.to(tl.int64) * parts + part[:, None]) * EDGES + i[None, :]
            mass = tl.sum(tl.load(masses + at, mask=part[:, None] < parts, other=0.0), 0)
            few = (mass <= target) | (i == EDGES - 1)
            found = tl.min(tl.where(few, i, EDGES - 1), 0)
        high = tl.sum(tl.where(i == found, edge, 0.0), 0)
        below = tl.sum(tl.where(i == found - 1, edge, 0.0), 0)
        return tl.where(found == 0, low, below), high

    @triton.jit
    def _narrow(  # type: ignore[no-untyped-def]
        logits, by_batch, by_place, by_token, zs, shifts, scale, mask, length, width,
        tops, targets, old_lows, old_edges, old_masses, lows, edges, masses, parts, span,
        SHIFTED: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr,
        PARTS: tl.constexpr, EDGES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    ):  # fmt: skip
        """The mass above each of seven thresholds in the bracket, of this part of a row."""
        row, part = tl.program_id(0), tl.program_id(1)
        here = _here(logits, by_batch, by_place, length)
        own = tl.load(zs + row)
        shift = tl.load(shifts + row) if SHIFTED else 0.0
        most = tl.load(tops + row)
        low, high = _bracket(
            old_lows, old_edges, old_masses, tl.load(targets + row), parts, FIRST, PARTS, EDGES
        )
        if FIRST:
            low = tl.load(old_lows + row)
        i = tl.arange(0, EDGES)
        edge = low + (high - low) * ((i + 1).to(tl.float32) * (1.0 / EDGES))
        edge = tl.where(i == EDGES - 1, high, tl.minimum(edge, high))
        if part == 0:
            tl.store(lows + row, low)
            tl.store(edges + row * EDGES + i, edge)
        e0 = tl.sum(tl.where(i == 0, edge, 0.0), 0)
        e1 = tl.sum(tl.where(i == 1, edge, 0.0), 0)
        e2 = tl.sum(tl.where(i == 2, edge, 0.0), 0)
        e3 = tl.sum(tl.where(i == 3, edge, 0.0), 0)
        e4 = tl.sum(tl.where(i == 4, edge, 0.0), 0)
        e5 = tl.sum(tl.where(i == 5, edge, 0.0), 0)
        e6 = tl.sum(tl.where(i == 6, edge, 0.0), 0)
        none = tl.zeros((ROWS,), tl.float32)
        m0, m1, m2, m3, m4, m5, m6 = none, none, none, none, none, none, none
        place = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        last = tl.minimum((part + 1) * span, width)
        for start in range(part * span, last, ROWS * LANES):
            k = start + place
            value = _values(
                here, k, k < last, by_token, own, shift, scale, mask, SHIFTED, MASKED
            )
            weight = _weight(value, most)
            m0 += tl.sum(tl.where(value > e0, weight, 0.0), 1)
            m1 += tl.sum(tl.where(value > e1, weight, 0.0), 1)
            m2 += tl.sum(tl.where(value > e2, weight, 0.0), 1)
            m3 += tl.sum(tl.where(value > e3, weight, 0.0), 1)
            m4 += tl.sum(tl.where(value > e4, weight, 0.0), 1)
            m5 += tl.sum(tl.where(value > e5, weight, 0.0), 1)
            m6 += tl.sum(tl.where(value > e6, weight, 0.0), 1)
        made = masses + (row.to(tl.int64) * parts + part) * EDGES
        tl.store(made + 0, tl.sum(m0, 0))
        tl.store(made + 1, tl.sum(m1, 0))
        tl.store(made + 2, tl.sum(m2, 0))
        tl.store(made + 3, tl.sum(m3, 0))
        tl.store(made + 4, tl.sum(m4, 0))
        tl.store(made + 5, tl.sum(m5, 0))
        tl.store(made + 6, tl.sum(m6, 0))

    @triton.jit
    def _edge(low, high, most, KEEP_CROSSING: tl.constexpr):  # type: ignore[no-untyped-def]
        """Tokens above it are kept, where one value is left in (low, high]."""
        return low if KEEP_CROSSING else tl.where(high < most, high, low)

    @triton.jit
    def _finish(  # type: ignore[no-untyped-def]
        tops, targets, lows, edges, masses, parts, brackets,
        KEEP_CROSSING: tl.constexpr, PARTS: tl.constexpr, EDGES: tl.constexpr,
    ):  # fmt: skip
        """The bracket after the last pass."""
        row = tl.program_id(0)
        low, high = _bracket(
            lows, edges, masses, tl.load(targets + row), parts, False, PARTS, EDGES
        )
        tl.store(brackets + row * 3, low)
        tl.store(brackets + row * 3 + 1, high)
        edge = _edge(low, high, tl.load(tops + row), KEEP_CROSSING)
        tl.store(brackets + row * 3 + 2, edge)

    @triton.jit
    def _settle(  # type: ignore[no-untyped-def]
        logits, by_batch, by_place, by_token, zs, shifts, scale, mask, length, width,
        size, blocks,
        most, sums, brackets, extremes, parts, tops, targets,
        SHIFTED: tl.constexpr, MASKED: tl.constexpr, KEEP_CROSSING: tl.constexpr,
        PARTS: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        """Where a bracket holds two values or more: halves it until one is left, sums again."""
        row = tl.program_id(0)
        part = tl.arange(0, PARTS)
        at = (row.to(tl.int64) * parts + part) * 2
        found = part < parts
        least = tl.min(tl.load(extremes + at, mask=found, other=float("inf")), 0)
        largest = tl.max(tl.load(extremes + at + 1, mask=found, other=-float("inf")), 0)
        if least < largest:
            here = _here(logits, by_batch, by_place, length)
            own = tl.load(zs + row)
            shift = tl.load(shifts + row) if SHIFTED else 0.0
            low, high = tl.load(brackets + row * 3), tl.load(brackets + row * 3 + 1)
            highest, target = tl.load(tops + row), tl.load(targets + row)
            place = tl.arange(0, TILE)
            while least < largest:
                middle = least + (largest - least) * 0.5
                middle = tl.where(middle < largest, middle, least)
                mass = tl.zeros((TILE,), tl.float32)
                under = tl.full((TILE,), -float("inf"), tl.float32)
                over = tl.full((TILE,), float("inf"), tl.float32)
                for start in range(0, width, TILE):
                    k = start + place
                    value = _values(
                        here, k, k < width, by_token, own, shift, scale, mask, SHIFTED, MASKED
                    )
                    above = value > middle
                    mass += tl.where(above, _weight(value, highest), 0.0)
                    between = (value > low) & (value <= high)
                    under = tl.maximum(
                        under, tl.where(between & (value <= middle), value, -float("inf"))
                    )
                    over = tl.minimum(over, tl.where(between & above, value, float("inf")))
                few = tl.sum(mass, 0) <= target
                largest = tl.where(few, tl.max(under, 0), largest)
                least = tl.where(few, least, tl.min(over, 0))
                low, high = tl.where(few, low, middle), tl.where(few, middle, high)
            edge = _edge(low, high, highest, KEEP_CROSSING)
            tl.store(brackets + row * 3 + 2, edge)
            j = tl.arange(0, SIZE)
            for start in range(0, blocks, BLOCKS):
                b = start + tl.arange(0, BLOCKS)
                place_of_sums = row.to(tl.int64) * blocks + b
                k = b[:, None] * size + j[None, :]
                inside = (j[None, :] < size) & (k < width)
                value = _values(
                    here, k, inside, by_token, own, shift, scale, mask, SHIFTED, MASKED
                )
                top = tl.load(most + place_of_sums, mask=b < blocks, other=0.0)
                weight = tl.where(value > edge, _weight(value, top[:, None]), 0.0)
                tl.store(sums + place_of_sums, tl.sum(weight, 1), mask=b < blocks)

    @triton.jit
    def _chosen(  # type: ignore[no-untyped-def]
        logits, by_batch, by_place, by_token, zs, shifts, scale, mask, length, width,
        size, blocks,
        most, sums, brackets, words, best, at_best, at_z, drawn, at_drawn,
        SHIFTED: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr, DRAW: tl.constexpr,
        WEYL: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
        NUM_BLOCKS: tl.constexpr, SIZE: tl.constexpr,
    ):  # fmt: skip
        """The most probable token, z's probability, and `counter_rng.blocked_race`."""
        row = tl.program_id(0)
        here = _here(logits, by_batch, by_place, length)
        own = tl.load(zs + row)
        shift = tl.load(shifts + row) if SHIFTED else 0.0
        edge = -float("inf")
        if CUT:
            edge = tl.load(brackets + row * 3 + 2)
        b = tl.arange(0, NUM_BLOCKS)
        j = tl.arange(0, SIZE)
        at = row.to(tl.int64) * blocks + b
        top = tl.load(most + at, mask=b < blocks, other=-float("inf"))
        highest = tl.max(top, 0)
        held = tl.load(sums + at, mask=b < blocks, other=0.0) * _weight(top, highest)
        total = tl.sum(held, 0)
        block = tl.min(tl.where((top == highest) & (b < blocks), b, blocks - 1), 0)
        k = block * size + j
        inside = (j < size) & (k < width)
        value = _values(here, k, inside, by_token, own, shift, scale, mask, SHIFTED, MASKED)
        first = block * size + tl.min(tl.where(value == highest, j, SIZE), 0)
        tl.store(best + row, tl.minimum(first, width - 1).to(tl.int64))
        tl.store(at_best + row, 1.0 / total)
        value = _values(here, own, True, by_token, own, shift, scale, mask, SHIFTED, MASKED)
        kept = tl.where(value > edge, _weight(value, highest), 0.0)
        tl.store(at_z + row, kept / total)
        if DRAW:
            state = tl.load(words + row)
            between = _mixed(state + WEYL, FIRST, SECOND)
            within = _mixed(state + WEYL + WEYL, FIRST, SECOND)
            hashed = _mixed(between + (b + 1).to(tl.int64) * WEYL, FIRST, SECOND)
            block = tl.minimum(tl.argmax(held / _exponential(hashed), 0), blocks - 1)
            k = block * size + j
            inside = (j < size) & (k < width)
            value = _values(here, k, inside, by_token, own, shift, scale, mask, SHIFTED, MASKED)
            weight = tl.where(value > edge, _weight(value, highest), 0.0)
            hashed = _mixed(within + (j + 1).to(tl.int64) * WEYL, FIRST, SECOND)
            winner = tl.argmax(weight / _exponential(hashed), 0)
            tl.store(drawn + row, tl.minimum(block * size + winner, width - 1).to(tl.int64))
            tl.store(at_drawn + row, tl.sum(tl.where(j == winner, weight, 0.0), 0) / total)


class RowReader:
    """The kernels over logits (B, L, K), which begin with the sums of all blocks at once.

    z         (B, L), whose probability is asked for
    shift     (B, L), added to the logit of z; None: nothing
    mask_id   a token that is impossible; None: none is
    top_p     mass of the tokens that are kept; None: all are
    """

    def __init__(
        self,
        logits: Tensor,
        z: Tensor,
        temperature: float = 1.0,
        top_p: float | None = None,
        keep_crossing: bool = True,
        shift: Tensor | None = None,
        mask_id: int | None = None,
    ) -> None:
        self.logits, self.num_rows, self.width = logits, z.numel(), logits.shape[-1]
        self.z = z.contiguous()
        self.shift = self.z if shift is None else shift.float().contiguous()
        self.top_p, self.keep_crossing = top_p, keep_crossing
        strides = logits.stride()
        mask = -1 if mask_id is None else mask_id
        self.rows = (logits, *strides, self.z, self.shift, 1 / temperature, mask)
        self.rows = (*self.rows, z.shape[1], self.width)
        self.flags = {"SHIFTED": shift is not None, "MASKED": mask_id is not None}
        self.size = block_size(self.width)
        self.blocks = -(-self.width // self.size)
        room = triton.next_power_of_2(self.size)
        most = triton.next_power_of_2(self.blocks)
        self.tile = {"SIZE": room, "BLOCKS": min(max(_SUM_TILE // room, 1), most)}
        self.most, self.sums = (
            self._new(self.num_rows, self.blocks),
            self._new(self.num_rows, self.blocks),
        )
        self.brackets = self.most  # not read where nothing is cut
        self._sum(self.most, cut=False)
        if top_p is not None:
            self._cut(top_p)

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.logits.device)

    def _run(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        with torch.cuda.device_of(self.logits):
            kernel[grid](*args, **options)

    def _sum(self, extremes: Tensor, cut: bool) -> None:
        each = max(_SUM_BLOCKS, self.tile["BLOCKS"])
        grid = (self.num_rows, -(-self.blocks // each))
        self._run(
            _block_sums, grid, *self.rows, self.size, self.blocks, self.most, self.sums,
            self.brackets, extremes, each, **self.flags, CUT=cut, **self.tile,
            num_warps=_SUM_WARPS,
        )  # fmt: skip

    def _cut(self, p: float) -> None:
        """Find what top-p keeps, and sum the blocks again without the rest."""
        n, lanes = self.num_rows, 16 // max(self.logits.element_size(), 2)
        rows = min(_PASS_ROWS, max(triton.next_power_of_2(self.width) // lanes, 1))
        tile = rows * lanes
        parts = min(-(-self.width // tile), max(_PASS_PROGRAMS // n, 1), 64)
        span = -(-self.width // (parts * tile)) * tile
        parts = -(-self.width // span)
        room = {"PARTS": triton.next_power_of_2(parts), "EDGES": _EDGES}
        tops, targets = self._new(n), self._new(n)
        old, new = (
            [self._new(n), self._new(n, _EDGES), self._new(n, parts, _EDGES)] for _ in "12"
        )
        top = {"NUM_BLOCKS": triton.next_power_of_2(self.blocks), "EDGES": _EDGES}
        stats = self.most, self.sums, self.blocks, self.width, p
        self._run(_start, (n,), *stats, tops, targets, *old[:2], **top)
        for i in range(_PASSES.get(self.logits.element_size(), 6)):
            self._run(
                _narrow, (n, parts), *self.rows, tops, targets, *old, *new, parts, span,
                **self.flags, FIRST=i == 0, **room, ROWS=rows, LANES=lanes,
                num_warps=_PASS_WARPS,
            )  # fmt: skip
            old, new = new, old
        self.brackets = self._new(n, 3)
        kept = {"KEEP_CROSSING": self.keep_crossing}
        self._run(_finish, (n,), tops, targets, *old, parts, self.brackets, **kept, **room)
        each = max(_SUM_BLOCKS, self.tile["BLOCKS"])
        parts = -(-self.blocks // each)
        extremes = self._new(n, parts, 2)
        self._sum(extremes, cut=True)
        self._run(
            _settle, (n,), *self.rows, self.size, self.blocks, self.most, self.sums,
            self.brackets, extremes, parts, tops, targets, **self.flags, **kept,
            PARTS=triton.next_power_of_2(parts), **self.tile,
            TILE=min(2048, triton.next_power_of_2(self.width)),
        )  # fmt: skip

    def choose(self, bits: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of each row (n,): the most probable token and its probability, that of z, the token
        drawn by `bits` and its probability; without bits the most probable one again."""
        n = self.num_rows
        best, drawn = self._new(n, dtype=torch.int64), self._new(n, dtype=torch.int64)
        at_best, at_z, at_drawn = self._new(n), self._new(n), self._new(n)
        words = self.z if bits is None else bits.contiguous()
        self._run(
            _chosen, (n,), *self.rows, self.size, self.blocks, self.most, self.sums,
            self.brackets, words, best, at_best, at_z, drawn, at_drawn, **self.flags,
            CUT=self.top_p is not None, DRAW=bits is not None,
            WEYL=WEYL, FIRST=MULTIPLY[0], SECOND=MULTIPLY[1],
            NUM_BLOCKS=triton.next_power_of_2(self.blocks), SIZE=self.tile["SIZE"],
        )  # fmt: skip
        if bits is None:
            return best, at_best, at_z, best, at_best
        return best, at_best, at_z, drawn, at_drawn

    @property
    def edges(self) -> Tensor:
        """Tokens whose shifted logit over the temperature is above it are kept, (n,)."""
        return self.brackets[:, 2]

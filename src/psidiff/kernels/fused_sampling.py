"""From a row of logits to what a step asks of it: x_theta at one token, and a draw.

`plain` is the same in torch: the fallback, and the reference in tests. The kernel never holds a
row: each pass reads it again in tiles, from the cache, and takes its exponentials anew; the
race inside the winning block reads that block alone. Both use the random numbers of
`counter_rng.blocked_race`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import truncation
from .counter_rng import MULTIPLY, WEYL, block_size, blocked_race
from .kernel_check import Work, has_triton, matches_reference

_COMPARED, _ENTRIES = 128, 2**24  # rows that a kernel is compared on, their logits
_TILE, _WARPS = 4096, 32  # the fastest of six on an H200 (docs/benchmarks.md)
TopP = float | Tensor | None  # of all rows, or (N, 1)

if has_triton:
    import triton
    import triton.language as tl

    @triton.jit
    def _mixed(state, FIRST: tl.constexpr, SECOND: tl.constexpr):  # type: ignore[no-untyped-def]
        """`counter.mix`"""
        state = state ^ ((state >> 30) & 0x3FFFFFFFF)
        state = state * FIRST
        state = state ^ ((state >> 27) & 0x1FFFFFFFFF)
        state = state * SECOND
        return state ^ ((state >> 31) & 0x1FFFFFFFF)

    @triton.jit
    def _exponential(bits):  # type: ignore[no-untyped-def]
        """`counter.exponential`: -log1p(-u) of u = (n + 1/2) 2^-63."""
        u = ((bits & 0x7FFFFFFFFFFFFFFF).to(tl.float32) + 0.5) * 1.0842021724855044e-19
        u = tl.minimum(u, 0.99999994)
        left = 1.0 - u
        lost = left - 1.0  # -u without the digits that 1 - u loses
        exact = lost == 0.0
        return tl.where(exact, u, tl.log(left) * (u / tl.where(exact, 1.0, lost)))

    @triton.jit
    def _weights(row, place, inside, most):  # type: ignore[no-untyped-def]
        """exp(l - most), by the unit for 2^x alone: what is below 2^-126 becomes 0."""
        value = tl.load(row + place, mask=inside, other=-float("inf")).to(tl.float32)
        return tl.exp2((value - most) * 1.4426950408889634)

    @triton.jit
    def _above(weight, edge, KEEP_CROSSING: tl.constexpr):  # type: ignore[no-untyped-def]
        """1 for weights from an edge on, given as bits: without it (keep) or with it (drop)."""
        edge = edge.to(tl.float32, bitcast=True)
        above = weight > edge if KEEP_CROSSING else weight >= edge
        return above.to(tl.float32)

    @triton.jit
    def _halved(few, edge, count, low, from_low, high, from_high):  # type: ignore[no-untyped-def]
        """(low, high] and how many tokens there are from each on, cut at an edge."""
        low, from_low = tl.where(few, low, edge), tl.where(few, from_low, count)
        high, from_high = tl.where(few, edge, high), tl.where(few, count, from_high)
        return low, from_low, high, from_high

    @triton.jit
    def _cut(  # type: ignore[no-untyped-def]
        row, width, most, p, KEEP_CROSSING: tl.constexpr, TILE: tl.constexpr
    ):
        """The weight from which top-p keeps tokens: the bisection of `truncation.top_p`, two
        halvings a pass, until `low` and `high` are neighbours or have one token between them.
        """
        place = tl.arange(0, TILE)
        total = tl.zeros((TILE,), tl.float32)
        for start in range(0, width, TILE):
            total += _weights(row + start, place, place < width - start, most)
        total = tl.sum(total, 0)
        target = p * total
        low = (total * ((1.0 - p) * 0.999 / width)).to(tl.int32, bitcast=True)
        high = tl.full((), 0x3F800000, tl.int32)  # the bits of 1.0, the largest weight
        from_high = tl.full((), 0.0, tl.float32)
        from_low = from_high + width
        while (high - low > 1) & (from_low - from_high > 1):
            middle = low + (high - low) // 2
            lower, upper = low + (middle - low) // 2, middle + (high - middle) // 2
            nothing = tl.zeros((TILE,), tl.float32)
            mass_l, mass_m, mass_u = nothing, nothing, nothing
            count_l, count_m, count_u = nothing, nothing, nothing
            for start in range(0, width, TILE):
                weight = _weights(row + start, place, place < width - start, most)
                above_l = _above(weight, lower, KEEP_CROSSING)
                above_m = _above(weight, middle, KEEP_CROSSING)
                above_u = _above(weight, upper, KEEP_CROSSING)
                mass_l, count_l = mass_l + above_l * weight, count_l + above_l
                mass_m, count_m = mass_m + above_m * weight, count_m + above_m
                mass_u, count_u = mass_u + above_u * weight, count_u + above_u
            few = tl.sum(mass_m, 0) <= target
            mass = tl.where(few, tl.sum(mass_l, 0), tl.sum(mass_u, 0))
            count = tl.where(few, tl.sum(count_l, 0), tl.sum(count_u, 0))
            edge = tl.where(few, lower, upper)
            low, from_low, high, from_high = _halved(
                few, middle, tl.sum(count_m, 0), low, from_low, high, from_high
            )
            low, from_low, high, from_high = _halved(
                mass <= target, edge, count, low, from_low, high, from_high
            )
        cut = low + 1 if KEEP_CROSSING else high
        return cut.to(tl.float32, bitcast=True)

    @triton.jit
    def _row(  # type: ignore[no-untyped-def]  # Triton would look for the types' names
        logits,
        zs,
        words,
        at_z,
        drawn,
        width,
        size,
        ps,
        TOP_P: tl.constexpr,
        KEEP_CROSSING: tl.constexpr,
        WEYL: tl.constexpr,
        FIRST: tl.constexpr,
        SECOND: tl.constexpr,
        TILE: tl.constexpr,
        BLOCKS: tl.constexpr,
        SIZE: tl.constexpr,
    ):
        row = tl.program_id(0)
        here = logits + row.to(tl.int64) * width
        place = tl.arange(0, TILE)
        most = tl.full((TILE,), -float("inf"), tl.float32)
        for start in range(0, width, TILE):
            inside = place < width - start
            value = tl.load(here + start + place, mask=inside, other=-float("inf"))
            most = tl.maximum(most, value)
        most = tl.max(most, 0)
        cut = tl.full((), 0.0, tl.float32)
        if TOP_P:
            p = tl.load(ps + row)
            if p < 1.0:
                cut = _cut(here, width, most, p, KEEP_CROSSING, TILE)

        state = tl.load(words + row)
        between = _mixed(state + WEYL, FIRST, SECOND)
        within = _mixed(state + WEYL + WEYL, FIRST, SECOND)
        total = tl.zeros((BLOCKS,), tl.float32)
        best = tl.zeros((BLOCKS,), tl.float32)
        winner = tl.zeros((BLOCKS,), tl.int32)
        j = tl.arange(0, SIZE)
        for first in range(0, width, BLOCKS * size):
            b = first // size + tl.arange(0, BLOCKS)
            k = b[:, None] * size + j[None, :]
            weight = _weights(here, k, (j[None, :] < size) & (k < width), most)
            sums = tl.sum(tl.where(weight < cut, 0.0, weight), 1)
            total += sums
            hashed = _mixed(between + (b + 1).to(tl.int64) * WEYL, FIRST, SECOND)
            ratio = sums / _exponential(hashed)
            winner = tl.where(ratio > best, b, winner)
            best = tl.maximum(ratio, best)
        block = tl.min(tl.where(best == tl.max(best, 0), winner, width), 0)

        own = _weights(here, tl.load(zs + row), True, most)
        tl.store(at_z + row, tl.where(own < cut, 0.0, own) / tl.sum(total, 0))
        weight = _weights(here, block * size + j, (j < size) & (block * size + j < width), most)
        weight = tl.where(weight < cut, 0.0, weight)
        hashed = _mixed(within + (j + 1).to(tl.int64) * WEYL, FIRST, SECOND)
        chosen = block * size + tl.argmax(weight / _exponential(hashed), 0)
        tl.store(drawn + row, chosen.to(tl.int64))


def draw(
    logits: Tensor, z: Tensor, bits: Tensor, top_p: TopP, keep_crossing: bool = True
) -> tuple[Tensor, Tensor]:
    """Of rows (N, K): x_theta at z (N,), and a token drawn from it by the words `bits` (N,)."""
    form = by_kernel if available(logits) and _right(logits, top_p, keep_crossing) else plain
    return form(logits, z, bits, top_p, keep_crossing)


def _right(logits: Tensor, top_p: TopP, keep_crossing: bool) -> bool:
    """Whether the kernel draws from rows of this width what `plain` draws."""
    width, device = logits.shape[-1], logits.device
    truncated = top_p is not None

    def on_fixed(form: Work) -> tuple[Tensor, Tensor]:
        g = torch.Generator(device).manual_seed(0)
        count = min(_COMPARED, max(_ENTRIES // width, 1))
        rows = 3 * torch.randn(count, width, generator=g, device=device)
        z = torch.randint(width, (count,), generator=g, device=device)
        bits = torch.randint(-(2**63), 2**63 - 1, (count,), generator=g, device=device)
        p = (1 - 0.1 * (z[:, None] % 2)).to(rows) if truncated else None  # 1 or 0.9
        return form(rows, z, bits, p, keep_crossing)

    variant = (width, truncated, keep_crossing)
    return matches_reference(by_kernel, variant, device, on_fixed, by_kernel, plain)


def available(logits: Tensor) -> bool:
    """A GPU with Triton, and rows in float32."""
    return has_triton and logits.is_cuda and logits.dtype is torch.float32


def plain(
    logits: Tensor, z: Tensor, bits: Tensor, top_p: TopP, keep_crossing: bool = True
) -> tuple[Tensor, Tensor]:
    if top_p is not None:
        logits = truncation.top_p(logits, top_p, keep_crossing, static=True)
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    x_z = weights.gather(-1, z[:, None]) / weights.sum(-1, keepdim=True)
    return x_z[:, 0], blocked_race(weights, bits)


def by_kernel(
    logits: Tensor, z: Tensor, bits: Tensor, top_p: TopP, keep_crossing: bool = True
) -> tuple[Tensor, Tensor]:
    logits, width = logits.contiguous(), logits.shape[-1]
    x_z = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    drawn = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    p = logits.new_ones(len(logits), 1) * (1.0 if top_p is None else top_p)
    tile, size = min(_TILE, triton.next_power_of_2(width)), block_size(width)
    room = triton.next_power_of_2(size)
    with torch.cuda.device_of(logits):
        _row[(len(logits),)](
            logits,
            z.contiguous(),
            bits.contiguous(),
            x_z,
            drawn,
            width,
            size,
            p,
            TOP_P=top_p is not None,
            KEEP_CROSSING=keep_crossing,
            WEYL=WEYL,
            FIRST=MULTIPLY[0],
            SECOND=MULTIPLY[1],
            TILE=tile,
            BLOCKS=max(1, tile // room),
            SIZE=room,
            num_warps=min(_WARPS, max(1, tile // 128)),
        )
    return x_z, drawn

"""From a row of logits to what a step asks of it: x_theta at one token, and a draw.

`plain` is the same in torch: the fallback, and the reference in tests. The kernel reads a row
once; softmax, top-p and the race between blocks stay in registers, and the race inside the
winning block reads that block again. Both use the random numbers of `race.block_race`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import truncate
from .counter import MULTIPLY, WEYL
from .race import block_race, block_size
from .trust import has_triton, trusted

WIDEST = 2**16  # entries of a row, in whole blocks, that one program can hold
_ONE = 0x3F800000  # the bits of 1.0, the largest weight

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
    def _row(  # type: ignore[no-untyped-def]  # Triton would look for the types' names
        logits,
        zs,
        words,
        at_z,
        drawn,
        width,
        size,
        p,
        TOP_P: tl.constexpr,
        KEEP_CROSSING: tl.constexpr,
        HALVINGS: tl.constexpr,
        WEYL: tl.constexpr,
        FIRST: tl.constexpr,
        SECOND: tl.constexpr,
        BLOCKS: tl.constexpr,
        SIZE: tl.constexpr,
    ):
        row = tl.program_id(0)
        here = logits + row.to(tl.int64) * width
        b, j = tl.arange(0, BLOCKS), tl.arange(0, SIZE)
        place = b[:, None] * size + j[None, :]
        inside = (j[None, :] < size) & (place < width)
        value = tl.load(here + place, mask=inside, other=-float("inf")).to(tl.float32)
        most = tl.max(tl.max(value, 1), 0)
        weight = tl.exp(value - most)
        cut = 0.0
        if TOP_P:
            target = p * tl.sum(tl.sum(weight, 1), 0)
            low = tl.full((), 0, tl.int32)
            high = tl.full((), 0x3F800000, tl.int32)
            for _ in range(HALVINGS):
                middle = low + (high - low) // 2
                edge = middle.to(tl.float32, bitcast=True)
                above = weight > edge if KEEP_CROSSING else weight >= edge
                few = tl.sum(tl.sum(tl.where(above, weight, 0.0), 1), 0) <= target
                high = tl.where(few, middle, high)
                low = tl.where(few, low, middle)
            cut = high.to(tl.float32, bitcast=True)
            weight = tl.where(weight < cut, 0.0, weight)
        sums = tl.sum(weight, 1)
        z = tl.load(zs + row)
        own = tl.exp(tl.load(here + z).to(tl.float32) - most)
        own = tl.where(own < cut, 0.0, own)
        tl.store(at_z + row, own / tl.sum(sums, 0))

        state = tl.load(words + row)
        between = _mixed(state + WEYL, FIRST, SECOND)
        within = _mixed(state + WEYL + WEYL, FIRST, SECOND)
        hashed = _mixed(between + (b + 1).to(tl.int64) * WEYL, FIRST, SECOND)
        block = tl.argmax(sums / _exponential(hashed), 0)
        again = block * size + j
        some = (j < size) & (again < width)
        value = tl.load(here + again, mask=some, other=-float("inf")).to(tl.float32)
        weight = tl.exp(value - most)
        weight = tl.where(weight < cut, 0.0, weight)
        hashed = _mixed(within + (j + 1).to(tl.int64) * WEYL, FIRST, SECOND)
        chosen = block * size + tl.argmax(weight / _exponential(hashed), 0)
        tl.store(drawn + row, chosen.to(tl.int64))


def draw(
    logits: Tensor, z: Tensor, bits: Tensor, top_p: float | None, keep_crossing: bool = True
) -> tuple[Tensor, Tensor]:
    """Of rows (N, K): x_theta at z (N,), and a token drawn from it by the words `bits` (N,)."""
    inputs = (logits, z, bits, top_p, keep_crossing)
    if available(logits) and trusted(
        by_kernel, logits.device, lambda: by_kernel(*inputs), lambda: plain(*inputs)
    ):
        return by_kernel(*inputs)
    return plain(*inputs)


def available(logits: Tensor) -> bool:
    """A GPU with Triton, and rows that fit."""
    if not has_triton or not logits.is_cuda or logits.dtype is not torch.float32:
        return False
    blocks, size = _tile(logits.shape[-1])
    return blocks * size <= WIDEST


def plain(
    logits: Tensor, z: Tensor, bits: Tensor, top_p: float | None, keep_crossing: bool = True
) -> tuple[Tensor, Tensor]:
    if top_p is not None:
        logits = truncate.top_p(logits, top_p, keep_crossing, whole=True)
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    x_z = weights.gather(-1, z[:, None]) / weights.sum(-1, keepdim=True)
    return x_z[:, 0], block_race(weights, bits)


def by_kernel(
    logits: Tensor, z: Tensor, bits: Tensor, top_p: float | None, keep_crossing: bool = True
) -> tuple[Tensor, Tensor]:
    logits, width = logits.contiguous(), logits.shape[-1]
    x_z = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    drawn = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    blocks, size = _tile(width)
    with torch.cuda.device_of(logits):
        _row[(len(logits),)](
            logits,
            z.contiguous(),
            bits.contiguous(),
            x_z,
            drawn,
            width,
            block_size(width),
            1.0 if top_p is None else top_p,
            TOP_P=top_p is not None,
            KEEP_CROSSING=keep_crossing,
            HALVINGS=_ONE.bit_length(),
            WEYL=WEYL,
            FIRST=MULTIPLY[0],
            SECOND=MULTIPLY[1],
            BLOCKS=blocks,
            SIZE=size,
            num_warps=min(32, max(1, blocks * size // 2048)),
        )
    return x_z, drawn


def _tile(width: int) -> tuple[int, int]:
    """How many blocks and entries a block the kernel has room for: powers of two."""
    size = block_size(width)
    blocks = -(-width // size)
    return 1 << (blocks - 1).bit_length(), 1 << (size - 1).bit_length()

"""Top-p of whole rows in one kernel: a row is read once, and the search stays in registers.

`truncate.top_p` is the same in plain torch: the fallback, and the reference in tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .trust import has_triton

WIDEST = 2**16  # entries of a row that one program can hold
_ONE = 0x3F800000  # the bits of 1.0, the largest weight

if has_triton:
    import triton
    import triton.language as tl

    @triton.jit
    def _cut_row(  # type: ignore[no-untyped-def]  # Triton would look for the types' names
        logits,
        kept,
        width,
        p,
        KEEP_CROSSING: tl.constexpr,
        HALVINGS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One row: bisect the bit patterns of its weights, as `truncate.top_p` does."""
        row = tl.program_id(0).to(tl.int64) * width
        place = tl.arange(0, BLOCK)
        inside = place < width
        value = tl.load(logits + row + place, mask=inside, other=-float("inf"))
        weight = tl.exp(value - tl.max(value, 0))
        target = p * tl.sum(weight, 0)
        low = tl.zeros((1,), tl.int32)
        high = low + 0x3F800000
        for _ in range(HALVINGS):
            middle = low + (high - low) // 2
            cut = middle.to(tl.float32, bitcast=True)
            above = weight > cut if KEEP_CROSSING else weight >= cut
            few = tl.sum(tl.where(above, weight, 0.0), 0) <= target
            high = tl.where(few, middle, high)
            low = tl.where(few, low, middle)
        light = weight < high.to(tl.float32, bitcast=True)
        tl.store(kept + row + place, tl.where(light, -float("inf"), value), mask=inside)


def available(logits: Tensor) -> bool:
    """A GPU with Triton, and rows that fit."""
    fits = logits.dtype is torch.float32 and logits.shape[-1] <= WIDEST
    return has_triton and logits.is_cuda and fits


def top_p(logits: Tensor, p: float, keep_crossing: bool = True) -> Tensor:
    """Rows (N, K) in which all but the nucleus is -inf."""
    logits = logits.contiguous()
    kept = torch.empty_like(logits)
    block = triton.next_power_of_2(logits.shape[-1])
    with torch.cuda.device_of(logits):
        _cut_row[(len(logits),)](
            logits,
            kept,
            logits.shape[-1],
            p,
            KEEP_CROSSING=keep_crossing,
            HALVINGS=_ONE.bit_length(),
            BLOCK=block,
            num_warps=min(32, max(4, block // 2048)),
        )
    return kept

"""The finalizer of `counter_rng` as one kernel: eleven small operations of torch otherwise, and
a step hashes six times."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .kernel_check import has_triton, matches_reference

_BLOCK = 1024

if has_triton:
    import triton
    import triton.language as tl

    @triton.jit
    def _mix(state, count, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(state + at, mask=at < count, other=0)
        value = value ^ ((value >> 30) & 0x3FFFFFFFF)
        value = value * FIRST
        value = value ^ ((value >> 27) & 0x1FFFFFFFFF)
        value = value * SECOND
        value = value ^ ((value >> 31) & 0x1FFFFFFFF)
        tl.store(state + at, value, mask=at < count)


def usable(state: Tensor, multiply: tuple[int, int], plain: Callable[[Tensor], Tensor]) -> bool:
    """Whether the kernel is there for this tensor, and does what `plain` does."""
    if not (has_triton and state.is_cuda and state.is_contiguous() and state.numel()):
        return False

    def on_fixed(form: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        words = torch.arange(-500, 500, device=state.device) * multiply[0]
        return form(words.clone()), form(words + 1)

    def fast(words: Tensor) -> Tensor:
        return mix_in_place(words, multiply)

    return matches_reference(mix_in_place, (), state.device, on_fixed, fast, plain)  # type: ignore[arg-type]


def mix_in_place(state: Tensor, multiply: tuple[int, int]) -> Tensor:
    """`counter_rng.mix` of contiguous words."""
    count = state.numel()
    with torch.cuda.device_of(state):
        _mix[(triton.cdiv(count, _BLOCK),)](state, count, *multiply, _BLOCK)
    return state

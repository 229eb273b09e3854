"""Random numbers as a function of where they are used, and exact draws of tokens from them.

Every number is a hash of (key, sample, step, position, purpose), so it does not depend on the
batch, the chunk or the process that asks for it. The hash is a chain of splitmix64 finalizers
(variant 13 of D. Stafford), one for each coordinate, in wrapping 64-bit integers.

Tokens are drawn from rows of unnormalised weights by an exponential race, in float32 too: with
E_j ~ Exp(1), argmax_j w_j / E_j has distribution w / sum(w). Run over K tokens it needs K
random numbers a row. A race between blocks, by their sums, then one inside the winning block
has the same law and needs about 2 sqrt(K).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from . import mix_kernel

WEYL = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio as a signed 64-bit integer
MULTIPLY = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_POSITIVE = 2**63 - 1


class Purpose(IntEnum):
    """What a number is for: two purposes never share one."""

    START = 0
    COIN = 1
    DRAW = 2
    NOISE = 3
    SELECT = 4


def mix(state: Tensor) -> Tensor:
    """The splitmix64 finalizer, a bijection of 64-bit integers. Consumes `state`."""
    if state.is_cuda and mix_kernel.usable(state, MULTIPLY, _mix):
        return mix_kernel.mix_in_place(state, MULTIPLY)
    return _mix(state)


def _mix(state: Tensor) -> Tensor:
    """`mix` in torch."""
    state ^= (state >> 30) & (2**34 - 1)  # `>>` drags the sign along; the mask removes it
    state *= MULTIPLY[0]
    state ^= (state >> 27) & (2**37 - 1)
    state *= MULTIPLY[1]
    state ^= (state >> 31) & (2**33 - 1)
    return state


def fold_in(state: Tensor, coordinate: Tensor | int) -> Tensor:
    """Another coordinate goes into the hash."""
    if isinstance(coordinate, Tensor):
        return mix(state + (coordinate + 1) * WEYL)
    return mix(state + _wrapped((coordinate + 1) * WEYL))


def split(state: Tensor, count: int) -> Tensor:
    """`count` independent hashes for each entry of `state`: (...) -> (..., count)."""
    return fold_in(state[..., None], torch.arange(count, device=state.device))


def device_of(generator: Generator | None) -> torch.device:
    """Where a generator lives; the CPU for torch's global one."""
    if generator is None:
        return torch.device("cpu")
    if not isinstance(generator, Generator):
        raise ValueError(f"generator must be a torch.Generator or None, got {generator!r}")
    return generator.device


def new_key(generator: Generator | None) -> int:
    """One 64-bit key from the generator; None is torch's global one."""
    return int(_drawn_key(generator))


def new_key_on(device: torch.device, generator: Generator | None) -> Tensor:
    """`new_key` as a tensor () on a device; the host does not wait for the generator's."""
    key = _drawn_key(generator)
    if key.device == device:
        return key
    return torch.full((), int(key), dtype=torch.int64, device=device)


def _drawn_key(generator: Generator | None) -> Tensor:
    key = torch.empty((), dtype=torch.int64, device=device_of(generator))
    return key.random_(-(2**63), None, generator=generator)


def _wrapped(number: int) -> int:
    """A whole number as a signed 64-bit one."""
    return (number + 2**63) % 2**64 - 2**63


def uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """u in (0, 1) with full relative resolution near 0, where the winner of a race lives.

    63 bits as (n + 1/2) 2^-63, rounded to `dtype`. Rounding could give 1; the largest value
    is the largest number below it.
    """
    below_one = 1 - torch.finfo(dtype).eps / 2
    return ((bits & _POSITIVE).to(dtype) + 0.5).mul_(2.0**-63).clamp_(max=below_one)


def exponential(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """E = -log1p(-u) ~ Exp(1); -log(u) would lose the small values that decide a race."""
    return uniform(bits, dtype).neg_().log1p_().neg_()


@dataclass(frozen=True)
class CounterRNG:
    """The random numbers of one run over a (B, L) block of samples."""

    key: int
    shape: tuple[int, int]
    first_index: int = 0
    device: torch.device | str = "cpu"

    @classmethod
    def seeded(
        cls, generator: Generator | None, shape: tuple[int, int], device: torch.device | str
    ) -> CounterRNG:
        """The stream whose key is the generator's next 64 bits."""
        return cls(new_key(generator), shape, 0, device)

    def at(self, step: int | Tensor) -> Tensor:
        """The hash of (key, sample, step, position), to which a purpose is added: (B, L)."""
        num_samples, length = self.shape
        state = torch.full((), self.key, dtype=torch.int64, device=self.device)
        samples = torch.arange(num_samples, device=self.device) + self.first_index
        state = fold_in(fold_in(state, samples), step)
        return fold_in(state[:, None], torch.arange(length, device=self.device))

    def bits(self, step: int, purpose: Purpose) -> Tensor:
        """One 64-bit hash for each token: (B, L)."""
        return fold_in(self.at(step), int(purpose))

    def uniform(self, step: int, purpose: Purpose, dtype: torch.dtype) -> Tensor:
        """One u in (0, 1) for each token: (B, L)."""
        return uniform(self.bits(step, purpose), dtype)


def race(weights: Tensor, bits: Tensor) -> Tensor:
    """The plain race over the last dimension: weights (N, K), bits (N,) -> ids (N,)."""
    return (weights / exponential(split(bits, weights.shape[-1]), weights.dtype)).argmax(-1)


def blocked_race(weights: Tensor, bits: Tensor) -> Tensor:
    """The same law as `race` from about 2 sqrt(K) random numbers a row."""
    num_rows, width = weights.shape
    size = block_size(width)
    blocks = in_blocks(weights, size)
    between, within = split(bits, 2).unbind(-1)
    block = race(blocks.sum(-1), between)
    inside = blocks[torch.arange(num_rows, device=weights.device), block]
    return block * size + race(inside, within)


def block_size(width: int) -> int:
    """A divisor of the width near its square root, or the square root itself."""
    root = math.isqrt(width)
    for size in range(root, max(root // 3, 1), -1):
        if width % size == 0:
            return size
    return root


def in_blocks(weights: Tensor, size: int) -> Tensor:
    """(N, K) -> (N, blocks, size), padded with zeros only where the size does not divide K."""
    short = -weights.shape[-1] % size
    padded = F.pad(weights, (0, short)) if short else weights
    return padded.view(len(weights), padded.shape[-1] // size, size)

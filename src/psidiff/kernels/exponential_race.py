"""Drawing one token for each row of unnormalised weights, exactly, in float32 too.

The exponential race: with E_j ~ Exp(1), argmax_j w_j / E_j has distribution w / sum(w). Run
over K tokens it needs K random numbers a row. A race between blocks, by their sums, then one
inside the winning block has the same law and needs about 2 sqrt(K).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .counter_rng import exponential, lanes


def race(weights: Tensor, bits: Tensor) -> Tensor:
    """The plain race over the last dimension: weights (N, K), bits (N,) -> ids (N,)."""
    return (weights / exponential(lanes(bits, weights.shape[-1]), weights.dtype)).argmax(-1)


def block_race(weights: Tensor, bits: Tensor) -> Tensor:
    """The same law as `race` from about 2 sqrt(K) random numbers a row."""
    num_rows, width = weights.shape
    size = block_size(width)
    blocks = in_blocks(weights, size)
    between, within = lanes(bits, 2).unbind(-1)
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

"""Tokens, noise levels, labels and positions as vectors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..limits import check_limit
from ..types import Level, SoftTokens, as_count, per_token

Noisy = Tensor | SoftTokens
"""What networks read: ids (B, L), k weighted ids a position, or probabilities (B, L, K)."""


def total_noise(alpha: Level, z: Tensor) -> Tensor:
    """sigma = -log alpha, (B or 1, L or 1) in float32: what networks are told of the level."""
    level: Any = per_token(alpha)
    if isinstance(level, Tensor):
        level = level.to(z.device, torch.float32)
    else:  # made on the device: a copy from the host would wait for it
        level = torch.full((), level, dtype=torch.float32, device=z.device)
    while level.ndim < 2:
        level = level[None]
    return -level.log()


def sinusoid(values: Tensor, width: int, last: int, sine_first: bool) -> Tensor:
    """cos and sin of values times frequencies from 1 down to 1e-4, reached at index `last`."""
    half = width // 2
    index = torch.arange(half, dtype=torch.float32, device=values.device)
    angle = values[..., None].float() * torch.exp(-math.log(10_000) * index / last)
    parts = (angle.sin(), angle.cos()) if sine_first else (angle.cos(), angle.sin())
    return torch.cat(parts, -1)


def class_ids(labels: Tensor | None, num_classes: int | None, like: Tensor) -> Tensor | None:
    """One id a sequence; no label is the null class, the last. None: there are no classes."""
    if num_classes is None and labels is not None:
        raise ValueError("this network was built without classes, but got labels")
    if num_classes is None or labels is not None:
        return labels
    return torch.full((len(like),), num_classes, device=like.device)


def check_tables(**tables: tuple[int | None, int]) -> None:
    """There are tables of so many rows, if any, of a width, and a machine for each."""
    for name, (rows, width) in tables.items():
        if rows is not None:
            size = as_count(name, rows) * width
            about = f"has a table of {size:,} numbers ({name})"
            check_limit("parameters", size, "the network", about)


class TokenEmbedding(nn.Embedding):
    """Rows of a table; for soft tokens their weighted sum.

    Released files call the table `embedding`; libraries that change it call it `weight`.
    """

    embedding: nn.Parameter

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter("embedding" if name == "weight" else name, param)

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        return self.embedding

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))

    def forward(self, z: Noisy) -> Tensor:
        if isinstance(z, SoftTokens):
            ids, weights = z.ids.flatten(0, 1), z.weights.flatten(0, 1).to(self.embedding)
            bags = F.embedding_bag(ids, self.embedding, per_sample_weights=weights, mode="sum")
            return bags.view(*z.hard.shape, -1)
        if z.is_floating_point():
            return z.to(self.embedding) @ self.embedding
        return F.embedding(z, self.embedding)


class NoiseEmbedding(nn.Module):
    """sigma -> sinusoids -> MLP -> SiLU."""

    frequencies = 256

    def __init__(self, width: int) -> None:
        super().__init__()
        first = nn.Linear(self.frequencies, width)
        self.mlp: nn.Sequential = nn.Sequential(first, nn.SiLU(), nn.Linear(width, width))

    def forward(self, sigma: Tensor) -> Tensor:
        waves = sinusoid(sigma, self.frequencies, self.frequencies // 2, sine_first=False)
        like = next(self.mlp.parameters(), waves)  # a quantized layer has none
        return F.silu(self.mlp(waves.to(like.dtype)))


CosSin = tuple[Tensor, Tensor]


class Rotary(nn.Module):
    """Positions as rotations of pairs (i, i + d/2) of each head's d dimensions.

    The angles are made once for all blocks (`forward`), in float32: made anew in each block
    they were a fifth of a training step. `inv_freq` is here because released files hold it;
    it has the precision that the parameters have, and angles grow with the place.
    """

    inv_freq: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("inv_freq", self.frequencies(None))

    def frequencies(self, device: torch.device | None) -> Tensor:
        pair = torch.arange(0, self.width, 2, dtype=torch.float32, device=device)
        return 10_000.0 ** -(pair / self.width)

    def forward(self, length: int, device: torch.device) -> CosSin:
        """cos and sin of the angles of all places, (L, d/2)"""
        place = torch.arange(length, dtype=torch.float32, device=device)
        angle = place[:, None] * self.frequencies(device)
        return angle.cos(), angle.sin()


def apply_rotary(x: Tensor, rotary: CosSin) -> Tensor:
    """x (B, heads, L, d)"""
    cos, sin = rotary
    first, second = x.chunk(2, -1)
    both = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return both.to(x.dtype)

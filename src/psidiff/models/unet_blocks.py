"""What the U-Net is made of: residual blocks, attention, halving and doubling."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NiN(nn.Module):
    """A linear layer over channels, stored as (in, out)."""

    def __init__(self, channels: int, out: int, scale: float = 0.1) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(channels, out))
        self.b: nn.Parameter = nn.Parameter(torch.zeros(out))
        fan_average(self.W, scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.W.T[..., None, None], self.b)


class ResNetBlock(nn.Module):
    """Two convolutions, the time embedding between them, and a skip."""

    def __init__(
        self, channels: int, out: int, time: int, dropout: float, rescale: bool
    ) -> None:
        super().__init__()
        self.groupnorm0: nn.GroupNorm = group_norm(channels)
        self.conv0: nn.Conv2d = conv3x3(channels, out)
        self.dense0: nn.Linear = nn.Linear(time, out)
        self.groupnorm1: nn.GroupNorm = group_norm(out)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.conv1: nn.Conv2d = conv3x3(out, out, scale=0.0)
        if channels != out:
            self.nin: NiN = NiN(channels, out)
        self.scale: float = 1 / math.sqrt(2) if rescale else 1.0

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv0(F.silu(self.groupnorm0(x)))
        h = h + self.dense0(F.silu(time))[:, :, None, None]
        h = self.conv1(self.dropout(F.silu(self.groupnorm1(h))))
        skip = self.nin(x) if hasattr(self, "nin") else x
        return (skip + h) * self.scale


class AttentionBlock(nn.Module):
    """One head over all pixels, and a skip."""

    def __init__(self, channels: int, rescale: bool) -> None:
        super().__init__()
        self.GroupNorm_0: nn.GroupNorm = group_norm(channels)
        self.NIN_0, self.NIN_1, self.NIN_2 = (NiN(channels, channels) for _ in range(3))
        self.NIN_3 = NiN(channels, channels, scale=0.0)
        self.scale: float = 1 / math.sqrt(2) if rescale else 1.0

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.GroupNorm_0(x)
        q, k, v = (
            layer(h).flatten(2).transpose(1, 2)
            for layer in (self.NIN_0, self.NIN_1, self.NIN_2)
        )
        h = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return (x + self.NIN_3(h.transpose(1, 2).reshape(x.shape))) * self.scale


class Downsample(nn.Module):
    """Half the side: padded on the right and below, then a convolution of stride 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv: nn.Conv2d = nn.Conv2d(channels, channels, 3, stride=2)
        fan_average(self.conv.weight, 1.0)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Twice the side: nearest neighbours, then a convolution.

    `F.interpolate` gives the same, but gradients that depend on the order in which a GPU adds.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv: nn.Conv2d = conv3x3(channels, channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        B, C, H, W = x.shape
        twice = x[:, :, :, None, :, None].expand(B, C, H, 2, W, 2)
        return self.conv(to_channels_last(twice.reshape(B, C, 2 * H, 2 * W)))


def to_channels_last(x: Tensor) -> Tensor:
    """Channels last on a GPU; elsewhere as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x


class GroupNorm(nn.GroupNorm):
    """Keeps channels last, which torch's own does not on a GPU: convolutions would be
    transposed, and attention would fall back to its slowest form."""

    def forward(self, x: Tensor) -> Tensor:
        return to_channels_last(super().forward(x))


def group_norm(channels: int) -> GroupNorm:
    return GroupNorm(min(channels // 4, 32), channels, eps=1e-6)


def conv3x3(channels: int, out: int, scale: float = 1.0) -> nn.Conv2d:
    conv = nn.Conv2d(channels, out, 3, padding=1)
    fan_average(conv.weight, scale)
    return conv


def fan_average(weight: Tensor, scale: float) -> None:
    """Uniform with variance scale / mean of fan in and fan out."""
    fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(weight)
    bound = math.sqrt(3 * max(scale, 1e-10) / ((fan_in + fan_out) / 2))
    nn.init.uniform_(weight, -bound, bound)

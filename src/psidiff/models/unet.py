"""The D3PM U-Net for images, with its truncated logistic head.

Names and shapes of the parameters are those of the released CIFAR-10 checkpoints. Pixels come
as a sequence of C*H*W tokens, channel by channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..limits import check_limit
from ..types import Level, SoftTokens, Traits, as_count, at_least_float32, check_unit
from .embedding import Noisy, check_tables, class_ids, sinusoid, total_noise
from .unet_blocks import (
    AttentionBlock,
    Downsample,
    ResNetBlock,
    Upsample,
    conv3x3,
    group_norm,
    to_channels_last,
)


class UNet(nn.Module):
    """The D3PM U-Net for images: logits (B, C*H*W, K) from pixels, noise level and label.

    Args:
        vocab_size: number of pixel values K.
        image_size: height H and width W.
        channels: C, the planes of an image one after another in the sequence.
        width: channels of the first scale.
        width_mult: of each scale, how many times `width` it has.
        num_res_blocks: residual blocks of each scale.
        attention_scales: which scales have attention, counted from 0.
        dropout: rate in training.
        skip_rescale: divide sums of residual branches by sqrt(2).
        time_conditioning: False: the level is ignored.
        time_scale: factor on the level before its sinusoids.
        time_embed_dim: width of these; None: `width`.
        num_classes: number of labels; None: unconditional.

    Example:
        >>> from psidiff.models import UNet
        >>> network = UNet(vocab_size=4, image_size=8, channels=1, width=32, width_mult=(1, 2))
        >>> network(torch.zeros(2, 64, dtype=torch.int64), 0.5).shape
        torch.Size([2, 64, 4])
    """

    def __init__(
        self,
        vocab_size: int = 256,
        image_size: int = 32,
        channels: int = 3,
        width: int = 128,
        width_mult: Sequence[int] = (1, 2, 2, 2),
        num_res_blocks: int = 2,
        attention_scales: Sequence[int] = (1,),
        dropout: float = 0.1,
        skip_rescale: bool = True,
        time_conditioning: bool = True,
        time_scale: float | int = 1000,
        time_embed_dim: int | None = None,
        num_classes: int | None = 10,
    ) -> None:
        super().__init__()
        check_widths(width, width_mult, num_res_blocks)
        check_unit("dropout", dropout)
        check_tables(
            vocab_size=(vocab_size, 2),
            image_size=(image_size, channels * image_size),
            channels=(channels, 9 * width),
            time_embed_dim=(time_embed_dim, 16 * max(time_embed_dim or width, width)),
            num_classes=(num_classes, 4 * (time_embed_dim or width)),
        )
        self.vocab_size, self.image_size, self.channels = vocab_size, image_size, channels
        self.num_classes = num_classes
        self.traits: Traits = Traits(head=True, recordable=True, num_classes=num_classes)
        self.time_conditioning, self.time_scale = time_conditioning, time_scale
        self.time_width: int = time_embed_dim or width
        time = 4 * self.time_width
        embed = [nn.Linear(self.time_width, time), nn.Linear(time, time)]
        self.temb_modules: nn.ModuleList = nn.ModuleList(embed)
        self.input_conv: nn.Conv2d = conv3x3(channels, width)
        res = partial(ResNetBlock, time=time, dropout=dropout, rescale=skip_rescale)
        scales = [width * factor for factor in width_mult]

        def blocks(inside: int, scale: int) -> list[nn.Module]:
            made: list[nn.Module] = [res(inside, scales[scale])]
            if scale in attention_scales:
                made.append(AttentionBlock(scales[scale], skip_rescale))
            return made

        self.downsampling_modules, skips = _down(blocks, width, scales, num_res_blocks)
        here = scales[-1]
        middle = [res(here, here), AttentionBlock(here, skip_rescale), res(here, here)]
        self.middle_modules: nn.ModuleList = nn.ModuleList(middle)
        self.upsampling_modules: nn.ModuleList = _up(blocks, skips, scales, num_res_blocks)
        output = [group_norm(scales[0]), conv3x3(scales[0], 2 * channels, scale=0.0)]
        self.output_modules: nn.ModuleList = nn.ModuleList(output)
        if num_classes is not None:
            self.cond_map: nn.ModuleDict = nn.ModuleDict()
            self.cond_map["embedding_table"] = nn.Embedding(num_classes + 1, time)
        self.through: Body = Body(self._through)
        self.bins: Head = Head(self._bins)

    def forward(self, z: Noisy, alpha: Level = 1.0, labels: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(z, alpha, labels))

    def hidden(self, z: Noisy, alpha: Level = 1.0, labels: Tensor | None = None) -> Tensor:
        """All that a pixel's distribution needs: mean and log-scale, (B, C*H*W, 2)."""
        pixels = self._pixels(z)
        rows: Tensor = self.through(pixels, self._time(pixels, alpha, labels))
        return rows

    def head(self, rows: Tensor) -> Tensor:
        """Logits (..., K) of rows (..., 2)."""
        logits: Tensor = self.bins(rows)
        return logits

    def _pixels(self, z: Noisy) -> Tensor:
        """Values scaled to [-1, 1): (B, C, H, W). Soft tokens are their mean value."""
        if isinstance(z, SoftTokens):
            value = (z.weights * z.ids).sum(-1) / z.weights.sum(-1)
        elif z.is_floating_point():
            levels = torch.arange(self.vocab_size, device=z.device, dtype=z.dtype)
            value = (z * levels).sum(-1) / z.sum(-1)
        else:
            value = z
        value = value.to(torch.promote_types(self.input_conv.weight.dtype, torch.float32))
        side = self.image_size
        return 2 * value.view(-1, self.channels, side, side) / self.vocab_size - 1

    def _time(self, pixels: Tensor, alpha: Level, labels: Tensor | None) -> Tensor:
        # of several levels the smallest alpha counts
        sigma = total_noise(alpha, pixels).amax(1)
        if not self.time_conditioning:
            sigma = torch.zeros_like(sigma)
        waves = sinusoid(
            sigma * self.time_scale, self.time_width, self.time_width // 2 - 1, sine_first=True
        )
        first, second = self.temb_modules
        time = second(F.silu(first(waves.to(self.input_conv.weight.dtype))))
        time = time.expand(len(pixels), -1)
        ids = class_ids(labels, self.num_classes, like=pixels)
        return time if ids is None else time + self.cond_map["embedding_table"](ids)

    def _through(self, pixels: Tensor, time: Tensor) -> Tensor:
        """Mean and log-scale from pixels (B, C, H, W) and the embedding of time and label."""
        h = to_channels_last(self.input_conv(pixels.to(self.input_conv.weight.dtype)))
        skips = [h]
        modules = list(self.downsampling_modules)
        for i, module in enumerate(modules):
            h = module(h, time)
            followed = i + 1 < len(modules) and isinstance(modules[i + 1], AttentionBlock)
            if not followed:  # a block's skip is taken after its attention
                skips.append(h)
        for module in self.middle_modules:
            h = module(h, time)
        for module in self.upsampling_modules:
            if isinstance(module, ResNetBlock):
                h = torch.cat((h, skips.pop()), 1)
            h = module(h, time)
        h = self.output_modules[1](F.silu(self.output_modules[0](h)))
        loc, log_scale = at_least_float32(h).chunk(2, 1)
        return torch.stack(((pixels + loc).tanh(), log_scale), -1).flatten(1, 3)

    def _bins(self, rows: Tensor) -> Tensor:
        mean, log_scale = rows.unbind(-1)
        return truncated_logistic(mean, log_scale, self.vocab_size)

    @property
    def compilable(self) -> list[nn.Module]:
        """All but the noise level, a new number at every step, for which all would be compiled
        anew."""
        return [self.through, self.bins]

    @property
    def residual_blocks(self) -> list[nn.Module]:
        """Where almost all of the activations are."""
        return [m for m in self.modules() if isinstance(m, ResNetBlock | AttentionBlock)]


class Compilable(nn.Module):
    """A function of a network as a module; it has no parameters.

    Each kind has a `forward` of its own, because the compiler keeps what it learns of shapes by
    the code that it compiles.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function


class Body(Compilable):
    """From pixels (B, C, H, W) and times to a row for each pixel."""

    def forward(self, pixels: Tensor, time: Tensor) -> Tensor:
        return self.function(pixels, time)


class Head(Compilable):
    """From rows to logits."""

    def forward(self, rows: Tensor) -> Tensor:
        return self.function(rows)


def check_widths(width: int, width_mult: Sequence[int], num_res_blocks: int) -> None:
    """There is a U-Net of these; a group of its norms has four channels."""
    as_count("width", width, least=4)
    as_count("num_res_blocks", num_res_blocks)
    if not width_mult:
        raise ValueError("width_mult must have a number for each scale, got none")
    for factor in width_mult:
        as_count("width_mult", factor)
    blocks = 2 * len(width_mult) * num_res_blocks
    check_limit("blocks", blocks, "the network", f"has {blocks:,} blocks")
    parameters = blocks * (width * max(width_mult)) ** 2 * 18
    check_limit("parameters", parameters, "the network", f"has {parameters:,} parameters")


def truncated_logistic(mean: Tensor, log_scale: Tensor, vocab_size: int) -> Tensor:
    """Logits of a logistic density over [-1, 1], integrated over K equal bins.

    log(cdf(right) - cdf(left)) of a logistic with this mean and scale exp(log_scale - 2).
    """
    width = 2 / vocab_size
    centers = torch.linspace(
        -1 + width / 2, 1 - width / 2, vocab_size, device=mean.device, dtype=mean.dtype
    )
    offset = centers - mean[..., None]
    inv_scale = (2 - log_scale).exp()[..., None]
    left = F.logsigmoid(inv_scale * (offset - width / 2))
    right = F.logsigmoid(inv_scale * (offset + width / 2))
    return right + (-(left - right).exp() + 1e-6).log1p()


Blocks = Callable[[int, int], list[nn.Module]]  # of so many channels, at a scale


def _down(
    blocks: Blocks, width: int, scales: Sequence[int], num_res_blocks: int
) -> tuple[nn.ModuleList, list[int]]:
    """The modules of the way down, and how many channels each skip connection has."""
    modules: list[nn.Module] = []
    skips = [width]
    for scale, here in enumerate(scales):
        for _ in range(num_res_blocks):
            modules += blocks(skips[-1], scale)
            skips.append(here)
        if scale != len(scales) - 1:
            modules.append(Downsample(here))
            skips.append(here)
    return nn.ModuleList(modules), skips


def _up(
    blocks: Blocks, skips: Sequence[int], scales: Sequence[int], num_res_blocks: int
) -> nn.ModuleList:
    """The modules of the way up; every residual block reads a skip connection beside."""
    modules: list[nn.Module] = []
    left, here = list(skips), skips[-1]
    for scale in reversed(range(len(scales))):
        for _ in range(num_res_blocks + 1):
            modules += blocks(here + left.pop(), scale)
            here = scales[scale]
        if scale != 0:
            modules.append(Upsample(here))
    return nn.ModuleList(modules)

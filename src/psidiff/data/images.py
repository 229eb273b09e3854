"""Images as sequences of tokens: a token for each pixel and channel, in the order c, h, w."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

from ..files import write_atomic
from ..limits import check_limit
from ..types import Rows, as_count, check_shape
from .codec import CODECS, Codec

_UNKNOWN = 128  # the grey in which a mask is shown


@CODECS.register("pixels")
@dataclass(frozen=True)
class Pixels(Codec):
    """Brightness in `levels` steps, 0 black; a label i is the class named `classes[i]`."""

    channels: int
    height: int
    width: int
    levels: int = 256
    classes: Sequence[str] = ()

    kind: ClassVar[str] = "image"

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (RGB), got {self.channels}")
        as_count("height", self.height)
        as_count("width", self.width)
        size = self.height * self.width
        check_limit("pixels", size, "the codec", f"is of pictures of {size:,} pixels")
        _check_levels(self.levels, 256)
        if not all(isinstance(name, str) for name in self.classes):
            raise ValueError("classes must be names")
        vars(self).update(
            classes=tuple(self.classes), vocab_size=self.levels, length=self.channels * size
        )

    def encode(self, image: np.ndarray) -> Tensor:
        """The tokens (length,) nearest to an image of uint8, -1 where it is transparent.

        (H, W) or (H, W, channels); one channel more says how opaque each pixel is.
        """
        image = image[..., None] if image.ndim == 2 else image
        size, channels = image.shape[:2], image.shape[2]
        if size != (self.height, self.width) or channels - self.channels not in (0, 1):
            colours = "grey" if self.channels == 1 else "RGB"
            raise ValueError(
                f"images of this model are {self.width} x {self.height}, {colours}, got "
                f"{size[1]} x {size[0]} with {channels} channels"
            )
        shade = torch.tensor(image[..., : self.channels]).double() * (self.levels - 1) / 255
        tokens = shade.round().long().permute(2, 0, 1)
        if channels > self.channels:
            tokens = tokens.masked_fill(torch.tensor(image[..., -1] < 128), -1)
        return tokens.flatten()

    def decode(self, tokens: Tensor) -> np.ndarray:
        """An image (H, W) or (H, W, 3) of uint8, 0 to 255; a mask is mid grey."""
        check_shape("tokens", tokens, (self.channels * self.height * self.width,))
        known = (tokens >= 0) & (tokens < self.levels)
        shade = (tokens.double() * 255 / (self.levels - 1)).round()
        shade = torch.where(known, shade, _UNKNOWN).to(torch.uint8).cpu()
        image = shade.view(self.channels, self.height, self.width).permute(1, 2, 0).numpy()
        return np.ascontiguousarray(image[..., 0] if self.channels == 1 else image)


class Images:
    """Images (N, C, H, W) of uint8 as a dataset; the token of v is v * levels // values.

    `values` is how many values the pixels take: 256, or fewer for a source that has few
    levels already. With values == levels the tokens are the pixels as they are. With `flip`
    each image is mirrored with probability 1/2, where a generator is given.
    """

    def __init__(
        self,
        pixels: Tensor | np.ndarray,
        labels: Tensor | np.ndarray | None = None,
        levels: int = 256,
        flip: bool = False,
        values: int = 256,
    ) -> None:
        self.pixels: Tensor = torch.as_tensor(pixels)
        self.labels: Tensor | None = None if labels is None else torch.as_tensor(labels).long()
        self.levels = levels
        self.flip = flip
        self.values = values
        check_images("pixels", self.pixels)
        if self.pixels.numel() == 0:
            raise ValueError(f"there are no pixels in shape {tuple(self.pixels.shape)}")
        largest = int(self.pixels.max())
        if largest >= values:
            raise ValueError(f"pixels must be below values = {values}, got {largest}")
        _check_levels(levels, values)
        if self.labels is not None:
            check_shape("labels", self.labels, (len(self.pixels),))

    @property
    def length(self) -> int:
        return self.pixels[0].numel()

    def __len__(self) -> int:
        return len(self.pixels)

    def eight_bit(self) -> np.ndarray:
        """The images (N, C, H, W) of uint8 from 0, black, to 255, white, unmirrored."""
        if self.values == 256:
            return self.pixels.numpy()
        return (self.pixels.double() * 255 / (self.values - 1)).round().byte().numpy()

    def rows(self, indices: Tensor, generator: Generator | None = None) -> Rows:
        """Images by number."""
        indices = indices.cpu()
        pixels = self.pixels[indices]
        if self.flip and generator is not None:
            pixels = mirror_half(pixels, generator)
        tokens = pixels.flatten(1).long() * self.levels // self.values
        return Rows(tokens, None if self.labels is None else self.labels[indices])


def digits(split: str) -> Images:
    """Handwritten digits, 8x8 in 17 levels of grey: 1,500 to learn from, 297 to validate."""
    if split not in ("train", "valid"):
        raise ValueError(f"the digits have the splits train and valid, got {split!r}")
    with np.load(Path(__file__).parent / "files" / "digits.npz") as file:
        pixels, labels = file["pixels"], file["labels"]  # shuffled when the file was made
    part = slice(None, -297) if split == "train" else slice(-297, None)
    return Images(pixels[part], labels[part], levels=17, values=17)


def grid(
    images: Sequence[np.ndarray], columns: int, scale: int = 1, gap: int = 1
) -> np.ndarray:
    """Images of one shape side by side, row after row, `gap` white pixels between them."""
    as_count("columns", columns)
    as_count("scale", scale)
    as_count("gap", gap, least=0)
    if not images:
        raise ValueError("a grid needs at least one image")
    shape = images[0].shape
    for image in images:
        if image.shape != shape:
            raise ValueError(f"a grid needs images of one shape, got {shape} and {image.shape}")
    height, width = scale * shape[0] + gap, scale * shape[1] + gap
    rows = -(-len(images) // columns)
    sheet = np.full((rows, height, columns, width, *shape[2:]), 255, np.uint8)
    for i, image in enumerate(images):
        large = image.repeat(scale, axis=0).repeat(scale, axis=1)
        sheet[i // columns, : height - gap, i % columns, : width - gap] = large
    sheet = sheet.reshape(rows * height, columns * width, *shape[2:])
    return sheet[: rows * height - gap, : columns * width - gap]


def write_png(array: np.ndarray, path: str | Path) -> None:
    """Write an image (H, W) or (H, W, 3) of uint8 as a PNG file, the whole of it or none."""
    write_atomic(Path(path), png_bytes(array))


def png_bytes(array: np.ndarray) -> bytes:
    """An image (H, W) or (H, W, 3) of uint8 as a PNG."""
    grey = array.ndim == 2
    if array.dtype != np.uint8 or not (grey or (array.ndim == 3 and array.shape[2] == 3)):
        raise ValueError(
            f"a PNG needs uint8 of shape (H, W) or (H, W, 3), got {array.dtype} of shape "
            f"{array.shape}"
        )
    height, width = array.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if grey else 2, 0, 0, 0)
    lines = array.reshape(height, -1)
    lines = np.pad(lines, ((0, 0), (1, 0)))  # each line opens with its filter: 0, none
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*c) for c in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    """Length, name, data, and the CRC of the last two."""
    check = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)


def mirror_half(pixels: Tensor, generator: Generator) -> Tensor:
    """Images (N, C, H, W), each mirrored left to right with probability 1/2."""
    heads = torch.rand(len(pixels), generator=generator, device=generator.device) < 0.5
    return torch.where(heads.cpu().view(-1, 1, 1, 1), pixels.flip(-1), pixels)


def _check_levels(levels: int, values: int) -> None:
    as_count("levels", levels, least=2)
    if levels > values:
        raise ValueError(f"levels must be at most {values}, got {levels}")


def check_images(name: str, pixels: Tensor) -> None:
    """Raise ValueError unless images are (N, C, H, W) of uint8."""
    if pixels.ndim != 4 or pixels.dtype is not torch.uint8:
        raise ValueError(
            f"{name} must be uint8 of shape (N, C, H, W), got {pixels.dtype} of shape "
            f"{tuple(pixels.shape)}"
        )

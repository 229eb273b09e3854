"""Sets of images by what a user types: real ones to compare with, and samples from anywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from ..data.codec import Codec
from ..data.image_files import ImageSet, read_images
from ..data.image_formats import NoSuchSplit
from ..data.images import Images, Pixels, digits, mirror_half
from ..data.text_sources import find
from ..evaluation.feature_statistics import FeatureStatistics
from ..evaluation.inception import FeatureExtractor
from ..evaluation.statistics_cache import cached_statistics
from ..types import Dataset
from .sample_files import read_shard

_PART = r"(?:train|test|flip|[0-9]+)"
_WORDS = re.compile(rf"(.+):({_PART}(?:,{_PART})*)")


@dataclass(frozen=True, eq=False)
class ReferenceImages:
    """Real images that generated ones are held against.

    source: which they are, in words. complete: they are all that there are to train on.
    """

    pixels: np.ndarray  # (N, C, H, W), uint8
    labels: np.ndarray | None  # (N,)
    classes: tuple[str, ...]
    source: str
    complete: bool
    _found: dict[int, tuple[FeatureExtractor, FeatureStatistics]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pixels)

    def statistics(self, features: FeatureExtractor) -> FeatureStatistics:
        """What features say of the images; computed once."""
        if id(features) not in self._found:  # held beside, so that nothing else gets its id
            held = cached_statistics(self.pixels, features, self.source)
            self._found[id(features)] = features, held
        return self._found[id(features)][1]

    def some(self, most: int) -> ReferenceImages:
        """So many of them, evenly spread: those of one class may lie in a row."""
        count = min(most, len(self))
        chosen = np.arange(count) * len(self) // count
        kept = None if self.labels is None else self.labels[chosen]
        whole = self.complete and count == len(self)
        return ReferenceImages(self.pixels[chosen], kept, self.classes, self.source, whole)

    def mirrored(self) -> ReferenceImages:
        """Each mirrored with probability 1/2, always the same ones."""
        flipped = mirror_half(torch.from_numpy(self.pixels), torch.Generator().manual_seed(0))
        source = f"{self.source}, mirrored at random"
        return replace(self, pixels=flipped.numpy(), source=source, _found={})

    def check_shape(self, shape: tuple[int, ...], whose: str) -> None:
        """Raise ValueError where others have another shape (C, H, W)."""
        if self.pixels.shape[1:] != shape:
            raise ValueError(
                f"{self.source} has images of (channels, height, width) = "
                f"{self.pixels.shape[1:]}, and {whose} {shape}"
            )


@lru_cache(maxsize=1)  # the models of a comparison share the images and their statistics
def read_reference(word: str) -> ReferenceImages:
    """The real images that PATH or PATH:WORDS names, such as cifar-10:test,2000.

    The path is one of images as recipes take it, a folder of samples, or `digits`, which ships.
    The words, apart by commas: train, which is usual, or test; a number, to take so many of
    them; flip, to mirror each at random.
    """
    matched = None if Path(word).exists() else _WORDS.fullmatch(word)
    path, words = (matched[1], matched[2].split(",")) if matched else (word, [])
    splits = [each for each in words if each in ("train", "test")]
    counts = [int(each) for each in words if each.isdecimal()]
    if max(len(splits), len(counts), words.count("flip")) > 1:
        raise ValueError(f"{word!r} says one thing twice: PATH:train|test,NUMBER,flip is known")
    split = splits[0] if splits else "train"
    pixels, labels, classes = read_pixels(path, split)
    total, source = len(pixels), f"{path} ({split})"
    if counts:
        if not 0 < counts[0] <= total:
            raise ValueError(f"{path} has {total:,} images ({split}), {word} wants {counts[0]}")
        source = f"{path} ({split}, {counts[0]:,} of {total:,})"
    found = ReferenceImages(pixels, labels, classes, source, split == "train")
    found = found.some(counts[0]) if counts else found
    return found.mirrored() if "flip" in words else found


def training_reference(data: Dataset, codec: Codec) -> ReferenceImages:
    """What a model was trained on as real images to compare with."""
    if type(codec) is Pixels and isinstance(data, Images):
        pixels = data.eight_bit()
    else:
        rows = data.rows(torch.arange(len(data)))
        pixels = _channels_first(np.stack([codec.decode(row) for row in rows.tokens]))
    return ReferenceImages(pixels, None, (), "its own training set", True)


def has_tokens(path: Path) -> bool:
    """Whether samples are tokens: shards, lines of JSON, or nothing that is there."""
    return not path.exists() or path.suffix == ".jsonl" or any(path.glob("shard-*.npz"))


def read_sample_images(path: Path) -> np.ndarray:
    """Images (N, C, H, W) that anybody made: our shards, an .npz, a folder of pictures."""
    if path.suffix == ".jsonl":
        raise ValueError(f"{path} has tokens: name the model that made them, too")
    if not path.exists():
        raise ValueError(f"there are no samples at {path}")
    try:
        return read_pixels(path, "train").pixels
    except NoSuchSplit:
        return read_pixels(path, "test").pixels


def read_pixels(path: str | Path, split: str) -> ImageSet:
    """Images as they are in files, of psidiff's shards too; the digits that ship."""
    if str(path) == "digits":
        held = digits("train" if split == "train" else "valid")
        assert held.labels is not None
        return ImageSet(held.eight_bit(), held.labels.numpy(), tuple("0123456789"))
    place = find(path)
    shards = [read_shard(each).images for each in sorted(place.glob("shard-*.npz"))]
    if not shards:
        return read_images(place, split)
    images = [each for each in shards if each is not None]
    if len(images) < len(shards) or len({each.shape[1:] for each in images}) > 1:
        raise ValueError(f"{path} has shards that hold no images, or images of several sizes")
    return ImageSet(_channels_first(np.concatenate(images)), None, ())


def as_arrays(pixels: np.ndarray) -> list[np.ndarray]:
    """Images (N, C, H, W) as samples are: arrays (H, W) or (H, W, 3)."""
    return list(pixels[:, 0] if pixels.shape[1] == 1 else pixels.transpose(0, 2, 3, 1))


def shape_of(image: np.ndarray) -> tuple[int, ...]:
    """(C, H, W) of an image (H, W) or (H, W, C)."""
    return _channels_first(image[None]).shape[1:]


def _channels_first(images: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """(N, H, W) or (N, H, W, C) as (N, C, H, W)."""
    images = np.asarray(images)
    moved = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(moved)

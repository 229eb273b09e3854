"""Reading images from the files in which they are commonly kept."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..checksums import in_short, reading
from ..files import load_arrays
from ..limits import check_limit, check_ratio, read_bytes
from ..registry import optional_module
from ..types import as_count, check_choice
from .image_formats import NoSuchSplit, read_cifar_binary, read_cifar_pickle, read_idx

_FORMATS = ("PNG", "JPEG", "GIF", "BMP")  # Pillow knows some that start other programs
_PICTURES = (".png", ".jpg", ".jpeg")
_GREY, _DEEP = ("1", "L", "LA"), ("I", "F")  # Pillow's names of modes
_INNER = ("cifar-10-batches-bin", "cifar-10-batches-py", "MNIST/raw")


class ImageSet(NamedTuple):
    """Images as they are in the files; there are classes where there are labels."""

    pixels: np.ndarray  # (N, C, H, W), uint8
    labels: np.ndarray | None  # (N,), int64
    classes: tuple[str, ...]


def read_images(path: str | Path, split: str, size: int | None = None) -> ImageSet:
    """One split of the images at `path`, whose kind is recognised by what is there.

    A set without splits is one to train on: NoSuchSplit is raised for its test split. `size`,
    for folders of pictures: the largest square in the middle of each, resized to this many
    pixels.
    """
    check_choice("split", split, ("train", "test"))
    if not Path(path).exists():
        raise ValueError(f"there is no file or folder {path}")
    path = _inside(Path(path), split)
    with reading(path):
        return _read(path, split, size)


def _read(path: Path, split: str, size: int | None) -> ImageSet:
    if _has_pictures(path, "*") or _has_pictures(path, "*/*"):
        return read_folder(path, split, size)
    if size is not None:
        raise ValueError(f"size is for folders of PNG or JPEG files, which {path} is not")
    if path.suffix == ".npz":
        return read_npz(path, split)
    if any(path.glob("*_batch*.bin")):
        return _image_set(path, *read_cifar_binary(path, split))
    if any((path / name).is_file() for name in ("data_batch_1", "test_batch")):
        return _image_set(path, *read_cifar_pickle(path, split))
    if any(path.glob("*idx3-ubyte*")):
        return _image_set(path, *read_idx(path, split))
    raise ValueError(
        f"no images were recognised at {path}: it must be an .npz file, a folder of PNG or "
        "JPEG files, CIFAR-10 (cifar-10-batches-bin or -py), or a folder of MNIST's idx files"
    )


def read_npz(path: Path, split: str) -> ImageSet:
    """Arrays `pixels`, `images`, `x` or `arr_0`; `labels` or `y`; `classes`.

    Both splits fit in one file as `train_images`, `x_test` and so on. Also JPEGs end to end:
    `train_jpeg`, `train_offset` and `train_label`.
    """
    arrays = load_arrays(path)
    if not any("test" in name for name in arrays):
        _check_one_set(path, split)
    pixels = _named(arrays, split, "pixels", "images", "x", "arr_0")
    jpeg, offset = _named(arrays, split, "jpeg"), _named(arrays, split, "offset")
    if pixels is None and jpeg is not None and offset is not None:
        pixels = _jpegs(path, jpeg, offset)
    if pixels is None:
        raise ValueError(
            f"{path} must hold {split} images as pixels, images, x or arr_0; "
            f"it holds {', '.join(arrays) or 'nothing'}"
        )
    labels = _named(arrays, split, "labels", "label", "y")
    return _image_set(path, pixels, labels, [str(c) for c in arrays.get("classes", ())])


def read_folder(path: Path, split: str, size: int | None = None) -> ImageSet:
    """PNG and JPEG files; if they are in sub-folders, these are the classes."""
    _check_one_set(path, split)
    if size is not None:
        as_count("size", size)
    groups = [p for p in sorted(path.iterdir()) if _has_pictures(p, "*")]
    if groups and _has_pictures(path, "*"):
        raise ValueError(f"{path} has pictures both in sub-folders and beside them")
    files = [sorted(_pictures(folder, "*")) for folder in groups or [path]]
    names = [name for group in files for name in group]
    pictures = _decoded(path, ((name, read_bytes(name)) for name in names), size)
    for name, picture in zip(names, pictures, strict=True):
        if picture.shape[1:] != pictures[0].shape[1:]:
            raise ValueError(
                f"{name} has {_extent(picture)} pixels but {names[0].name} has "
                f"{_extent(pictures[0])}: all must have one size"
            )
    labels = np.repeat(np.arange(len(files)), [len(group) for group in files])
    classes = [group.name for group in groups]
    return _image_set(path, _stack(pictures), labels if groups else None, classes)


def _inside(path: Path, split: str) -> Path:
    """Where in the folder `path` the images are, if not in itself."""
    for name in (f"{split}.npz", split, *_INNER):
        if (path / name).exists():
            return path / name
    other = "test" if split == "train" else "train"
    for name in (f"{other}.npz", other):
        if (path / name).exists():
            raise NoSuchSplit(f"{path} has {name} but nothing of that kind for {split}")
    return path


def _pictures(folder: Path, pattern: str) -> Iterator[Path]:
    for path in folder.glob(pattern):
        if path.suffix.lower() in _PICTURES and not path.name.startswith("."):
            yield path


def _has_pictures(folder: Path, pattern: str) -> bool:
    return any(True for _ in _pictures(folder, pattern))


def _check_one_set(path: Path, split: str) -> None:
    if split == "test" and path.stem != "test":
        raise NoSuchSplit(f"{path} holds one set of images, without a test split")


def _named(arrays: dict[str, Any], split: str, *names: str) -> np.ndarray | None:
    keys = [k for name in names for k in (f"{split}_{name}", f"{name}_{split}", name)]
    return next((arrays[k] for k in keys if k in arrays), None)


def _jpegs(path: Path, joined: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Files that lie end to end in an array of bytes, number i from offset[i] on."""
    if joined.dtype != np.uint8 or joined.ndim != 1 or offset.dtype.kind not in "iu":
        raise ValueError(f"{path} must hold JPEGs as bytes and whole numbers as offsets")
    ends = offset.reshape(-1).tolist()
    if ends != sorted(ends) or (ends and not 0 <= ends[0] <= ends[-1] <= len(joined)):
        raise ValueError(f"the offsets in {path} must rise, and stay within the JPEGs")
    files = (
        (f"image {i} of {path}", joined[start:end].tobytes())
        for i, (start, end) in enumerate(pairwise(ends))
    )
    pictures = _decoded(path, files)
    if len({picture.shape[1:] for picture in pictures}) != 1:
        raise ValueError(f"the JPEGs in {path} must be images of one size")
    return _stack(pictures)


def _decoded(
    path: Path, files: Iterable[tuple[Any, bytes]], size: int | None = None
) -> list[np.ndarray]:
    """Pictures (1, H, W) or (3, H, W), which together are not many times as large as files."""
    pictures, packed, unpacked = [], 0, 0
    for name, data in files:
        pictures.append(_pixels(name, data, size))
        packed, unpacked = packed + len(data), unpacked + pictures[-1].size
        check_ratio(unpacked, packed, path)
    return pictures


def _pixels(name: Any, data: bytes, size: int | None) -> np.ndarray:
    """One PNG or JPEG file as (1, H, W) if it is grey, else (3, H, W)."""
    with open_picture(data, name) as opened:
        if opened.mode.startswith(_DEEP):
            raise ValueError("it has more than 8 bits a channel")
        image = opened.convert("L" if opened.mode in _GREY else "RGB")
        if size is not None:
            from PIL import ImageOps

            image = ImageOps.fit(image, (size, size))
        return np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)


def _stack(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """(N, C, H, W); grey ones among coloured ones get three equal channels."""
    channels = max(len(picture) for picture in pictures)
    shape = (channels, *pictures[0].shape[1:])
    return np.stack([np.broadcast_to(picture, shape) for picture in pictures])


def _extent(picture: np.ndarray) -> str:
    return f"{picture.shape[2]}x{picture.shape[1]}"


def _image_set(
    path: Path, pixels: np.ndarray, labels: np.ndarray | None, classes: Sequence[str]
) -> ImageSet:
    """Pixels as (N, C, H, W), labels as (N,), a name for every class."""
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and pixels.shape[1] not in (1, 3):
        pixels = pixels.transpose(0, 3, 1, 2)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1] not in (1, 3):
        raise ValueError(
            f"the images in {path} must be grey or RGB and of uint8, got {pixels.dtype} of "
            f"shape {pixels.shape}"
        )
    if pixels.size == 0:
        raise ValueError(f"there are no images in {path}")
    pixels = np.array(pixels, order="C")  # our own, writable
    if labels is None:
        return ImageSet(pixels, None, ())
    if labels.dtype.kind not in "iu":
        raise ValueError(f"the labels in {path} must be whole numbers, got {labels.dtype}")
    labels = labels.astype(np.int64).reshape(-1)
    if len(labels) != len(pixels) or labels.min() < 0:
        raise ValueError(f"{path} needs a label >= 0 for each of its {len(pixels)} images")
    most = int(labels.max())
    check_limit("classes", most + 1, path, f"has the label {most:,}")
    if classes and most >= len(classes):
        raise ValueError(f"{path} names {len(classes)} classes but has the label {most}")
    return ImageSet(pixels, labels, tuple(classes) or tuple(map(str, range(most + 1))))


@contextmanager
def open_picture(data: bytes, name: Any) -> Iterator[Any]:
    """The bytes of a picture as an image of Pillow; what fails inside is said of `name`."""
    needs = "reading PNG or JPEG needs Pillow: pip install 'psidiff[images]'"
    optional_module("PIL", needs)
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # there is our bound
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
                size = math.prod(opened.size)
                check_limit("pixels", size, name, f"has {size:,} pixels")
                yield opened
        except MemoryError:
            raise
        except Exception as error:  # bytes that are no picture fail in every way there is
            if isinstance(error, ValueError) and str(error).startswith(str(name)):
                raise
            said = f"{name} cannot be read as an image"
            raise ValueError(f"{said} ({type(error).__name__}: {in_short(error)})") from error

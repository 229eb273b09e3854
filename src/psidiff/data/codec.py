"""Codecs: what tokens mean. Text, images and puzzles become tokens, and tokens these again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from ..checksums import reading
from ..files import read_object
from ..registry import Registry


class Codec(ABC):
    """Base class of codecs: frozen dataclasses that map tokens to what they mean, and back.

    A codec has ids for the real tokens only; a mask that a prior adds comes after them. A new
    one is in `CODECS`, or in a Python file of the user's, and defines `vocab_size`, `encode`
    and `decode`, which shows an id after the last one as it likes. One of images is a subclass
    of `psidiff.data.images.Pixels`.

    Attributes:
        kind: "text", "image" or "puzzle".
        vocab_size: how many tokens there are.
        length: of every sequence; None: they may have any.
        classes: the names of the labels 0, 1, ..., where there are some.
        separator_id: the token between documents; None: there is none. Likewise `end_id` ends
            a text, `bos_id` and `eos_id` open and close a row, `pad_id` fills it, and
            `mask_id` is a mask.

    Example:
        >>> from dataclasses import dataclass
        >>> from psidiff.data.codec import Codec
        >>> @dataclass(frozen=True)
        ... class Bits(Codec):
        ...     vocab_size = 2
        ...
        ...     def encode(self, value: str) -> np.ndarray:
        ...         return np.array([int(c) for c in value])
        ...
        ...     def decode(self, tokens: Tensor) -> str:
        ...         return "".join(map(str, tokens.tolist()))
        >>> Bits().decode(torch.tensor([0, 1, 1]))
        '011'
    """

    kind: ClassVar[str] = "text"
    vocab_size: int
    length: int | None = None
    classes: Sequence[str] = ()
    separator_id: int | None = None
    end_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    mask_id: int | None = None

    @property
    def leading_spaces(self) -> bool:
        """Whether a word's token holds the space before it."""
        return False

    @abstractmethod
    def encode(self, value: Any) -> Any:
        """Return the token ids (L,) of a text, a puzzle or an image, -1 where it is blank."""

    @abstractmethod
    def decode(self, tokens: Tensor) -> Any:
        """Return what tokens (L,) mean: a str, or an array (H, W) or (H, W, 3) of uint8."""

    def decode_as_released(self, tokens: Tensor) -> str:
        """Return the text (L,) that the released code's judge reads: here that of `decode`."""
        return str(self.decode(tokens))

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text."""
        return [np.asarray(self.encode(text)) for text in texts]

    def pieces(self, tokens: Tensor) -> list[str]:
        """Return each token by itself: decoded if it is of text, else its number."""
        if self.kind == "text":
            return [str(self.decode(token)) for token in tokens.view(-1, 1)]
        return [str(i) for i in tokens.tolist()]

    def check(self, given: Tensor) -> None:  # noqa: B027  # most have nothing to check
        """Raise ValueError if no sequence has the tokens that rows (N, L) give, -1 for none."""

    def describe(self) -> dict[str, Any]:
        """Return plain data, {"name": ..., ...}, from which `codec_from` makes the codec."""
        return CODECS.to_dict(self)


CODECS = Registry("codec", Codec)


def load_codec(path: Path) -> Codec:
    """The codec that a file of ours describes."""
    with reading(path):
        return codec_from(read_object(path))


def codec_from(described: Any) -> Codec:
    """The codec that `describe` described."""
    codec: Codec = CODECS.from_dict(described)
    return codec


def same_codec(a: Codec | None, b: Codec | None) -> bool:
    """Whether two codecs give the same ids the same meaning."""
    return a is not None and b is not None and a.describe() == b.describe()


def as_codec(value: Codec | str | None) -> Codec | None:
    """A codec as it is, or the one that words name: bytes, or FILE.py:NAME:field=value.

    Raises:
        ValueError: it is no codec, or the file was not imported.
    """
    codec = CODECS.parse(value) if isinstance(value, str) else value
    if codec is not None and not isinstance(codec, Codec):
        raise ValueError(f"codec must be an object such as Bytes(), got {value!r}")
    return codec

"""Codecs: what tokens mean. Text, images and puzzles become tokens, and tokens these again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from ..checksums import in_short, reading
from ..files import read_object
from ..registry import check_options


@runtime_checkable
class Codec(Protocol):
    """A frozen dataclass that knows the real tokens; a mask that a prior adds comes after them.

    `decode` gives a str, or for images an array (H, W) or (H, W, 3) of uint8. Codecs of text
    and puzzles have `pieces` too, each token by itself. `describe` gives plain data,
    `{"name": ..., ...}`, from which `codec_from` makes the codec again.
    """

    kind: ClassVar[str]  # "text", "image" or "puzzle"

    @property
    def vocab_size(self) -> int: ...

    def decode(self, tokens: Tensor) -> Any: ...

    def describe(self) -> dict[str, Any]: ...


def load_codec(path: Path) -> Any:
    """The codec that a file of ours describes."""
    with reading(path):
        return codec_from(read_object(path))


def codec_from(described: dict[str, Any]) -> Any:
    """The codec that `describe` described."""
    from . import characters, images, sudoku, tokenizers

    known = {
        "characters": characters.Characters,
        "bytes": characters.Bytes,
        "subwords": tokenizers.Subwords,
        "pixels": images.Pixels,
        "sudoku": sudoku.Sudoku,
    }
    options = dict(described)
    options.pop("format_version", None)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"codec {in_short(name)} is not one of {', '.join(known)}")
    check_options(f"codec {name}", known[name], options)
    return known[name](**options)

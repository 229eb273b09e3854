"""The plainest tokenizers: one token a character, or a byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from ..checksums import in_short
from .codec import CODECS, Codec

_FOLDED = " abcdefghijklmnopqrstuvwxyz"
BLANK = "_"  # how an id after the last token is shown: a prior's mask


@CODECS.register("characters")
@dataclass(frozen=True)
class Characters(Codec):
    """One token a character. `fold`: lower case, and all that is not a-z is a single space.

    A line feed, or else a space, stands between documents, and ends none.
    """

    alphabet: str
    fold: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.alphabet, str):
            raise ValueError(f"alphabet must be text, got {in_short(self.alphabet)}")
        if len(self.alphabet) < 2:
            raise ValueError(
                f"alphabet must have two characters or more, got {self.alphabet!r}"
            )
        most, count = Counter(self.alphabet).most_common(1)[0]
        if count > 1:
            raise ValueError(f"alphabet must have each character once, {most!r} is there twice")
        if self.fold and self.alphabet != _FOLDED:
            raise ValueError(
                f"fold needs the alphabet {_FOLDED!r}, got {in_short(self.alphabet)}"
            )
        between = (self.alphabet.index(c) for c in "\n " if c in self.alphabet)
        vars(self).update(vocab_size=len(self.alphabet), separator_id=next(between, None))

    @classmethod
    def of(cls, text: Iterable[str]) -> Characters:
        """The characters that occur in `text`, in order."""
        return cls("".join(sorted(set(text))))

    @classmethod
    def text8(cls) -> Characters:
        """The 27 characters of text8."""
        return cls(_FOLDED, fold=True)

    def encode(self, text: str) -> np.ndarray:
        return self._encode_folded(text) if self.fold else self._encode_exactly(text)

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.pieces(tokens))

    def pieces(self, tokens: Tensor) -> list[str]:
        """Each token by itself."""
        shown, last = self.alphabet + BLANK, self.vocab_size
        return [shown[min(i, last)] for i in tokens.tolist()]

    def _encode_exactly(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = self._table[np.minimum(codes, len(self._table) - 1)]
        if len(ids) and ids.min() < 0:
            unknown = text[int(ids.argmin())]
            raise ValueError(
                f"the character {unknown!r} is not in the alphabet of the tokenizer"
            )
        return ids

    def _encode_folded(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.lower().encode("ascii", "replace"), dtype=np.uint8)
        ids = np.maximum(self._table[np.minimum(codes, len(self._table) - 1)], 0)
        space = ids == 0
        repeated = np.zeros_like(space)
        repeated[1:] = space[1:] & space[:-1]
        return ids[~repeated]

    @cached_property
    def _table(self) -> np.ndarray:
        """From code point to id; -1 for the unknown, as all after the last one are."""
        codes = [ord(c) for c in self.alphabet]
        table = np.full(max(codes) + 2, -1, dtype=np.int32)
        table[codes] = np.arange(len(codes), dtype=np.int32)
        return table


@CODECS.register("bytes")
@dataclass(frozen=True)
class Bytes(Codec):
    """The bytes of UTF-8, and a separator after them."""

    vocab_size = 257
    separator_id = end_id = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32)

    def decode(self, tokens: Tensor) -> str:
        kept = (i for i in tokens.tolist() if i != self.separator_id)
        return bytes(i if i < 256 else ord(BLANK) for i in kept).decode("utf-8", "replace")

    def pieces(self, tokens: Tensor) -> list[str]:
        """Each token by itself; a byte of a longer character as its hexadecimal number."""
        shown = [*(chr(i) if i < 128 else f"<{i:02x}>" for i in range(256)), "¶", BLANK]
        return [shown[min(i, 257)] for i in tokens.tolist()]

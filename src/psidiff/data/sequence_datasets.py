"""Rows of one length out of a store: blocks of all its text, or one document each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from ..files import load_array
from ..limits import check_limit
from ..types import Rows, as_count
from .token_store import TokenStore


@dataclass(frozen=True, eq=False)
class Packed:
    """All documents end to end, a separator after each, cut into blocks.

    A block has `bos_id` before and `eos_id` behind its text where these are given; `length`
    counts them. Only the last, incomplete block is dropped. `crops`: a row starts anywhere, by
    the generator, so that a small corpus is not always cut at the same places.
    """

    store: TokenStore
    length: int
    separator_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    crops: bool = False

    def __post_init__(self) -> None:
        edges = self.length - self.width
        as_count("length", self.length, least=edges + 1)
        if len(self) == 0:
            raise ValueError(
                f"the corpus has {self.num_tokens} tokens, "
                f"but one block of length {self.length} needs {self.width}"
            )

    @property
    def width(self) -> int:
        """How many tokens of the corpus a row has."""
        return self.length - (self.bos_id is not None) - (self.eos_id is not None)

    @property
    def num_tokens(self) -> int:
        """Tokens of the corpus, with its separators."""
        separators = 0 if self.separator_id is None else len(self.store)
        return len(self.store.tokens) + separators

    def __len__(self) -> int:
        return self.num_tokens // self.width

    def rows(self, indices: Tensor, generator: Generator | None = None) -> Rows:
        first = indices.cpu().numpy() * self.width
        if self.crops:
            starts = self.num_tokens - self.width + 1
            first = torch.randint(starts, (len(indices),), generator=generator).cpu().numpy()
        tokens = np.empty((len(first), self.length), dtype=np.int64)
        left = int(self.bos_id is not None)
        tokens[:, left : left + self.width] = self._text(first[:, None] + np.arange(self.width))
        if self.bos_id is not None:
            tokens[:, 0] = self.bos_id
        if self.eos_id is not None:
            tokens[:, -1] = self.eos_id
        return Rows(torch.from_numpy(tokens))

    def _text(self, places: np.ndarray) -> np.ndarray:
        """The tokens at these places of the corpus, (n, width)."""
        if self.separator_id is None:
            return self.store.tokens[places]
        before = np.searchsorted(self._separators, places)  # how many separators
        here = self._separators[np.minimum(before, len(self.store) - 1)] == places
        inside = np.minimum(places - before, len(self.store.tokens) - 1)
        return np.where(here, self.separator_id, self.store.tokens[inside])

    @cached_property
    def _separators(self) -> np.ndarray:
        """Where the separators are."""
        return self.store.ends + np.arange(len(self.store))


@dataclass(frozen=True, eq=False)
class Padded:
    """One document a row: its beginning between `bos_id` and `eos_id`, filled with `pad_id`.

    mask_padding: False: padding is learned like any other token.
    """

    store: TokenStore
    length: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    mask_padding: bool = True

    def __post_init__(self) -> None:
        if self.pad_id is None:
            raise ValueError("pad_id is missing: name the token that fills short rows")
        edges = (self.bos_id is not None) + (self.eos_id is not None)
        as_count("length", self.length, least=edges + 1)

    def __len__(self) -> int:
        return len(self.store)

    def rows(self, indices: Tensor, generator: Generator | None = None) -> Rows:
        chosen = indices.cpu().numpy()
        starts, ends = self.store.starts(chosen), self.store.ends[chosen]
        opened, closed = self.bos_id is not None, self.eos_id is not None
        kept = np.minimum(ends - starts, self.length - opened - closed)[:, None]
        place = np.arange(self.length) - opened  # in the document
        inside = np.clip(starts[:, None] + place, 0, len(self.store.tokens) - 1)
        tokens = self.store.tokens[inside].astype(np.int64)
        tokens[np.broadcast_to(place < 0, tokens.shape)] = self.bos_id or 0
        tokens[place == kept] = self.eos_id or 0
        real = place < kept + closed
        tokens[~real] = self.pad_id or 0
        mask = torch.from_numpy(real) if self.mask_padding else None
        return Rows(torch.from_numpy(tokens), real=mask)


@dataclass(frozen=True, eq=False)
class TokenArray:
    """A dataset of tokens (N, L)."""

    tokens: Tensor

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def store(self) -> TokenStore:
        """Each row as a document."""
        ends = self.length * np.arange(1, len(self) + 1)
        return TokenStore(self.tokens.flatten().numpy(), ends)

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, indices: Tensor, generator: Generator | None = None) -> Rows:
        return Rows(self.tokens[indices])


def read_tokens(path: Path, vocab_size: int | None = None) -> Tensor:
    """Read the token ids of an .npy file.

    Args:
        path: a file with an array (N, L) of whole numbers.
        vocab_size: all ids are below it; None: they may be any.

    Returns:
        The ids, int64 (N, L).

    Raises:
        ValueError: the file is damaged, or holds something else.
    """
    array = load_array(path)
    if array.dtype.kind not in "iu" or array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"{path} must hold sequences of token ids, whole numbers of shape (N, L), got "
            f"{array.dtype} of shape {array.shape}"
        )
    least, most = int(array.min()), int(array.max())
    if least < 0 or (vocab_size is not None and most >= vocab_size):
        known = "" if vocab_size is None else f" and below {vocab_size}"
        raise ValueError(
            f"the token ids in {path} must be at least 0{known}, got "
            f"{least if least < 0 else most}"
        )
    check_limit("tokens", most + 1, path, f"has the token id {most:,}")
    return torch.from_numpy(array.astype("int64"))

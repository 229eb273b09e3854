"""Sequences of token ids from an .npy file, whose meaning nobody needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor

from ..files import load_array
from ..limits import check_limit
from ..types import Rows


@dataclass(frozen=True, eq=False)
class TokenArray:
    """A dataset of tokens (N, L)."""

    tokens: Tensor

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

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

"""Sudoku: complete grids as sequences of 81 tokens, the digit d as token d - 1."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

from ..types import Rows, as_count, check_shape

_CELL = np.arange(81)
_ROW, _COLUMN = _CELL // 9, _CELL % 9
_BOX = _ROW // 3 * 3 + _COLUMN // 3
_UNITS = torch.from_numpy(
    np.stack([np.flatnonzero(of == i) for of in (_ROW, _COLUMN, _BOX) for i in range(9)])
)  # (27, 9): the cells of each row, column and box
_UNIT_NAMES = [f"{kind} {i}" for kind in ("row", "column", "box") for i in range(1, 10)]
_SEES = np.any([of[:, None] == of for of in (_ROW, _COLUMN, _BOX)], axis=0)  # (81, 81)
_BITS = np.array([i.bit_count() for i in range(512)], np.uint16)

_FORMAT = 1  # of the cached grids; a generator that draws other grids has another number
_CHUNK = 1024  # attempts made side by side; part of the format
_BLANK = 255


@dataclass(frozen=True)
class Sudoku:
    """A grid, row by row, as 81 characters: 1 to 9, and '.' where nothing is known."""

    kind: ClassVar[str] = "puzzle"

    @property
    def vocab_size(self) -> int:
        return 9

    @property
    def length(self) -> int:
        return 81

    def encode(self, text: str) -> Tensor:
        """A puzzle as tokens (81,), -1 for each blank: '.', '0', '_' or '*'."""
        cells = "".join(text.split())
        for c in cells:
            if c not in "123456789.0_*":
                raise ValueError(
                    f"a Sudoku holds the digits 1 to 9 and '.', '0', '_' or '*' for blanks, "
                    f"got {c!r}"
                )
        if len(cells) != 81:
            raise ValueError(f"a Sudoku has 81 cells, got {len(cells)}")
        tokens = torch.tensor([int(c) - 1 if c in "123456789" else -1 for c in cells])
        _check_clues(tokens)
        return tokens

    def decode(self, tokens: Tensor) -> str:
        """Nine lines of nine characters; '.' for -1 or a mask."""
        check_shape("tokens", tokens, (81,))
        cells = self.pieces(tokens)
        return "\n".join("".join(cells[i : i + 9]) for i in range(0, 81, 9))

    def pieces(self, tokens: Tensor) -> list[str]:
        """Each cell by itself."""
        return [str(i + 1) if 0 <= i < 9 else "." for i in tokens.tolist()]

    def describe(self) -> dict[str, Any]:
        return {"name": "sudoku"}


def valid(tokens: Tensor) -> Tensor:
    """Whether each grid (N, 81) holds every digit once in each row, column and box: (N,)."""
    if tokens.ndim != 2 or tokens.shape[1] != 81:
        raise ValueError(f"grids must have shape (N, 81), got {tuple(tokens.shape)}")
    digits = tokens[:, _UNITS.to(tokens.device)].sort(-1).values  # (N, 27, 9)
    return (digits == torch.arange(9, device=tokens.device)).flatten(1).all(1)


class SudokuGrids:
    """`count` complete grids, drawn once; with `symmetries`, another of its kin at each visit.

    A grid comes from filling an empty one at random, so each can occur, though not all with
    exactly the same chance. The first grids of a larger set are the smaller set.
    """

    length = 81

    def __init__(self, count: int, seed: int = 0, symmetries: bool = True) -> None:
        count, seed = as_count("count", count), as_count("seed", seed, least=0)
        self.grids = torch.from_numpy(_cached_grids(count, seed))  # uint8
        self.symmetries = symmetries

    def __len__(self) -> int:
        return len(self.grids)

    def rows(self, indices: Tensor, generator: Generator | None = None) -> Rows:
        """Grids by number; without a generator as they were drawn."""
        tokens = self.grids[indices.cpu()].long()
        if self.symmetries and generator is not None:
            tokens = _random_kin(tokens, generator)
        return Rows(tokens)


def _check_clues(tokens: Tensor) -> None:
    for name, cells in zip(_UNIT_NAMES, tokens[_UNITS].tolist(), strict=True):
        for digit in range(9):
            if cells.count(digit) > 1:
                raise ValueError(f"the clues clash: {name} has more than one {digit + 1}")


def _random_kin(tokens: Tensor, generator: Generator) -> Tensor:
    """For each grid (N, 81) one of the 2 * 6^8 * 9! that differ from it by a symmetry.

    Rows move within their band, bands move, columns likewise; the grid is transposed or not;
    digits get other names.
    """
    n = len(tokens)
    order = _line_orders(n, generator)[:, :, None] * 9 + _line_orders(n, generator)[:, None]
    transposed = _uniform((n, 1, 1), generator) < 0.5
    order = torch.where(transposed, order.mT, order).flatten(1)  # (N, 81)
    names = _uniform((n, 9), generator).argsort(-1)
    return names.gather(1, tokens.gather(1, order))


def _line_orders(n: int, generator: Generator) -> Tensor:
    """Orders of nine lines (n, 9) in which each band of three stays together."""
    bands = _uniform((n, 3, 1), generator).argsort(1)
    within = _uniform((n, 3, 3), generator).argsort(2)
    return (3 * bands + within).flatten(1)


def _uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device).cpu()


def _cached_grids(count: int, seed: int) -> np.ndarray:
    """The grids from the folder PSIDIFF_CACHE if they are there; else made, and put there."""
    folder = Path(os.environ.get("PSIDIFF_CACHE") or "~/.cache/psidiff").expanduser()
    path = folder / f"sudoku-v{_FORMAT}-{count}-{seed}.npy"
    with suppress(OSError, ValueError, EOFError):  # absent or damaged: made anew
        grids = np.load(path)
        if grids.shape == (count, 81) and grids.dtype == np.uint8:
            return grids
    grids = _random_grids(count, seed)
    with suppress(OSError):  # a folder that cannot be written costs time, no more
        _write_whole(grids, path)
    return grids


def _write_whole(grids: np.ndarray, path: Path) -> None:
    """Under another name first, so that no one reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, grids)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink()
        raise


def _random_grids(count: int, seed: int) -> np.ndarray:
    """Complete grids (count, 81) of uint8, the same for the same seed."""
    found: list[np.ndarray] = []
    for grids in _attempts(seed):
        found.append(grids)
        if sum(map(len, found)) >= count:
            break
    return np.concatenate(found)[:count]


def _attempts(seed: int) -> Iterator[np.ndarray]:
    chunk = 0
    while True:
        yield _fill(np.random.Generator(np.random.PCG64([seed, chunk])))
        chunk += 1


def _fill(rng: np.random.Generator) -> np.ndarray:
    """Fill empty grids side by side, always the cell with the fewest digits left, at random.

    A grid in which a cell has no digit left is dropped; more than half of them come through.
    """
    grids = np.full((_CHUNK, 81), _BLANK, np.uint8)
    left = np.full((_CHUNK, 81), 0b111111111, np.uint16)  # a bit for each digit still possible
    for _ in range(81):
        each = np.arange(len(grids))
        cell = _most_constrained(grids, left, rng)
        digit = _one_of(left[each, cell], rng)
        grids[each, cell] = digit
        left &= ~(_SEES[cell].astype(np.uint16) << digit[:, None])
        alive = ((left != 0) | (grids != _BLANK)).all(1)
        if not alive.all():
            grids, left = grids[alive], left[alive]
    return grids


def _most_constrained(
    grids: np.ndarray, left: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """The blank cell (n,) with the fewest digits left, ties broken at random."""
    ties = rng.integers(0, 256, left.shape, np.uint8)
    key = _BITS[left] * 256 + ties
    key[grids != _BLANK] = 65535
    return key.argmin(1)


def _one_of(digits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A digit (n,) from each set of bits, all with the same chance."""
    held = digits[:, None] >> np.arange(9, dtype=np.uint16) & 1
    chance = 1 - rng.random(held.shape, np.float32)  # in (0, 1]: what is held is above 0
    return (chance * held).argmax(1).astype(np.uint16)

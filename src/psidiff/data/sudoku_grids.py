"""Complete Sudoku grids and puzzles without a needless clue, drawn at random, kept on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..files import folder_of, load_arrays, save_arrays
from ..types import as_count
from .sudoku_solver import minimal

_CELL = np.arange(81)
_ROW, _COLUMN = _CELL // 9, _CELL % 9
_BOX = _ROW // 3 * 3 + _COLUMN // 3
_SEES = np.any([of[:, None] == of for of in (_ROW, _COLUMN, _BOX)], axis=0)  # (81, 81)
_BITS = np.array([i.bit_count() for i in range(512)], np.uint16)

_FORMAT = 1  # of what is kept; a generator that draws other grids has another number
_CHUNK = 1024  # attempts made side by side; part of the format
_BLANK = 255


def complete_grids(count: int, seed: int) -> np.ndarray:
    """Grids (count, 81) of uint8, the same for the same seed; kept in PSIDIFF_CACHE."""
    path = folder_of("PSIDIFF_CACHE") / f"sudoku-v{_FORMAT}-{count}-{seed}.npz"
    grids = _read(path, (count, 81), np.uint8)
    if grids is None:
        grids = np.concatenate([grids for grids, _ in _drawn(count, seed)])
        _keep(grids, path)
    return grids


def minimal_puzzles(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Puzzles (count, 81) of int8 with -1 for blanks, and their only solutions.

    None can spare a clue: without any one there are two solutions or more. The first puzzles
    of a larger set are the smaller set. No seed has the grids of another, nor those that
    `complete_grids` draws. Kept in PSIDIFF_CACHE.
    """
    count, seed = as_count("count", count), as_count("seed", seed, least=0)
    path = folder_of("PSIDIFF_CACHE") / f"sudoku-minimal-v{_FORMAT}-{count}-{seed}.npz"
    both = _read(path, (2, count, 81), np.int8)
    if both is None:
        drawn = [(g, rng.random(g.shape)) for g, rng in _drawn(count, seed, stream=1)]
        grids, chances = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
        both = np.stack((minimal(grids, chances.argsort(1)), grids.astype(np.int8)))
        _keep(both, path)
    return both[0], both[1]


def _read(path: Path, shape: tuple[int, ...], dtype: type) -> np.ndarray | None:
    with suppress(OSError, ValueError, KeyError):  # absent or damaged
        kept = load_arrays(path)["grids"]
        if kept.shape == shape and kept.dtype == dtype:
            return kept
    return None


def _keep(made: np.ndarray, path: Path) -> None:
    """A folder that cannot be written costs time, no more."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_arrays(path, {"grids": made})


def _drawn(
    count: int, seed: int, stream: int = 0
) -> Iterator[tuple[np.ndarray, np.random.Generator]]:
    """Grids, `count` in all, chunk by chunk with the generator that drew them."""
    chunk = 0
    while count > 0:
        rng = np.random.Generator(np.random.PCG64([seed, chunk, stream]))
        grids = _fill(rng)[:count]
        yield grids, rng
        count, chunk = count - len(grids), chunk + 1


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

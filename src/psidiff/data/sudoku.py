"""Sudoku: complete grids as sequences of 81 tokens, the digit d as token d - 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from ..types import Rows, as_count, check_shape
from .codec import CODECS
from .puzzle import Puzzle, cached_array
from .sudoku_solver import count_solutions, minimal

_LOOKS = 100_000  # of the solver, for each puzzle: those with solutions need a tenth of it
_CELL = np.arange(81)
_ROW, _COLUMN = _CELL // 9, _CELL % 9
_BOX = _ROW // 3 * 3 + _COLUMN // 3
_UNITS = torch.from_numpy(
    np.stack([np.flatnonzero(of == i) for of in (_ROW, _COLUMN, _BOX) for i in range(9)])
)  # (27, 9): the cells of each row, column and box
_SEES = np.any([of[:, None] == of for of in (_ROW, _COLUMN, _BOX)], axis=0)  # (81, 81)
_BITS = np.array([i.bit_count() for i in range(512)], np.uint16)
_FORMAT = 1  # of what is kept; a generator that draws other grids has another number
_CHUNK = 1024  # attempts made side by side; part of the format
_BLANK = 255
_UNIT_NAMES = [f"{kind} {i}" for kind in ("row", "column", "box") for i in range(1, 10)]


@CODECS.register("sudoku")
@dataclass(frozen=True)
class Sudoku(Puzzle):
    """A grid, row by row, as 81 characters: 1 to 9, and '.' where nothing is known."""

    vocab_size = 9
    length = 81

    def encode(self, text: str) -> Tensor:
        """A puzzle that has a solution as tokens (81,), -1 for '.', '0', '_' or '*': blanks."""
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
        self.check(tokens[None])
        return tokens

    def check(self, given: Tensor) -> None:
        """Of each puzzle (N, 81), -1 for blanks, that some complete grid has its clues."""
        often = (given[:, _UNITS][:, :, None] == torch.arange(9)[:, None]).sum(-1)  # (N, 27, 9)
        if bool((often > 1).any()):
            _, unit, digit = (often > 1).nonzero()[0].tolist()
            raise ValueError(
                f"the clues clash: {_UNIT_NAMES[unit]} has more than one {digit + 1}"
            )
        if not count_solutions(given.numpy(), most=1, looks=_LOOKS).all():
            raise ValueError(
                "the clues clash: no complete grid has them all, as far as we look"
            )

    def valid(self, tokens: Tensor) -> Tensor:
        """Whether each grid (N, 81) is a complete Sudoku: (N,)."""
        return valid(tokens)

    def held_out(self, count: int, seed: int) -> Tensor:
        """Puzzles with one solution that can spare no clue, (count, 81)."""
        return torch.from_numpy(minimal_puzzles(count, seed)[0]).long()

    def decode(self, tokens: Tensor) -> str:
        """Nine lines of nine characters; '.' for -1 or a mask."""
        check_shape("tokens", tokens, (81,))
        cells = self.pieces(tokens)
        return "\n".join("".join(cells[i : i + 9]) for i in range(0, 81, 9))

    def pieces(self, tokens: Tensor) -> list[str]:
        """Each cell by itself."""
        return [str(i + 1) if 0 <= i < 9 else "." for i in tokens.tolist()]


def valid(tokens: Tensor) -> Tensor:
    """Whether each grid (N, 81) holds every digit once in each row, column and box: (N,)."""
    if tokens.ndim != 2 or tokens.shape[1] != 81:
        raise ValueError(f"grids must have shape (N, 81), got {tuple(tokens.shape)}")
    digits = tokens[:, _UNITS.to(tokens.device)].sort(-1).values  # (N, 27, 9)
    return (digits == torch.arange(9, device=tokens.device)).flatten(1).all(1)


class SudokuGrids:
    """`count` complete grids, drawn once; with `symmetries`, another of its kin at each visit.

    A grid comes from filling an empty one at random, so each can occur, though not all with
    exactly the same chance. The first grids of a larger set are the smaller set. Each visit
    marks as given 0 to 60 cells at random. With `minimal`, half of the visits instead give one
    of so many puzzles that can spare no clue, every other time with 0 to 30 further cells.
    """

    length = 81

    def __init__(
        self, count: int, seed: int = 0, symmetries: bool = True, minimal: int = 0
    ) -> None:
        count, seed = as_count("count", count), as_count("seed", seed, least=0)
        self.grids = torch.from_numpy(complete_grids(count, seed))  # uint8
        self.symmetries = symmetries
        self.puzzles = self.solutions = torch.empty(0, 81, dtype=torch.int8)
        if as_count("minimal", minimal, least=0):
            puzzles, solutions = minimal_puzzles(minimal, seed + 1000)
            self.puzzles, self.solutions = map(torch.from_numpy, (puzzles, solutions))

    def __len__(self) -> int:
        return len(self.grids)

    def rows(self, indices: Tensor, generator: Generator | None = None) -> Rows:
        """Grids by number; without a generator as they were drawn, none of it given."""
        tokens = self.grids[indices.cpu()].long()
        if generator is None:
            return Rows(tokens)
        given = torch.zeros(tokens.shape, dtype=torch.bool)
        most = torch.full((len(tokens),), 60)
        if len(self.puzzles):
            kind = _below(4, len(tokens), generator)  # 0: bare, 1: with more cells
            which = _below(len(self.puzzles), len(tokens), generator)
            puzzle = (kind < 2)[:, None]
            tokens = torch.where(puzzle, self.solutions[which].long(), tokens)
            given = (self.puzzles[which] >= 0) & puzzle
            most = torch.tensor([0, 30, 60, 60])[kind]
        if self.symmetries:
            tokens, given = _random_symmetry(tokens, given, generator)
        return Rows(tokens, given=_with_more(given, most, generator))


def _random_symmetry(
    tokens: Tensor, given: Tensor, generator: Generator
) -> tuple[Tensor, Tensor]:
    """For each grid (N, 81) one of the 2 * 6^8 * 9! that differ from it by a symmetry.

    Rows move within their band, bands move, columns likewise; the grid is transposed or not;
    digits get other names. What is given moves with its cell.
    """
    n = len(tokens)
    order = _line_orders(n, generator)[:, :, None] * 9 + _line_orders(n, generator)[:, None]
    transposed = _uniform((n, 1, 1), generator) < 0.5
    order = torch.where(transposed, order.mT, order).flatten(1)  # (N, 81)
    names = _uniform((n, 9), generator).argsort(-1)
    return names.gather(1, tokens.gather(1, order)), given.gather(1, order)


def _with_more(given: Tensor, most: Tensor, generator: Generator) -> Tensor:
    """In each row 0 to `most` (N,) further cells, every number and every set as likely."""
    count = (_uniform(most.shape, generator) * (most + 1)).long()
    chance = _uniform(tuple(given.shape), generator).masked_fill(given, 2)
    first_left_out = torch.from_numpy(np.sort(chance.numpy())).gather(1, count[:, None])
    return given | (chance < first_left_out)


def _below(bound: int, n: int, generator: Generator) -> Tensor:
    """Whole numbers (n,) from 0 to bound - 1."""
    return torch.randint(bound, (n,), generator=generator, device=generator.device).cpu()


def _line_orders(n: int, generator: Generator) -> Tensor:
    """Orders of nine lines (n, 9) in which each band of three stays together."""
    bands = _uniform((n, 3, 1), generator).argsort(1)
    within = _uniform((n, 3, 3), generator).argsort(2)
    return (3 * bands + within).flatten(1)


def _uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device).cpu()


def complete_grids(count: int, seed: int) -> np.ndarray:
    """Grids (count, 81) of uint8, the same for the same seed; kept in PSIDIFF_CACHE."""
    name = f"sudoku-v{_FORMAT}-{count}-{seed}"
    parts = (grids for grids, _ in _drawn(count, seed))
    return cached_array(name, (count, 81), np.uint8, lambda: np.concatenate(list(parts)))


def minimal_puzzles(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Puzzles (count, 81) of int8 with -1 for blanks, and their only solutions.

    None can spare a clue: without any one there are two solutions or more. The first puzzles
    of a larger set are the smaller set. No seed has the grids of another, nor those that
    `complete_grids` draws. Kept in PSIDIFF_CACHE.
    """
    count, seed = as_count("count", count), as_count("seed", seed, least=0)

    def draw() -> np.ndarray:
        drawn = [(g, rng.random(g.shape)) for g, rng in _drawn(count, seed, stream=1)]
        grids, chances = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
        return np.stack((minimal(grids, chances.argsort(1)), grids.astype(np.int8)))

    name = f"sudoku-minimal-v{_FORMAT}-{count}-{seed}"
    puzzles, solutions = cached_array(name, (2, count, 81), np.int8, draw)
    return puzzles, solutions


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

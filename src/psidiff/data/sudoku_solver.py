"""How many solutions a Sudoku has, exactly, and clues taken away while one remains.

Digits are 0 to 8 and blanks -1. Many puzzles are searched side by side: a state holds for each
cell the digits still possible as bits, and states stand in the columns of an array (81, S).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_ALL = np.uint16(0b111111111)
_WIDTH = 1024  # states that are looked at together, at most
_COUNT = np.array([i.bit_count() for i in range(512)], np.uint8)


def count_solutions(puzzles: np.ndarray, most: int = 2, looks: int | None = None) -> np.ndarray:
    """How many solutions each puzzle (N, 81) has, counted no further than `most`: (N,).

    looks: states that are looked at for each puzzle; after that, what was found counts. A few
    clues without a solution may keep the search busy for hours.
    """
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    states = _states(puzzles)
    found = np.zeros(states.shape[1], np.int64)
    for owners, _ in _solutions(states, found, most, looks):
        np.add.at(found, owners, 1)
    return np.minimum(found, most)


def solve(puzzles: np.ndarray) -> np.ndarray:
    """A solution (N, 81) of each puzzle; -1 everywhere where there is none."""
    states = _states(puzzles)
    found = np.zeros(states.shape[1], np.int64)
    solved = np.full((states.shape[1], 81), -1, np.int8)
    for owners, cells in _solutions(states, found, 1):
        solved[owners] = np.log2(cells).astype(np.int8).T
        found[owners] = 1
    return solved


def minimal(grids: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Puzzles (N, 81) with one solution, the grid, that have two or more without any clue.

    The cells are visited in the given order (N, 81). A clue goes if no solution has another
    digit in its cell. One that stays had to stay in a puzzle with more clues, so it has to in
    the one that is left.
    """
    puzzles = np.ascontiguousarray(grids, np.int8).copy()
    each = np.arange(len(puzzles))
    for cell in order.T:
        digit = puzzles[each, cell]
        puzzles[each, cell] = -1
        states = _states(puzzles)
        states[cell, each] &= ~_bit(digit)
        found = np.zeros(len(puzzles), np.int64)
        for owners, _ in _solutions(states, found, 1):
            found[owners] = 1
        puzzles[each, cell] = np.where(found > 0, digit, -1)
    return puzzles


def _states(puzzles: np.ndarray) -> np.ndarray:
    """What is possible in each cell (81, N): the clue's bit, or all of them."""
    puzzles = np.asarray(puzzles)
    if puzzles.ndim != 2 or puzzles.shape[1] != 81:
        raise ValueError(f"puzzles must have shape (N, 81), got {puzzles.shape}")
    if puzzles.size and not (puzzles.min() >= -1 and puzzles.max() <= 8):
        raise ValueError("puzzles hold the digits 0 to 8, and -1 for blanks")
    return np.where(puzzles.T < 0, _ALL, _bit(np.maximum(puzzles.T, 0)))


def _bit(digit: np.ndarray) -> np.ndarray:
    return np.uint16(1) << digit.astype(np.uint16)


def _solutions(
    states: np.ndarray, found: np.ndarray, most: int, looks: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Solved states as (owners, cells), until each puzzle is done or has `most` in `found`.

    The newest states are looked at first, so that few wait; the longer it takes, the more of
    them side by side.
    """
    waiting = [(np.arange(len(found)), states)]
    width = max(len(found), 1)
    left = np.inf if looks is None else looks * width
    while waiting and left > 0:
        owners, states = _newest(waiting, min(width, _WIDTH))
        width += 1
        left -= len(owners)
        wanted = found[owners] < most
        if not wanted.all():
            owners, states = owners[wanted], states[:, wanted]
        narrowed, alive = _narrow(states)
        solved = alive & _single(states).all(0)
        if solved.any():
            yield owners[solved], states[:, solved]
        stuck = alive & ~solved & (narrowed == states).all(0)
        moving = alive & ~solved & ~stuck
        if stuck.any():
            waiting.append(_split(owners[stuck], states[:, stuck]))
        if moving.any():
            waiting.append((owners[moving], narrowed[:, moving]))


def _newest(
    waiting: list[tuple[np.ndarray, np.ndarray]], room: int
) -> tuple[np.ndarray, np.ndarray]:
    """The last `room` states that wait, taken off the list."""
    taken = []
    while waiting and room > 0:
        owners, states = waiting.pop()
        if len(owners) > room:
            waiting.append((owners[:-room], states[:, :-room]))
        taken.append((owners[-room:], states[:, -room:]))
        room -= len(owners)
    owners_of, states_of = zip(*reversed(taken), strict=True)
    return np.concatenate(owners_of), np.concatenate(states_of, axis=1)


def _narrow(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the cells still hold by two rules (81, S), and whether no rule is broken (S,).

    A cell that holds one digit takes it from all cells it sees; a digit that has one place in
    a row, column or box is there.
    """
    fixed = states * _single(states)
    seen = _spread(*(_once_twice(unit)[0] for unit in _units(fixed)))
    left = states & ~seen | fixed
    once, twice = zip(*(_once_twice(unit) for unit in _units(left)), strict=True)
    placed = left & _spread(*(a & ~b for a, b in zip(once, twice, strict=True)))
    alive = _single(placed).all(0) & (left != 0).all(0)
    for digits in once:
        alive &= (digits == _ALL).all(0)
    return placed | left * (placed == 0), alive


def _single(states: np.ndarray) -> np.ndarray:
    """Whether no cell holds more than one digit."""
    return (states & (states - np.uint16(1))) == 0


def _units(states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows, columns and boxes, each (9 cells, 9 units, S)."""
    size = states.shape[1]
    rows = states.reshape(9, 9, size)
    boxes = states.reshape(3, 3, 3, 3, size).transpose(1, 3, 0, 2, 4).reshape(9, 9, size)
    return rows.swapaxes(0, 1), rows, boxes


def _once_twice(unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The digits (9 units, S) that at least one cell holds, and those that two or more do."""
    once, twice = unit[0].copy(), np.zeros_like(unit[0])
    for cell in unit[1:]:
        twice |= once & cell
        once |= cell
    return once, twice


def _spread(rows: np.ndarray, columns: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """For each cell (81, S) what its row, column or box (9, S) has."""
    size = rows.shape[1]
    lines = rows[:, None] | columns[None]
    spread = lines.reshape(3, 3, 3, 3, size) | boxes.reshape(3, 1, 3, 1, size)
    return spread.reshape(81, size)


def _split(owners: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two states for each: a cell of fewest digits has its lowest digit, or has it not."""
    each = np.arange(len(owners))
    count = _COUNT[states]
    cell = np.where(count > 1, count, 10).argmin(0)
    held = states[cell, each]
    lowest = held & (~held + np.uint16(1))
    without, having = states.copy(), states
    without[cell, each] = held & ~lowest
    having[cell, each] = lowest
    return np.concatenate((owners, owners)), np.concatenate((without, having), axis=1)

"""How many solutions a puzzle has, and puzzles that can spare no clue."""

import time

import numpy as np
import pytest
from test_puzzles import PUZZLE, SOLVED

from psidiff.data.sudoku import Sudoku, complete_grids, minimal_puzzles
from psidiff.data.sudoku_solver import count_solutions, minimal, solve
from psidiff.files import load_arrays, save_arrays


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cells(text):
    return Sudoku().encode(text).numpy()[None]


def free_digits(grid, cell):
    row, column = divmod(cell, 9)
    top, left = row // 3 * 3, column // 3 * 3
    seen = {*grid[row * 9 : row * 9 + 9], *grid[column::9]}
    seen.update(grid[r * 9 + c] for r in range(top, top + 3) for c in range(left, left + 3))
    return set(range(9)) - seen


def counted(grid, most):
    """The same count by plain recursion over the blank cell that has the fewest digits."""
    blank = [cell for cell, digit in enumerate(grid) if digit < 0]
    if not blank:
        return 1
    cell = min(blank, key=lambda cell: len(free_digits(grid, cell)))
    total = 0
    for digit in free_digits(grid, cell):
        total += counted([*grid[:cell], digit, *grid[cell + 1 :]], most - total)
        if total >= most:
            break
    return total


def test_a_known_puzzle_has_its_known_solution_and_no_other():
    assert count_solutions(cells(PUZZLE)).tolist() == [1]
    assert (solve(cells(PUZZLE)) == cells(SOLVED)).all()


def test_a_contradiction_has_no_solution():
    clash = cells(PUZZLE)
    clash[0, 1] = clash[0, 0]  # twice in a row
    full = cells(SOLVED)
    full[0, 0] = full[0, 1]
    stuck = np.full((1, 81), -1)  # no digit is left for the ninth cell
    stuck[0, [*range(8), 17]] = range(9)
    hidden = np.full((1, 81), -1)  # no cell of the first row is left for a 0
    hidden[0, [9 + 3, 18 + 6]] = 0
    hidden[0, :3] = [1, 2, 3]
    puzzles = np.concatenate((clash, full, stuck, hidden))
    assert count_solutions(puzzles).tolist() == [0, 0, 0, 0]
    assert (solve(puzzles) == -1).all()


def test_solutions_are_counted_exactly_up_to_the_limit():
    grids = complete_grids(40, seed=0).astype(np.int8)
    chance = np.random.default_rng(1).random(grids.shape).argsort(1).argsort(1)
    puzzles = np.where(chance < np.linspace(25, 50, 40).astype(int)[:, None], grids, -1)
    truth = [counted(puzzle.tolist(), 20) for puzzle in puzzles]
    assert len(set(truth)) > 5
    assert count_solutions(puzzles, most=20).tolist() == truth
    assert count_solutions(puzzles).tolist() == np.minimum(truth, 2).tolist()


def test_a_solution_keeps_the_clues_of_a_puzzle_with_many():
    puzzles = np.full((2, 81), -1)
    puzzles[1, :9] = np.arange(9)
    solved = solve(puzzles)
    assert (np.sort(solved.reshape(-1, 9, 9), 2) == np.arange(9)).all()
    assert solved[1, :9].tolist() == list(range(9))
    assert count_solutions(solved).tolist() == [1, 1]
    assert count_solutions(puzzles, most=3).tolist() == [3, 3]


def test_minimal_puzzles_have_one_solution_and_two_without_any_clue():
    puzzles, solutions = minimal_puzzles(40, seed=0)
    assert puzzles.shape == solutions.shape == (40, 81) and puzzles.dtype == np.int8
    assert (count_solutions(puzzles) == 1).all() and (solve(puzzles) == solutions).all()
    assert ((puzzles == solutions) | (puzzles == -1)).all()
    for puzzle in puzzles[:2]:
        assert counted(puzzle.tolist(), 2) == 1
    for puzzle in puzzles:
        clues = np.flatnonzero(puzzle >= 0)
        fewer = np.repeat(puzzle[None], len(clues), 0)
        fewer[np.arange(len(clues)), clues] = -1
        assert (count_solutions(fewer) == 2).all()
    assert 23 < (puzzles >= 0).sum(1).mean() < 26


def test_minimal_puzzles_are_a_function_of_the_seed_and_have_grids_of_their_own():
    puzzles, solutions = minimal_puzzles(30, seed=4)
    again, _ = minimal_puzzles(7, seed=4)
    assert (again == puzzles[:7]).all()
    sets = [solutions, minimal_puzzles(30, seed=5)[1], complete_grids(30, 4)]
    assert len(np.unique(np.concatenate(sets), axis=0)) == 90


def test_clues_are_visited_in_the_order_given():
    grid = cells(SOLVED).astype(np.int8)
    rising = minimal(grid, np.arange(81)[None])
    falling = minimal(grid, np.arange(81)[None, ::-1])
    assert (rising[0, :9] < 0).all() and (falling[0, -9:] < 0).all()
    assert (grid == cells(SOLVED)).all()


def test_minimal_puzzles_are_read_from_the_cache(cache):
    puzzles, _ = minimal_puzzles(5, seed=2)
    (file,) = cache.iterdir()
    assert file.name == "sudoku-minimal-v1-5-2.npz"
    save_arrays(file, {"grids": load_arrays(file)["grids"][:, ::-1]})
    assert (minimal_puzzles(5, seed=2)[0] == puzzles[::-1]).all()
    file.write_bytes(b"")
    assert (minimal_puzzles(5, seed=2)[0] == puzzles).all()


@pytest.mark.parametrize(
    ("puzzles", "words"),
    [
        (np.zeros(81, int), r"\(N, 81\), got \(81,\)"),
        (np.full((1, 81), 9), "digits 0 to 8, and -1 for blanks"),
        (np.full((1, 81), -2), "digits 0 to 8, and -1 for blanks"),
    ],
)
def test_what_is_no_puzzle_cannot_be_solved(puzzles, words):
    for ask in (solve, count_solutions):
        with pytest.raises(ValueError, match=words):
            ask(puzzles)


def test_no_puzzles_have_no_solutions():
    assert count_solutions(np.empty((0, 81), int)).shape == (0,)
    assert solve(np.empty((0, 81), int)).shape == (0, 81)
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        count_solutions(cells(PUZZLE), most=0)


def test_a_search_ends_after_so_many_looks():
    rows = (".....5.8.", "...6.1.43", ".........", ".1.5.....", "...1.6...")
    clues = "".join((*rows, "3.......5", "53.....61", "........4", "........."))
    stuck = np.array([[int(c) - 1 if c != "." else -1 for c in clues]])
    begun = time.process_time()
    assert count_solutions(stuck, 1, looks=20_000).tolist() == [0]  # all: 15 seconds
    assert count_solutions(cells(PUZZLE), 1, looks=20_000).tolist() == [1]
    assert time.process_time() - begun < 3

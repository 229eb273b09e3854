"""Sudoku: what a grid is, how many there are to learn from, and what leaves it a grid."""

import pytest
import torch
from toys import generator

from psidiff.data.codec import Codec
from psidiff.data.sudoku import Sudoku, SudokuGrids, valid
from psidiff.data.sudoku_solver import count_solutions, solve
from psidiff.files import load_arrays, save_arrays
from psidiff.types import Dataset

PUZZLE = """
53..7....
6..195...
.98....6.
8...6...3
4..8.3..1
7...2...6
.6....28.
...419..5
....8..79
"""
SOLVED = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_decoding_gives_back_the_puzzle_that_was_encoded():
    tokens = Sudoku().encode(PUZZLE)
    assert tokens.shape == (81,) and tokens[:5].tolist() == [4, 2, -1, -1, 6]
    assert Sudoku().decode(tokens) == PUZZLE.strip()


@pytest.mark.parametrize("blank", ["0", "_", "*"])
def test_a_blank_has_several_spellings_and_a_mask_reads_as_one(blank):
    tokens = Sudoku().encode(PUZZLE.replace(".", blank))
    assert torch.equal(tokens, Sudoku().encode(PUZZLE))
    masked = tokens.where(tokens >= 0, 9)
    assert Sudoku().decode(masked) == PUZZLE.strip()


def test_sudoku_is_a_codec_of_nine_tokens():
    codec = Sudoku()
    assert isinstance(codec, Codec) and codec.kind == "puzzle"
    assert (codec.vocab_size, codec.length) == (9, 81)
    assert codec.describe() == {"name": "sudoku"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("53..7", "81 cells, got 5"),
        (PUZZLE + ".", "81 cells, got 82"),
        (PUZZLE.replace("9", "x"), "got 'x'"),
        (PUZZLE.replace("53..7", "55..7"), "row 1 has more than one 5"),
        (PUZZLE.replace("53..7", "83..7"), "column 1 has more than one 8"),
        (PUZZLE.replace("6..195", "6.3195"), "box 1 has more than one 3"),
        ("12345678." + "." * 8 + "9" + "." * 63, "no complete grid has them all"),
        (PUZZLE.replace("53..7", "531.7"), "no complete grid has them all"),
    ],
)
def test_what_is_no_puzzle_is_refused_in_words(text, words):
    with pytest.raises(ValueError, match=words):
        Sudoku().encode(text)


def test_a_grid_is_valid_if_each_row_column_and_box_holds_every_digit_once():
    solved = Sudoku().encode(SOLVED)
    latin = (torch.arange(9)[:, None] + torch.arange(9)).remainder(9).flatten()  # boxes repeat
    same_rows = torch.arange(9).repeat(9)
    swapped = solved.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    masked = solved.clone()
    masked[40] = 9
    grids = torch.stack((solved, latin, same_rows, swapped, masked, Sudoku().encode(PUZZLE)))
    assert valid(grids).tolist() == [True, False, False, False, False, False]
    with pytest.raises(ValueError, match=r"\(N, 81\), got \(81,\)"):
        valid(solved)


def test_generated_grids_are_valid_and_distinct_even_up_to_the_names_of_digits():
    grids = SudokuGrids(2000)
    assert isinstance(grids, Dataset) and len(grids) == 2000 and grids.length == 81
    tokens = grids.rows(torch.arange(2000)).tokens
    assert tokens.dtype == torch.int64 and valid(tokens).all()
    names = tokens[:, :9].argsort(-1)  # the first row becomes 0 to 8
    assert len(names.gather(1, tokens).unique(dim=0)) == 2000


def test_every_digit_is_equally_likely_in_every_cell():
    n = 4000
    tokens = SudokuGrids(n).grids.long()
    share = torch.nn.functional.one_hot(tokens, 9).double().mean(0)
    assert (share - 1 / 9).abs().max() < 6.5 * (1 / 9 * 8 / 9 / n) ** 0.5


def test_grids_are_a_function_of_the_seed_and_a_smaller_set_is_the_start_of_a_larger():
    small, large = SudokuGrids(30), SudokuGrids(900)
    assert torch.equal(small.grids, large.grids[:30])
    assert not torch.equal(small.grids, SudokuGrids(30, seed=1).grids)


def test_symmetries_keep_a_grid_valid_and_change_it():
    grids, indices = SudokuGrids(200), torch.arange(200)
    drawn = grids.rows(indices).tokens
    moved = grids.rows(indices, generator(0)).tokens
    assert valid(moved).all() and (moved != drawn).any(1).all()
    assert torch.equal(moved, grids.rows(indices, generator(0)).tokens)
    assert not torch.equal(moved, grids.rows(indices, generator(1)).tokens)
    plain = SudokuGrids(200, symmetries=False)
    assert torch.equal(plain.rows(indices, generator(0)).tokens, drawn)


def test_symmetries_of_one_grid_are_many():
    moved = SudokuGrids(1).rows(torch.zeros(500, dtype=torch.int64), generator(0)).tokens
    assert len(moved.unique(dim=0)) == 500
    up_to_digits = moved[:, :9].argsort(-1).gather(1, moved)
    assert len(up_to_digits.unique(dim=0)) > 490


def test_grids_are_read_from_the_cache_and_a_damaged_cache_is_made_anew(cache):
    drawn = SudokuGrids(20, seed=3).grids
    (file,) = cache.iterdir()
    assert file.name == "sudoku-v1-20-3.npz"
    save_arrays(file, {"grids": drawn.flip(0).numpy()})
    assert torch.equal(SudokuGrids(20, seed=3).grids, drawn.flip(0))
    whole = file.read_bytes()
    for damaged in (whole[:100], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        file.write_bytes(damaged)
        assert torch.equal(SudokuGrids(20, seed=3).grids, drawn)
        assert torch.equal(torch.from_numpy(load_arrays(file)["grids"]), drawn)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "file" / "below"))
    assert valid(SudokuGrids(5).rows(torch.arange(5)).tokens).all()


def test_a_count_below_one_is_refused():
    with pytest.raises(ValueError, match="count must be an integer of at least 1, got 0"):
        SudokuGrids(0)


def test_each_visit_marks_as_given_0_to_60_cells_every_number_as_likely():
    grids, n = SudokuGrids(50), 30_000
    assert grids.rows(torch.arange(50)).given is None
    given = grids.rows(torch.arange(n) % 50, generator(0)).given
    assert given.shape == (n, 81) and given.dtype == torch.bool
    numbers = given.sum(1).bincount()
    assert len(numbers) == 61
    assert (numbers / n - 1 / 61).abs().max() < 6 * (1 / 61 / n) ** 0.5
    assert (given.double().mean(0) - 30 / 81).abs().max() < 6 * (0.25 / n) ** 0.5


def test_with_minimal_puzzles_half_of_the_visits_give_one_of_them_or_it_and_more():
    n = 8000
    data = SudokuGrids(50, seed=2, minimal=20, symmetries=False)
    rows = data.rows(torch.arange(n) % 50, generator(0))
    same = (rows.tokens[:, None] == data.solutions).all(2)  # (n, 20)
    puzzle, which = same.any(1), same.long().argmax(1)
    assert abs(puzzle.double().mean() - 0.5) < 5 * (0.25 / n) ** 0.5
    assert len(which[puzzle].unique()) == 20
    clues = data.puzzles[which] >= 0
    assert (rows.given | ~clues)[puzzle].all()
    more = (rows.given & ~clues).sum(1)[puzzle].bincount() / n
    assert len(more) == 31 and abs(more[0] - 0.25 - 0.25 / 31) < 5 * (0.2 / n) ** 0.5
    assert (more[1:] - 0.25 / 31).abs().max() < 6 * (0.25 / 31 / n) ** 0.5


def test_a_symmetry_moves_a_puzzle_with_its_solution():
    data = SudokuGrids(1, minimal=1)
    plain = SudokuGrids(1, minimal=1, symmetries=False)
    moved = data.rows(torch.zeros(200, dtype=torch.int64), generator(0))
    fixed = plain.rows(torch.zeros(200, dtype=torch.int64), generator(0))
    clues = data.puzzles[0] >= 0
    bare = (fixed.given == clues).all(1) & (moved.given.sum(1) == clues.sum())
    assert 30 < bare.sum() < 75  # of the same kind in both: kinds are drawn first
    assert torch.equal(fixed.tokens[bare], data.solutions.long().expand(int(bare.sum()), -1))
    puzzles = torch.where(moved.given, moved.tokens, -1)[bare]
    assert len(puzzles.unique(dim=0)) == len(puzzles)
    assert (count_solutions(puzzles.numpy()) == 1).all()
    assert torch.equal(torch.from_numpy(solve(puzzles.numpy())).long(), moved.tokens[bare])


def test_minimal_puzzles_for_training_are_a_count():
    with pytest.raises(ValueError, match="minimal must be an integer of at least 0, got -1"):
        SudokuGrids(5, minimal=-1)

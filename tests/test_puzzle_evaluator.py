"""Puzzles to judge by, and the script that makes the numbers of the Sudoku card."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import psidiff
from psidiff.data.sudoku import Sudoku, SudokuGrids
from psidiff.data.sudoku_solver import count_solutions, solve
from psidiff.evaluation.sudoku_metrics import clue_count, held_out_clues
from psidiff.experiment.compare import measure
from psidiff.experiment.results_log import Cell, Protocol, ResultsLog
from psidiff.experiment.sample_evaluators import PuzzleEvaluator, build_evaluator
from psidiff.files import read_json_lines
from psidiff.model import Decoded, Model
from psidiff.model_config import ModelConfig
from psidiff.models import Parameterized, Transformer
from psidiff.process import LogLinear, Masked, Uniform

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PSIDIFF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize(
    ("words", "count"),
    [("none", 0), ("0", 0), (0, 0), ("24", 24), (24, 24), ("random:30", 30), ("minimal", None)],
)
def test_clues_have_names(words, count):
    assert clue_count(words) == count


@pytest.mark.parametrize("words", ["many", "random", "random:81", "-3", "minimal:24", ""])
def test_what_says_no_clues_is_refused_in_words(words):
    with pytest.raises(ValueError, match="no clues of a Sudoku; these do: none, random:24"):
        PuzzleEvaluator(words)


def test_puzzles_to_judge_by_have_a_solution_and_training_has_none_of_them():
    assert held_out_clues("none", 5) is None
    random, minimal = held_out_clues("random:24", 40), held_out_clues("minimal", 40)
    assert ((random >= 0).sum(1) == 24).all()
    assert (count_solutions(random.numpy()) >= 1).all()
    assert (count_solutions(minimal.numpy()) == 1).all()
    assert torch.equal(minimal, held_out_clues("minimal", 40))
    assert not torch.equal(minimal, held_out_clues("minimal", 40, seed=1))
    training = SudokuGrids(500, minimal=40)
    seen = torch.cat((training.grids, training.solutions)).long()
    solved = torch.from_numpy(solve(minimal.numpy())).long()
    assert not (solved[:, None] == seen).all(2).any()


def test_a_bench_counts_the_minimal_puzzles_that_are_solved():
    bench = PuzzleEvaluator("minimal")
    given = bench.sampling_inputs(20)["infill"]
    grids = torch.from_numpy(solve(given.numpy())).long()
    grids[15:] = grids[15:].roll(1, 0)  # valid, of other puzzles
    found = {measure.name: measure for measure in bench.evaluate(Decoded(grids, 1.0, 1))}
    assert found["solved"].value == 0.75 and found["valid"].value == 1
    assert found["solved"].protocol["interval"] == pytest.approx([0.531, 0.888], abs=1e-3)


def test_without_clues_valid_grids_count_and_distinct_ones():
    grids = SudokuGrids(10).grids.long()[torch.arange(20) % 10]
    unknown = PuzzleEvaluator(None).evaluate(Decoded(grids, 1.0, 1))
    assert unknown[0].name == "valid" and "clues" not in unknown[0].protocol
    found = {m.name: m.value for m in PuzzleEvaluator("none").evaluate(Decoded(grids, 1.0, 1))}
    assert found["solved"] == 1 and found["distinct solutions"] == 10


def tiny(prior):
    torch.manual_seed(0)
    options = {"vocab_size": prior.vocab_size, "hidden_size": 16, "num_blocks": 1}
    options |= {"num_heads": 2, "cond_dim": 8, "dropout": 0.0, "learned_positions": 81}
    network = Transformer(**options).eval().requires_grad_(False)
    config = {"network": "transformer", "options": options, "predicts": "loo", "length": 81}
    return Model(
        Parameterized(network, prior).eval(),
        prior,
        LogLinear(),
        Sudoku(),
        ModelConfig.from_dict(config),
    )


def test_the_evaluator_of_a_puzzle_model_takes_clues_in_words():
    assert build_evaluator("board", tiny(Uniform(9)), clues="minimal").clues == "minimal"
    assert len(build_evaluator("board", tiny(Uniform(9))).sampling_inputs(3)["infill"]) == 3


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """The benchmark in an empty folder, with an untrained model and its masked twin."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.chdir(tmp_path)
    tiny(Uniform(9)).save("board")
    tiny(Masked(10, 9)).save("masks")
    main = importlib.import_module("sudoku").main

    def run(*arguments, code=None):
        monkeypatch.setattr(sys, "argv", ["sudoku.py", *map(str, arguments)])
        capsys.readouterr()
        if code is None:
            main()
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as stopped:
            main()
        return str(stopped.value)

    return run


FEW = ("--puzzles", 4, "--steps", "2,3", "--clues", "none,minimal", "--device", "cpu")


def test_the_card_s_script_measures_each_cell_once_and_goes_on_after_a_kill(script, tmp_path):
    out = tmp_path / "cells.jsonl"
    some = ("--sampler", "ancestral", "--sampler", "ancestral corrector=1x8 temperature=.1")
    said = script("board", "--masked", "masks", *FEW, *some, "--out", out)
    assert said.count("steps: ") == 20
    records = [json.loads(line) for line in out.read_text().split("\n") if line]
    assert len(records) == 20
    assert {r["sampler"] for r in records if r["masks"]} >= {"predictor=confident:argmax"}
    assert [r["steps"] for r in records] == sorted(r["steps"] for r in records)
    whole = out.read_text()
    out.write_text(whole[: len(whole) // 2])
    said = script("board", "--masked", "masks", *FEW, *some, "--out", out, "--table")
    cell = [line for line in said.split("\n") if line.startswith("[")]
    assert 0 < len(cell) < 15
    again = read_json_lines(out, cut_lines=True)
    assert len(again) == 20
    assert "| board | ancestral | .000 [.000, .490] | .000 [.000, .490] |" in said
    assert (
        "corrector=1x8 temperature=.1 (1." in said and "Distinct among the valid: all" in said
    )


def test_every_sampler_of_the_card_runs(script, tmp_path):
    said = script("board", "--puzzles", 2, "--steps", 2, "--clues", "minimal", "--table")
    assert "constant:0@.05-.6 predictor=maximal" in said and said.count("| board |") == 19


def test_the_figure_is_drawn_from_what_is_measured(script, tmp_path):
    script("board", *FEW, "--sampler", "ancestral", "--sampler", "constant:0@.05-.6")
    assert script("--figure", "solved.png") == ""
    assert (tmp_path / "solved.png").read_bytes()[:4] == b"\x89PNG"


def test_other_parameters_are_another_model(script, tmp_path):
    one = ("board", *FEW, "--sampler", "ancestral", "--out", "o.jsonl")
    assert script(*one).count("steps:") == 4 and script(*one) == ""
    model = tiny(Uniform(9))
    model.network.output_layer.linear.weight += 1
    model.save("board")
    assert script(*one).count("steps:") == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "none.jsonl", "--table"), "nothing is measured in none.jsonl: name a model"),
        (("hamlet",), "there is no model at hamlet"),
        (("digits",), "digits is no diffusion model of Sudoku"),
        (("board", "--masked", "board"), "--masked names board, which has no mask"),
        (("board", "--clues", "most"), "'most' says no clues of a Sudoku"),
        (("board", "--puzzles", "2", "--sampler", "x"), "'x' is no kappa rule"),
    ],
)
def test_mistakes_are_said_in_words(script, arguments, words):
    assert words in script(*arguments, code=1)


def test_a_cell_says_its_clues_and_its_last_step(tmp_path, monkeypatch):
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path))
    model = psidiff.load("sudoku", device="cpu")
    cell = Cell("sudoku", 2, "constant:0@.05-.6")
    protocol = Protocol(samples=2, clues="minimal", last="greedy")
    record = measure(cell, protocol, model, PuzzleEvaluator("minimal"))
    assert record["sampler"] == "constant:0@.05-.6 steps=2 last=greedy"
    solved = next(m for m in record["measures"] if m["name"] == "solved")
    assert solved["protocol"]["clues"] == "minimal"
    book = ResultsLog(tmp_path / "book", protocol, 0)
    book.path.write_text('{"half": ')
    book.add(record)
    book.add(record)
    lines = book.path.read_text().splitlines()
    assert len(lines) == 2 and lines[0] == lines[1] and len(book.records()) == 2

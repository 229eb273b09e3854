"""The models that ship: they load without a network, and do what their cards say."""

import pytest
import torch
from typer.testing import CliRunner

import psidiff
from psidiff.cli.main import app
from psidiff.cli.models import card
from psidiff.data.sudoku import Sudoku
from psidiff.evaluation.puzzle_metrics import held_out_clues, puzzle_metrics
from psidiff.model import list_pretrained

NAMES = ("books", "digits", "shakespeare", "sudoku")


def test_these_ship():
    assert list_pretrained() == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_loads_answers_and_has_a_card(name):
    model = psidiff.load(name, device="cpu")
    tokens = torch.zeros(1, model.config.length, dtype=torch.int64)
    log_x = model.denoiser(tokens, 0.5)
    assert log_x.dtype == torch.float32
    torch.testing.assert_close(log_x.exp().sum(-1), torch.ones(tokens.shape))
    text = card(name)
    for part in ("## Data", "## Recipe", "## Scores", "## Sampler", "## Limits"):
        assert part in text, part
    assert model.config.kappa in text  # what kappa="auto" follows
    assert sum(p.numel() for p in model.network.parameters()) < 8e6


def test_sudoku_keeps_its_clues_and_solves():
    clues = held_out_clues("random:24", 6, 3)
    model = psidiff.load("sudoku", device="cpu")
    made = model.sample(6, 32, infill=clues, last="greedy")
    solved, _, kept, _ = puzzle_metrics(Sudoku(), made.tokens, clues)
    assert kept.value == 1 and solved.value >= 5 / 6  # 99% of 1,000 on a GPU


def test_books_continues_and_fills_in():
    model = psidiff.load("books", device="cpu")
    begun = "It was a dark and stormy night"
    (text,) = model.sample(1, 8, prompt=begun, length=32).text
    assert text.startswith(begun) and len(text) > len(begun) + 20
    (text,) = model.sample(1, 8, infill="The king {{4}} his sword.").text
    assert text.startswith("The king") and text.endswith(" his sword.")


def test_the_command_lists_the_models_and_prints_cards():
    listed = CliRunner().invoke(app, ["models"]).output
    for name in list_pretrained():
        assert name in listed
        assert card(name).splitlines()[0] in CliRunner().invoke(app, ["models", name]).output
    wrong = CliRunner().invoke(app, ["models", "chess"])
    assert isinstance(wrong.exception, ValueError) and "no model 'chess'" in str(
        wrong.exception
    )

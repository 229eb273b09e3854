"""Countdown and 3-SAT: what is generated is right, and what is wrong is seen."""

import itertools

import numpy as np
import pytest
import torch
from toys import generator

from psidiff.data.countdown import Countdown, countdown_rows, countdowns
from psidiff.data.satisfiability import CLAUSES, Satisfiability, formulas, satisfiability_rows


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path))


GAMES = [
    (Countdown(), countdowns, countdown_rows),
    (Satisfiability(), formulas, satisfiability_rows),
]
games = pytest.mark.parametrize(("codec", "drawn", "rows"), GAMES, ids=["countdown", "3sat"])


@games
def test_what_is_drawn_is_right_and_stays_so_rearranged(codec, drawn, rows):
    solved = torch.from_numpy(drawn(300, 5)).long()
    assert codec.valid(solved).all() and solved.max() < codec.vocab_size
    dataset = rows(300, 5)
    row = dataset.rows(torch.arange(300), generator(1))
    assert codec.valid(row.tokens).all() and not torch.equal(row.tokens, solved)
    assert torch.equal(dataset.rows(torch.arange(300)).tokens, solved)
    free = ~row.given[0]
    assert free.sum() in (12, 9) and not free[0]


@games
def test_the_first_of_a_larger_set_are_the_smaller_set(codec, drawn, rows):
    assert np.array_equal(drawn(400, 1)[:50], drawn(50, 1))
    assert not np.array_equal(drawn(50, 2), drawn(50, 1))


@games
def test_a_wrong_answer_is_seen(codec, drawn, rows):
    solved = torch.from_numpy(drawn(200, 3)).long()
    free = (~rows(1).question).nonzero()[:, 0]
    changed = solved.clone()
    g = generator(0)
    at = free[torch.randint(len(free), (200,), generator=g)]
    token = torch.randint(codec.vocab_size, (200,), generator=g)
    changed[torch.arange(200), at] = token
    same = (changed == solved).all(1)
    share = codec.valid(changed)[~same].double().mean()
    assert codec.valid(changed)[same].all() and share < 0.5


@games
def test_text_and_tokens_go_round(codec, drawn, rows):
    for tokens in torch.from_numpy(drawn(20, 7)).long():
        assert torch.equal(codec.encode(codec.decode(tokens)), tokens)
    asked = codec.held_out(3, 0)
    again = codec.encode(codec.decode(asked[0]).split(":")[0] + ":")
    assert torch.equal(again, asked[0]) and (asked == -1).any(1).all()


def test_no_countdown_is_learnt_and_judged_by():
    def questions(solved):
        return {(*sorted(row[:4]), row[4]) for row in solved.tolist()}

    learnt, judged = questions(countdowns(20_000, 0)), questions(countdowns(2_000, 9, True))
    assert not learnt & judged and len(judged) > 1_500


def test_countdown_is_judged_as_a_person_would():
    game = Countdown()
    for text, right in (
        ("1 2 3 4 24: 1*2=2 2*3=6 6*4=24", True),
        ("1 2 3 4 24: 2*1=2 3*2=6 4*6=24", True),
        ("1 2 3 4 24: 1*2=2 2*3=6 6*4=23", False),
        ("1 2 3 4 24: 2*2=4 4*3=12 12*2=24", False),  # there is one 2
        ("8 2 3 1 12: 8/2=4 4*3=12 12*1=12", True),
        ("9 2 3 1 12: 9/2=4 4*3=12 12*1=12", False),
        ("5 9 1 1 4: 9-5=4 4*1=4 4/1=4", True),
        ("5 9 1 1 4: 5-9=4 4*1=4 4/1=4", False),
    ):
        assert bool(game.valid(game.encode(text)[None])[0]) is right, text


def test_an_assignment_satisfies_what_enumeration_says():
    codec = Satisfiability()
    tokens = torch.from_numpy(formulas(1, 4)).long().repeat(512, 1)
    values = torch.tensor(list(itertools.product((0, 1), repeat=9)))
    tokens[:, -9:] = 18 + values
    found = codec.valid(tokens)
    literals = tokens[0, :-9].view(CLAUSES, 3).tolist()
    for row, right in zip(values.tolist(), found.tolist(), strict=True):
        want = all(any(row[i // 2] == 1 - i % 2 for i in clause) for clause in literals)
        assert want == right
    assert 0 < found.sum() < 512


@pytest.mark.parametrize(
    ("codec", "text", "said"),
    [
        (Countdown(), "1 2 3 4", "four numbers|4 numbers"),
        (Countdown(), "1 2 3 4 x: 1+1=2", "is no Countdown"),
        (Countdown(), "1 2 3 4 200:", "from 1 to 99"),
        (Satisfiability(), "a b c: 1", "38 clauses"),
        (Satisfiability(), " ".join("abz" * 38) + ":", "neither a literal"),
    ],
)
def test_what_is_no_puzzle_is_said_in_one_sentence(codec, text, said):
    with pytest.raises(ValueError, match=said):
        codec.encode(text)

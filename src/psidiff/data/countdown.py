"""Countdown: four numbers, and three sums that make a target of them.

A sequence is the four numbers, the target, and three times "a op b = c". Each sum takes two of
the numbers that are left and puts its result among them; the last result is the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from ..types import as_count, check_shape
from .codec import CODECS
from .puzzle import Puzzle, PuzzleRows, cached_array, random_orders, unanswered

NUMBERS, LARGEST = 4, 99  # results are whole numbers from 1 to 99
_OPERATORS = "+-*/"
_FIRST = LARGEST + 1  # of the operators
_QUESTION, _LENGTH = NUMBERS + 1, NUMBERS + 1 + 4 * (NUMBERS - 1)
_FORMAT, _CHUNK = 1, 4096
_SHARE = 16  # one question in so many is held out, whatever the seed


@CODECS.register("countdown")
@dataclass(frozen=True)
class Countdown(Puzzle):
    """Text such as "3 5 8 20: 3+5=8 8*20=..."; sums that are still to be made are blanks.

    Example:
        >>> from psidiff.data.countdown import Countdown
        >>> game = Countdown()
        >>> tokens = game.encode("1 2 3 4 24: 1*2=2 2*3=6 6*4=24")
        >>> game.decode(tokens), bool(game.valid(tokens[None]))
        ('1 2 3 4 24: 1*2=2 2*3=6 6*4=24', True)
    """

    vocab_size = _FIRST + len(_OPERATORS)
    length = _LENGTH

    def encode(self, text: str) -> Tensor:
        """Return tokens (17,) of "numbers target:" and of the sums after it, -1 if missing."""
        question, _, sums = text.partition(":")
        try:
            tokens = [int(word) for word in question.split()]
            for word in sums.split():
                tokens += _read_sum(word)
        except ValueError:
            raise ValueError(f'{text!r} is no Countdown such as "1 2 3 4 24: 1*2=2"') from None
        if len(question.split()) != _QUESTION or len(tokens) > _LENGTH:
            raise ValueError(
                f"a Countdown has {NUMBERS} numbers, a target, a colon and at most "
                f"{NUMBERS - 1} sums"
            )
        if any(not 1 <= t <= LARGEST for t in tokens[:_QUESTION]):
            raise ValueError(f"numbers of a Countdown are from 1 to {LARGEST}")
        return torch.tensor(tokens + [-1] * (_LENGTH - len(tokens)))

    def decode(self, tokens: Tensor) -> str:
        """Return "1 2 3 4 24: 1*2=2 2*3=6 6*4=24"; "_" for what is missing."""
        check_shape("tokens", tokens, (_LENGTH,))
        said = self.pieces(tokens)
        sums = [
            f"{said[i]}{said[i + 1]}{said[i + 2]}={said[i + 3]}"
            for i in range(_QUESTION, _LENGTH, 4)
        ]
        return f"{' '.join(said[:_QUESTION])}: {' '.join(sums)}"

    def pieces(self, tokens: Tensor) -> list[str]:
        """Return each number or operator by itself."""
        names = [*map(str, range(_FIRST)), *_OPERATORS]
        return [names[t] if 0 <= t < len(names) else "_" for t in tokens.tolist()]

    def valid(self, tokens: Tensor) -> Tensor:
        """Whether each sum is right, of numbers that are left, and the last is the target."""
        left = tokens[:, :NUMBERS].clone()
        right = ((left >= 1) & (left <= LARGEST)).all(1)
        for i in range(_QUESTION, _LENGTH, 4):
            a, op, b, c = tokens[:, i : i + 4].unbind(1)
            right &= _result(a, op, b) == c
            for number in (a, b):
                found = left == number[:, None]
                right &= found.any(1) & (number >= 1)
                first = found.long().argmax(1, keepdim=True)
                left = left.scatter(1, first, -1)  # used up
            left = torch.cat((left, c[:, None]), 1)
        return right & (tokens[:, -1] == tokens[:, NUMBERS])

    def held_out(self, count: int, seed: int) -> Tensor:
        """Questions that no training set has, (count, 17)."""
        return unanswered(countdowns(count, seed, held_out=True), _question_mask())


def countdown_rows(count: int, seed: int = 0, held_out: bool = False) -> PuzzleRows:
    """So many puzzles to learn from; each visit puts the four numbers in another order."""

    def rearranged(tokens: Tensor, generator: Generator) -> Tensor:
        order = random_orders(len(tokens), NUMBERS, generator)
        return torch.cat((tokens[:, :NUMBERS].gather(1, order), tokens[:, NUMBERS:]), 1)

    return PuzzleRows(countdowns(count, seed, held_out), _question_mask(), rearranged)


def countdowns(count: int, seed: int, held_out: bool = False) -> np.ndarray:
    """Puzzles (count, 17) of uint8 with an answer, the same for the same seed.

    held_out: only such questions as are never learnt from, else only others.
    """
    count, seed = as_count("count", count), as_count("seed", seed, least=0)

    def draw() -> np.ndarray:
        parts, chunk = list[np.ndarray](), 0
        while sum(map(len, parts)) < count:
            rng = np.random.Generator(np.random.PCG64([seed, chunk, _FORMAT]))
            drawn = _drawn(rng)
            parts.append(drawn[_is_held_out(drawn) == held_out])
            chunk += 1
        return np.concatenate(parts)[:count]

    name = f"countdown-v{_FORMAT}-{count}-{seed}" + ("-held-out" if held_out else "")
    return cached_array(name, (count, _LENGTH), np.uint8, draw)


def _read_sum(word: str) -> list[int]:
    """a op b = c"""
    left, _, c = word.partition("=")
    at = next(i for i, character in enumerate(left) if character in _OPERATORS)
    return [int(left[:at]), _FIRST + _OPERATORS.index(left[at]), int(left[at + 1 :]), int(c)]


def _result(a: Tensor, op: Tensor, b: Tensor) -> Tensor:
    """a op b, or -1 where it is no whole number from 1 to 99."""
    divided = torch.where(a % b.clamp(min=1) == 0, a // b.clamp(min=1), -1)
    every = torch.stack((a + b, a - b, a * b, divided), 1)
    known = (op >= _FIRST) & (op < _FIRST + len(_OPERATORS))
    found = every.gather(1, (op - _FIRST).clamp(0, len(_OPERATORS) - 1)[:, None])[:, 0]
    return torch.where(known & (found >= 1) & (found <= LARGEST), found, -1)


def _drawn(rng: np.random.Generator) -> np.ndarray:
    """Numbers at random, and sums at random of those that are left, where all come out."""
    left = torch.from_numpy(rng.integers(1, 31, (_CHUNK, NUMBERS)))
    columns, right = [left], torch.ones(_CHUNK, dtype=torch.bool)
    for size in range(NUMBERS, 1, -1):
        order = torch.from_numpy(rng.random((_CHUNK, size)).argsort(1))
        left = left.gather(1, order)
        op = _FIRST + torch.from_numpy(rng.integers(len(_OPERATORS), size=_CHUNK))
        a, b = left[:, 0], left[:, 1]
        c = _result(a, op, b)
        right &= c > 0
        columns.append(torch.stack((a, op, b, c), 1))
        left = torch.cat((left[:, 2:], c[:, None]), 1)
    solved = torch.cat((columns[0], left, *columns[1:]), 1)
    return solved[right].numpy().astype(np.uint8)


def _is_held_out(solved: np.ndarray) -> np.ndarray:
    """One in `_SHARE`, by a hash of the numbers in order of size and the target."""
    numbers = np.sort(solved[:, :NUMBERS], 1).astype(np.uint64)
    key = solved[:, NUMBERS].astype(np.uint64)
    for column in numbers.T:
        key = (key * np.uint64(0x9E3779B97F4A7C15)) ^ (column + np.uint64(0x632BE59BD9B4E019))
        key ^= key >> np.uint64(29)
    return key % np.uint64(_SHARE) == 0


def _question_mask() -> Tensor:
    return torch.arange(_LENGTH) < _QUESTION

"""Puzzles to judge by, how many answers are right, and how many answer their question."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ..data.puzzle import Puzzle
from ..data.sudoku import Sudoku, complete_grids, minimal_puzzles
from ..types import as_count, check_shape
from .metric_result import MetricResult, share

_HELD_OUT = 1_000_003  # seeds from here on are for judging


def clue_count(words: str | int) -> int | None:
    """none: 0, random:24 or 24: 24, minimal: None"""
    text = str(words).strip()
    if text == "minimal":
        return None
    match = re.fullmatch(r"(?:random:)?([0-9]+)", "0" if text == "none" else text)
    if match is None or int(match[1]) > 80:
        raise ValueError(
            f"{text!r} says no clues of a Sudoku; these do: none, random:24 (up to 80), minimal"
        )
    return int(match[1])


def held_out_clues(words: str | int, count: int, seed: int = 0) -> Tensor | None:
    """So many puzzles (count, 81) to judge by, -1 where a cell is free; None without clues.

    "random:24" shows 24 random cells of a grid; a "minimal" puzzle has one solution and can
    spare no clue.
    """
    shown, count = clue_count(words), as_count("count", count)
    if shown is None:
        return torch.from_numpy(minimal_puzzles(count, seed + _HELD_OUT)[0]).long()
    if not shown:
        return None
    grids = torch.from_numpy(complete_grids(count, seed + _HELD_OUT)).long()
    chance = torch.rand(grids.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(chance.argsort(-1).argsort(-1) < shown, grids, -1)


def puzzle_metrics(
    codec: Puzzle, tokens: Tensor, clues: Tensor | None = None
) -> list[MetricResult]:
    """What share of the puzzles (N, L) is right; clues (L,) or (N, L) are -1 where free.

    "solved" is valid with every clue kept. Without clues there is only "valid". Distinct
    solutions are counted among the solved ones.
    """
    if not len(tokens):
        raise ValueError("there are no puzzles to judge")
    right, L, K = codec.valid(tokens), codec.length, codec.vocab_size
    if clues is None:
        return [share("valid", right), _distinct(tokens[right], len(tokens))]
    check_shape("clues", clues, (L,) if clues.ndim == 1 else tuple(tokens.shape))
    if not bool(((clues >= -1) & (clues < K)).all()):
        raise ValueError(f"clues must be tokens from 0 to {K - 1}, or -1 where a cell is free")
    clues = clues.to(tokens.device)
    kept = ((tokens == clues) | (clues < 0)).all(1)
    shares = [share("solved", right & kept), share("valid", right), share("clues kept", kept)]
    return [*shares, _distinct(tokens[right & kept], len(tokens))]


def held_out_questions(
    codec: Puzzle, words: str | int, count: int, seed: int = 0
) -> Tensor | None:
    """So many puzzles (count, L) to judge by, -1 where the answer goes; None without clues.

    words: clues of a Sudoku; other puzzles have their questions.
    """
    if isinstance(codec, Sudoku):
        return held_out_clues(words, count, seed)
    return codec.held_out(count, seed + _HELD_OUT)


def _distinct(solved: Tensor, judged: int) -> MetricResult:
    count = len(torch.unique(solved, dim=0)) if len(solved) else 0
    return MetricResult("distinct solutions", float(count), protocol={"puzzles": judged})

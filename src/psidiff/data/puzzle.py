"""Puzzles whose answers a program checks: a question in some tokens, the answer in others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

from ..files import folder_of, load_arrays, save_arrays
from ..types import FREE, Rows
from .codec import Codec


class Puzzle(Codec):
    """Base class of codecs of puzzles: what counts as an answer, and questions to judge by.

    Example:
        >>> from psidiff.data.countdown import Countdown
        >>> game = Countdown()
        >>> game.valid(game.held_out(2, seed=0))
        tensor([False, False])
    """

    kind: ClassVar[str] = "puzzle"
    length: int

    @abstractmethod
    def valid(self, tokens: Tensor) -> Tensor:
        """Return whether each sequence (N, length) is a question with a right answer: (N,)."""

    @abstractmethod
    def held_out(self, count: int, seed: int) -> Tensor:
        """Return so many questions (count, length) to judge by, -1 where the answer goes."""


class PuzzleRows:
    """Questions with their answers, drawn once; `rearranged` makes another of each at a visit.

    Args:
        solved: questions and answers, (N, L).
        question: which positions are the question, (L,) of bool: they are given.
        rearranged: from rows (n, L) and a generator equivalent ones; None: they stay.
    """

    def __init__(
        self,
        solved: np.ndarray,
        question: Tensor,
        rearranged: Callable[[Tensor, Generator], Tensor] | None = None,
    ) -> None:
        self.solved, self.question, self.rearranged = solved, question, rearranged

    @property
    def length(self) -> int:
        return self.solved.shape[1]

    def __len__(self) -> int:
        return len(self.solved)

    def rows(self, indices: Tensor, generator: Generator | None = None) -> Rows:
        """Puzzles by number; without a generator as they were drawn, none of it given."""
        tokens = torch.from_numpy(self.solved[indices.cpu().numpy()]).long()
        if generator is None:
            return Rows(tokens)
        if self.rearranged is not None:
            tokens = self.rearranged(tokens, generator)
        return Rows(tokens, given=self.question.expand(len(tokens), -1))


def unanswered(solved: np.ndarray, question: Tensor) -> Tensor:
    """The questions of puzzles (N, L), -1 where the answer was."""
    return torch.where(question, torch.from_numpy(solved).long(), FREE)


def random_orders(count: int, size: int, generator: Generator) -> Tensor:
    """A random order of `size` things for each of `count` rows, (count, size)."""
    return (
        torch.rand(count, size, generator=generator, device=generator.device).argsort(1).cpu()
    )


def cached_array(
    name: str, shape: tuple[int, ...], dtype: type, draw: Callable[[], np.ndarray]
) -> np.ndarray:
    """An array of PSIDIFF_CACHE; drawn, and kept there if that can be written, if it is not."""
    path = folder_of("PSIDIFF_CACHE") / f"{name}.npz"
    with suppress(OSError, ValueError, KeyError):  # absent or damaged
        kept = load_arrays(path)["grids"]
        if kept.shape == shape and kept.dtype == dtype:
            return kept
    drawn = draw()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_arrays(path, {"grids": drawn})
    return drawn

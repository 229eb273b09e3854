"""Data: text, images, puzzles and toys as tokens, and the codecs that lead there and back."""

from . import (  # noqa: F401  # their codecs register
    characters,
    countdown,
    images,
    satisfiability,
    sudoku,
    tokenizers,
)

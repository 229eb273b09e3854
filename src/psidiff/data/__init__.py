"""Data: text, images, puzzles and toys as tokens, and the codecs that lead there and back."""

from . import characters, images, sudoku, tokenizers  # noqa: F401  # their codecs register

"""Data: text, images, puzzles and toys as tokens, and the codecs that lead there and back."""

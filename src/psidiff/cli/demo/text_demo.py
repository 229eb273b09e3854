"""A passage that forms in the terminal, and a sentence whose blanks are filled."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ...html.replay import pieces
from ...model import Model
from ...sampling import Trace
from .watched import watched

PROMPT = "The door opened, and"
BLANKS = "The old captain{{8}} and looked at the sea, for{{8}} before the storm."
KAPPA, TOP_P = "cap:.01", 0.9
Pieces = list[tuple[str, bool]]  # of a sentence, and whether each was given


def write(console: Console, model: Model, steps: int, seed: int) -> Trace:
    """A passage after a prompt, all of its tokens at once."""
    console.print(
        f"A passage after the words “{PROMPT}”: not from left to right, but all tokens at "
        f"once in {steps} steps, by {KAPPA} with top-p {TOP_P}.\n",
        highlight=False,
    )
    with watched(console, model, steps, most=1) as on_step:
        made = model.sample(
            1, steps, KAPPA, TOP_P, seed, prompt=PROMPT, record=True, on_step=on_step
        )
    assert made.trace is not None
    return made.trace


def fill(console: Console, model: Model, count: int, steps: int, seed: int) -> list[Pieces]:
    """The same sentence with its blanks filled, so many times."""
    asked = BLANKS.replace("{{8}}", " ________")
    console.print(f"\nBlanks of eight tokens each, filled {count} times:\n\n  {asked}\n")
    with console.status("filling the blanks"):
        made = model.sample(count, steps, KAPPA, TOP_P, seed, infill=BLANKS, record=True)
    assert made.trace is not None
    tokens, given = made.tokens.cpu().tolist(), made.trace.about["given"]
    filled = [_joined(model, *row) for row in zip(tokens, given, strict=True)]
    for sentence in filled:
        words = [Text(text, "" if known else "bold green") for text, known in sentence]
        console.print(Padding(Text.assemble(*words), (0, 2)), highlight=False)
    return filled


def _joined(model: Model, tokens: list[int], given: list[int]) -> Pieces:
    """Neighbours that are both given, or both made, as one piece of text."""
    found: Pieces = []
    for piece, known in zip(pieces(model.codec, tokens), map(bool, given), strict=True):
        if found and found[-1][1] == known:
            piece = found.pop()[0] + piece
        found.append((piece, known))
    return found

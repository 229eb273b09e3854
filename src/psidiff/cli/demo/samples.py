"""Prose and digits that form in the terminal; elsewhere only what came of them is shown."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ...html.replay import pieces
from ...model import Model
from ...sampling import Trace
from ..live_view import LiveView

PROMPT = "The door opened, and"
BLANKS = "The old captain{{8}} and looked at the sea, for{{8}} before the storm."
KAPPA, TOP_P = "cap:.01", 0.9
GUIDANCE = 2.0  # of digits
Pieces = list[tuple[str, bool]]  # of a sentence, and whether each was given


def write(console: Console, model: Model, steps: int, seed: int) -> Trace:
    """A passage after a prompt, all of its tokens at once."""
    console.print(
        f"A passage after the words “{PROMPT}”: not from left to right, but all tokens at "
        f"once in {steps} steps, by {KAPPA} with top-p {TOP_P}.\n",
        highlight=False,
    )
    options = {"kappa": KAPPA, "top_p": TOP_P, "prompt": PROMPT}
    return _sample_in_sight(console, model, 1, steps, seed=seed, **options)


def fill(console: Console, model: Model, count: int, steps: int, seed: int) -> list[Pieces]:
    """The same sentence with its blanks filled, so many times."""
    shown = BLANKS.replace("{{8}}", " ________")
    console.print(f"\nBlanks of eight tokens each, filled {count} times:\n\n  {shown}\n")
    with console.status("filling the blanks"):
        made = model.sample(count, steps, KAPPA, TOP_P, seed, infill=BLANKS, record=True)
    assert made.trace is not None
    tokens, given = made.tokens.cpu().tolist(), made.trace.about["given"]
    filled = [_joined(model, *row) for row in zip(tokens, given, strict=True)]
    for sentence in filled:
        words = [Text(text, "" if known else "bold green") for text, known in sentence]
        console.print(Padding(Text.assemble(*words), (0, 2)), highlight=False)
    return filled


def draw(console: Console, model: Model, rows: int, steps: int, seed: int) -> Trace:
    """Rows of ten images, one of each class."""
    console.print(
        f"{10 * rows} handwritten digits of 8 x 8 pixels, each drawn for its class in {steps} "
        "steps; ten of them here:\n",
        highlight=False,
    )
    options = {"labels": [*range(10)] * rows, "guidance": GUIDANCE}
    return _sample_in_sight(console, model, 10 * rows, steps, seed=seed, **options)


def _sample_in_sight(
    console: Console, model: Model, count: int, steps: int, **options: Any
) -> Trace:
    """A record of samples whose every step is drawn in a terminal, and in a file the last."""

    def place(i: int) -> str:
        return f"step {i + 1} of {steps}" if i < steps else f"after {steps} steps"

    view = LiveView(console, model.codec, most=10, total=steps + 1, place=place, pictures=1)
    with view as on_step:
        made = model.sample(count, steps, record=True, on_step=on_step, **options)
    assert made.trace is not None
    return made.trace


def _joined(model: Model, tokens: list[int], given: list[int]) -> Pieces:
    """Neighbours that are both given, or both made, as one piece of text."""
    each = zip(pieces(model.codec, tokens), map(bool, given), strict=True)
    groups = groupby(each, key=itemgetter(1))
    return [("".join(text for text, _ in group), known) for known, group in groups]

"""Samples that form before your eyes: text, boards and images in the terminal, step by step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from torch import Tensor

from ..data.codec import Codec
from ..html.replay import pieces
from ..sampling import Step
from ..types import Tokens

_STYLES = ("", "green", "red")  # kept, predicted, renoised
_PAUSE = 0.05  # seconds between two pictures, at least
_SHADES = " ░▒▓█"  # an image where there are no colours
_TOP, _MIDDLE, _BOTTOM = ("─" * 7).join("┌┬┬┐"), ("─" * 7).join("├┼┼┤"), ("─" * 7).join("└┴┴┘")


class LivePicture:
    """A picture that is redrawn in a terminal, and printed elsewhere; use as a context."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.moving: bool = console.is_terminal and not console.is_dumb_terminal
        self.coloured: bool = console.color_system is not None and not console.no_color
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Any:
        if self.moving:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, picture: RenderableType) -> None:
        if self.moving:
            self._live.update(picture, refresh=True)
        else:
            self.console.print(picture, highlight=False)


class LiveView(LivePicture):
    """Pass it as `on_step`, inside `with`. Of many batches the first is shown.

    given     (B, L), true where the user gave the token
    most      samples to show, where so many fit
    total     steps of the plan, the last one counted
    place     what to call step i, if not by its number
    pictures  how many, where nothing can be redrawn
    """

    def __init__(
        self,
        console: Console,
        codec: Codec | None,
        given: Any = None,
        most: int = 4,
        *,
        total: int,
        place: Callable[[int], str] | None = None,
        pictures: int = 4,
    ) -> None:
        super().__init__(console)
        self.codec = codec
        self.most: int = most
        self.place: Callable[[int], str] = place or (lambda i: f"step {i + 1} of {total}")
        self.given: Tensor | None = (
            None if given is None else torch.as_tensor(given).bool().cpu()
        )
        self._stops = {math.ceil(total * (i + 1) / pictures) for i in range(pictures)}
        self._waiting: tuple[int, Step, Tensor, Tensor] | None = None  # the last one, undrawn
        self._step, self._time = -1.0, -math.inf

    def __exit__(self, *error: object) -> None:
        self._draw()
        super().__exit__(*error)

    def __call__(self, i: int, step: Step, z: Tokens, route: Tensor) -> None:
        if i <= self._step:  # a further batch
            self._step = math.inf
            return
        self._step, self._waiting = i, (i, step, z, route)
        soon = time.monotonic() - self._time < _PAUSE
        if i + 1 in self._stops or (self.moving and not soon):
            self._draw()

    def _draw(self) -> None:
        if self._waiting is not None:
            self.show(self._picture(*self._waiting))
            self._waiting, self._time = None, time.monotonic()

    def _picture(self, i: int, step: Step, z: Tensor, route: Tensor) -> RenderableType:
        """A line that says where the run is, and the samples that fit below it."""
        z, route = z[: self.most].cpu(), route[: self.most].cpu()
        given = torch.zeros(z.shape) if self.given is None else self.given[: len(z)]
        kind = "text" if self.codec is None else self.codec.kind
        if self.codec is not None and kind == "image":
            drawn = [self._image(self.codec.decode(row)) for row in z]
        else:
            rows = zip(z.tolist(), route.tolist(), given.tolist(), strict=True)
            form = board if kind == "puzzle" else self._text
            drawn = [form(self._styled(*row)) for row in rows]
        shown = drawn[: self._fitting(drawn, stacked=kind == "text")]
        line = self._line(i, step, route[: len(shown)])
        return Group(line, *(map(Panel, shown) if kind == "text" else [Columns(shown)]))

    def _line(self, i: int, step: Step, route: Tensor) -> Text:
        kept, predicted, renoised = (int((route == r).sum()) for r in range(3))
        return Text.assemble(
            f"{self.place(i)}   t {step.t:.3f}   kept {kept}   ",
            (f"predicted {predicted}", _STYLES[1]),
            "   ",
            (f"renoised {renoised}", _STYLES[2]),
        )

    def _fitting(self, drawn: list[Text], stacked: bool) -> int:
        """How many samples the window has room for, one at least; a file has room for all."""
        if not self.moving:
            return len(drawn)
        width, height = self.console.size
        if stacked:
            heights = (len(text.wrap(self.console, width - 4)) + 2 for text in drawn)
            fitting = sum(end < height - 1 for end in accumulate(heights))
            self.most = max(fitting, 1)  # one that has gone does not come back: no flicker
            return self.most
        lines = drawn[0].split("\n")
        across = (width + 1) // (max(line.cell_len for line in lines) + 1)
        return max(across * ((height - 2) // len(lines)), 1)

    def _styled(self, tokens: list[int], route: list[int], given: list[Any]) -> list[Text]:
        """Each token by itself, in the colour of what happened to it."""
        each = zip(pieces(self.codec, tokens), route, given, strict=True)
        return [Text(p, "bold underline" if g else _STYLES[r]) for p, r, g in each]

    def _text(self, tokens: list[Text]) -> Text:
        return Text(" " if self.codec is None else "").join(tokens)

    def _image(self, image: np.ndarray) -> Text:
        width, height = self.console.size
        rows = 2 * (height - 2) if self.moving else image.shape[0]
        every = max(math.ceil(image.shape[1] / width), math.ceil(image.shape[0] / rows), 1)
        image = image[::every, ::every]
        return _half_blocks(image) if self.coloured else _shades(image)


def board(cells: list[Text]) -> Text:
    """Nine rows of nine in boxes of three by three."""
    lines = [Text(_TOP)]
    for row in range(9):
        boxes = [Text(" ").join(cells[i : i + 3]) for i in range(9 * row, 9 * row + 9, 3)]
        lines.append(Text.assemble("│ ", Text(" │ ").join(boxes), " │"))
        if row % 3 == 2:
            lines.append(Text(_BOTTOM if row == 8 else _MIDDLE))
    return Text("\n").join(lines)


def _half_blocks(image: np.ndarray) -> Text:
    """Two pixels a character: the upper one its ink, the lower one its paper."""
    image = image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2)
    colours = [["#" + bytes(pixel).hex() for pixel in row] for row in image.tolist()]
    text = Text(no_wrap=True)
    for top in range(0, len(colours), 2):
        text.append("\n" if top else "")
        lower = colours[top + 1] if top + 1 < len(colours) else ["default"] * image.shape[1]
        for ink, paper in zip(colours[top], lower, strict=True):
            text.append("▀", f"{ink} on {paper}")
    return text


def _shades(image: np.ndarray) -> Text:
    """Two characters a pixel, since characters are about twice as high as wide."""
    grey = image if image.ndim == 2 else image.mean(2)
    levels = (grey.astype(float) * (len(_SHADES) - 1) / 255).round().astype(int)
    return Text("\n".join("".join(2 * _SHADES[i] for i in row) for row in levels.tolist()))

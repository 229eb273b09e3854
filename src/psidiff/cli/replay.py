"""`psidiff replay`: the page of recorded runs, and where it is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..html.replay import write_page_of_files
from .terminal import plain


def show(console: Console, files: list[Path], out: Path) -> None:
    """Write the page of one trace, or of two side by side, and say where it is."""
    write_page_of_files(files, out)
    text = Text.assemble("Open it in a browser: ", (plain(out), "bold"))
    console.print(text, soft_wrap=True)

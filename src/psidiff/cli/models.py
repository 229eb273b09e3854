"""`psidiff models`: what ships, and the card of each."""

from __future__ import annotations

from rich.console import Console
from rich.markdown import Markdown

from ..model import list_pretrained
from ..model_card import shipped_card


def run(console: Console, name: str | None) -> None:
    """One line a model; with a name, its whole card."""
    if name is not None:
        text = card(name)
        if console.is_terminal:
            console.print(Markdown(text))
        else:
            print(text)
        return
    for each in list_pretrained():
        title = card(each).splitlines()[0].partition(": ")[2]
        console.print(f"[bold]{each:12}[/] {title}", highlight=False)
    console.print("\npsidiff models NAME prints its card; psidiff sample NAME uses it.")


def card(name: str) -> str:
    """The card of a model in the package: data, recipe, scores with protocol, limits."""
    text = shipped_card(name)
    if text is None:
        raise ValueError(f"no model {name!r} ships: these do: {', '.join(list_pretrained())}")
    return text

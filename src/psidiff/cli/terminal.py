"""Words on a terminal: what files, names and models say is shown, and does nothing there."""

from __future__ import annotations

import sys
import unicodedata

from rich.console import Console
from rich.text import Text

_HIDDEN = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of pairs, ends of lines
_TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # the direction of writing


def plain(words: object, keep: str = "") -> str:
    """The words with every character that would act on a terminal written as its escape."""
    return "".join(c if c in keep or not _acts(c) else _escape(c) for c in str(words))


def say(console: Console, *parts: object, style: str = "", soft_wrap: bool = False) -> None:
    """A sentence of plain words, and of (words, style); nothing in them is markup."""
    text = Text(style=style)
    for part in parts:
        words, how = part if isinstance(part, tuple) else (part, "")
        text.append(plain(words, keep="\n"), how)
    console.print(text, highlight=False, soft_wrap=soft_wrap)


def print_text(text: str) -> None:
    """Text of a model on standard output: as it is in a file, harmless on a terminal."""
    if sys.stdout.isatty():
        text = plain(text, keep="\n\t")
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _acts(c: str) -> bool:
    return not c.isprintable() and (unicodedata.category(c) in _HIDDEN or c in _TURNS)


def _escape(c: str) -> str:
    return c.encode("unicode_escape").decode("ascii")

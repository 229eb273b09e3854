"""Detokenizers: corpora that were split for old tokenizers, as people write again.

Each is a table of rules, applied from top to bottom. The rules are those of the published
evaluations, also where they are odd: perplexities are only comparable on the same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial

Rule = tuple[str | re.Pattern[str], str]


def _apply(rules: Iterable[Rule], text: str) -> str:
    for pattern, becomes in rules:
        if isinstance(pattern, str):
            text = text.replace(pattern, becomes)
        else:
            text = pattern.sub(becomes, text)
    return text


def _left(marks: str) -> tuple[Rule, ...]:
    """Each mark between two spaces moves to the word on its left."""
    return tuple((f" {mark} ", f"{mark} ") for mark in marks)


def _tight(pairs: Iterable[str], inside: str) -> tuple[Rule, ...]:
    """What stands between two marks loses its outer spaces."""
    rules = []
    for pair in pairs:
        pattern = inside.replace("OPEN", "\\" + pair[0]).replace("CLOSE", "\\" + pair[1])
        rules.append((re.compile(pattern), rf"{pair[0]}\1{pair[1]}"))
    return tuple(rules)


_WIKITEXT: tuple[Rule, ...] = (
    ("s '", "s'"),
    *((f" @{mark}@ ", mark) for mark in "-,."),
    *_left(":;.!?,"),
    *_tight(("()", "[]", "{}", '""', "''"), r"OPEN\s*([^CLOSE]*?)\s*CLOSE"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)

_PTB: tuple[Rule, ...] = (
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    ("\\/", "/"),
    (re.compile("(?<= )N(?= )"), "1"),
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
)

_LM1B: tuple[Rule, ...] = (
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1"),
    (re.compile(r" (\w+) \. "), r" \1. "),
    (re.compile(r" (\w+) \.$"), r" \1."),
    *_left("?"),
    (re.compile(r" \?$"), "?"),
    *_left("!"),
    (re.compile(r" !$"), "!"),
    *_left(",:;"),
    (" / ", "/"),
    *_tight(('""', "''", "()", "[]"), "OPEN ([^OPENCLOSE]+) CLOSE"),
    ("$ ", "$"),
    ("£ ", "£"),
)


def _lambada(text: str) -> str:
    """LAMBADA as OpenAI prepared it: straight quotes, a line feed before each passage."""
    return "\n" + _apply((("“", '"'), ("”", '"')), text).strip()


DETOKENIZERS: dict[str, Callable[[str], str]] = {
    "wikitext": partial(_apply, _WIKITEXT),  # WikiText-2 and WikiText-103
    "ptb": partial(_apply, _PTB),  # Penn Treebank, where N stands for a number
    "lm1b": partial(_apply, _LM1B),  # the One Billion Words corpus
    "lambada": _lambada,
    "scientific": partial(_apply, (*_WIKITEXT, *_LM1B)),  # papers of arXiv and PubMed
}

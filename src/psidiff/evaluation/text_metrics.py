"""The share of words that real text has, too."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .metric_result import UNKNOWN, MetricResult, check_some, ratio_of, with_wilson_interval

_WORD = re.compile(r"[^\W\d_]{3,}")


@dataclass(frozen=True)
class Lexicon:
    """The words of three letters or more that a text has, in lower case; source: which text."""

    words: frozenset[str]
    source: str = "the reference"

    def __post_init__(self) -> None:
        if not self.words:
            raise ValueError("the lexicon's text has no word of three letters or more")

    @classmethod
    def of(cls, text: str, source: str = "the reference") -> Lexicon:
        return cls(frozenset(_words(text)), source)

    def share(self, texts: Sequence[str], windows: bool = True) -> MetricResult:
        """The share of the words in `texts` that are in here; its 95% interval ends at 0 and 1.

        windows: the texts are cut from longer ones, so what comes before the first space and
        after the last is no word.
        """
        check_some(texts, "the share of words")
        if windows:
            texts = [text.partition(" ")[2].rpartition(" ")[0] for text in texts]
        found = [_words(text) for text in texts]
        hits = [sum(word in self.words for word in words) for words in found]
        counts = [len(words) for words in found]
        protocol = {
            "samples": len(texts),
            "words": sum(counts),
            "lexicon": f"{len(self.words):,} words of {self.source}",
            "windows": windows,
        }
        if not sum(counts):  # no word of three letters or more: nobody knows
            return MetricResult("lexicon", math.nan, UNKNOWN, "", protocol)
        share = ratio_of("lexicon", hits, counts, protocol=protocol)
        if share.stderr != UNKNOWN:
            low, high = share.interval
            protocol["interval"] = [max(low, 0.0), min(high, 1.0)]
        return with_wilson_interval(share, len(texts))


def lexicon_share(texts: Sequence[str], reference: Sequence[str]) -> MetricResult:
    """The share of words that the reference has too."""
    return Lexicon.of("\n".join(reference)).share(texts)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())

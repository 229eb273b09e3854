"""Metrics of generated text that need no judge, by their names; errors are over samples."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from .mauve import trigram_mauve
from .measure import Measure, check_some, ratio_of
from .ngrams import distinct, divergence, ngram_entropy, repetition, sample_entropy

_WORD = re.compile(r"[^\W\d_]{3,}")


class Texts(NamedTuple):
    """Sequences as ids (B, L), and as text."""

    tokens: Any
    texts: Sequence[str]


@dataclass(frozen=True)
class Lexicon:
    """The words of three letters or more that a text has, in lower case."""

    words: frozenset[str]

    def __post_init__(self) -> None:
        if not self.words:
            raise ValueError("the lexicon's text has no word of three letters or more")

    @classmethod
    def of(cls, text: str) -> Lexicon:
        return cls(frozenset(_words(text)))

    def share(self, texts: Sequence[str], windows: bool = True) -> Measure:
        """The share of the words in `texts` that are in here.

        windows: the texts are cut from longer ones, so what comes before the first space and
        after the last is no word.
        """
        check_some(texts, "the share of words")
        if windows:
            texts = [text.partition(" ")[2].rpartition(" ")[0] for text in texts]
        found = [_words(text) for text in texts]
        hits = [sum(word in self.words for word in words) for words in found]
        counts = [len(words) for words in found]
        if not sum(counts):
            raise ValueError("the samples have no word of three letters or more")
        protocol = {
            "samples": len(texts),
            "words": sum(counts),
            "lexicon": len(self.words),
            "windows": windows,
        }
        return ratio_of("words in the lexicon", hits, counts, protocol=protocol)


def lexicon_share(texts: Sequence[str], reference: Sequence[str]) -> Measure:
    """The share of words that the reference has too."""
    return Lexicon.of("\n".join(reference)).share(texts)


class Metric(NamedTuple):
    """A function of the "tokens" or "texts" of samples; against: and of a reference's."""

    function: Callable[..., Measure]
    reads: str
    against: bool = False

    def __call__(self, made: Texts, real: Texts | None = None) -> Measure:
        if not self.against:
            return self.function(getattr(made, self.reads))
        if real is None:
            raise ValueError("this metric compares with a reference, and there is none")
        return self.function(getattr(made, self.reads), getattr(real, self.reads))


TEXT_METRICS: dict[str, Metric] = {
    "entropy-1": Metric(partial(ngram_entropy, n=1), "tokens"),
    "entropy-4": Metric(partial(ngram_entropy, n=4), "tokens"),
    "entropy-sample": Metric(sample_entropy, "tokens"),
    **{f"distinct-{n}": Metric(partial(distinct, n=n), "tokens") for n in (1, 2, 4)},
    "repetition-4": Metric(partial(repetition, n=4), "tokens"),
    **{
        f"divergence-{n}": Metric(partial(divergence, n=n), "tokens", True) for n in range(1, 5)
    },
    "lexicon": Metric(lexicon_share, "texts", True),
    "mauve": Metric(trigram_mauve, "texts", True),
}


def text_metric(name: str) -> Metric:
    """A metric by its name."""
    if name not in TEXT_METRICS:
        close = difflib.get_close_matches(name, TEXT_METRICS, n=3, cutoff=0.4)
        near = ", ".join(close or TEXT_METRICS)
        raise ValueError(f"{name!r} is no metric of text; the nearest are {near}")
    return TEXT_METRICS[name]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())

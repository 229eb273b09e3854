"""Metrics of generated text that need no judge, by their names; errors are over samples."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from .mauve import trigram_mauve
from .metric_result import UNKNOWN, MetricResult, check_some, ratio_of, with_wilson_interval
from .ngrams import distinct, divergence, ngram_entropy, repetition, sample_entropy

_WORD = re.compile(r"[^\W\d_]{3,}")


class Texts(NamedTuple):
    """Sequences as ids (B, L), and as text."""

    tokens: Any
    texts: Sequence[str]


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


class Metric(NamedTuple):
    """A function of the "tokens" or "texts" of samples; against: and of a reference's.

    What it gives is called by its name in the table, whatever the function calls it.
    """

    name: str
    function: Callable[..., MetricResult]
    reads: str
    against: bool = False

    def __call__(self, made: Texts, real: Texts | None = None) -> MetricResult:
        read = [getattr(made, self.reads)]
        if self.against:
            if real is None:
                raise ValueError(f"{self.name} compares with a reference, and there is none")
            read.append(getattr(real, self.reads))
        return replace(self.function(*read), name=self.name)


_METRICS = (
    Metric("entropy-1", partial(ngram_entropy, n=1), "tokens"),
    Metric("entropy-4", partial(ngram_entropy, n=4), "tokens"),
    Metric("entropy-sample", sample_entropy, "tokens"),
    *(Metric(f"distinct-{n}", partial(distinct, n=n), "tokens") for n in (1, 2, 4)),
    Metric("repetition-4", partial(repetition, n=4), "tokens"),
    *(Metric(f"divergence-{n}", partial(divergence, n=n), "tokens", True) for n in range(1, 5)),
    Metric("lexicon", lexicon_share, "texts", True),
    Metric("mauve", trigram_mauve, "texts", True),
)
TEXT_METRICS: dict[str, Metric] = {metric.name: metric for metric in _METRICS}


def text_metric(name: str) -> Metric:
    """A metric by its name."""
    if name not in TEXT_METRICS:
        close = difflib.get_close_matches(name, TEXT_METRICS, n=3, cutoff=0.4)
        told = f"the nearest {'is' if len(close) == 1 else 'are'} {', '.join(close)}"
        told = told if close else f"it must be one of {', '.join(TEXT_METRICS)}"
        raise ValueError(f"{name!r} is no metric of text; {told}")
    return TEXT_METRICS[name]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())

"""Statistics of generated text that need no judge, each with its error.

Errors are over samples. Where a statistic is no mean they are by the jackknife (one sample left
out at a time), which for any statistic tends to be too large rather than too small (Efron and
Stein). Statistics of n-grams depend on how much text there is: compare equal amounts.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..types import Tokens
from .judge import INSTALL, ratio_of
from .measure import Measure, mean_of

_WORD = re.compile(r"[^\W\d_]{3,}")


class Texts(NamedTuple):
    """Sequences as ids (B, L), and as text."""

    tokens: Any
    texts: Sequence[str]


class Grams(NamedTuple):
    """The n-grams of samples: how often each kind occurs, in all and in each sample."""

    counts: np.ndarray  # (kinds,)
    sample: np.ndarray  # of each (sample, kind) that occurs
    kind: np.ndarray
    inside: np.ndarray  # how often it does
    of_reference: np.ndarray  # (kinds,), how often in a reference, if there is one
    protocol: dict[str, Any]


def grams(tokens: Tokens, n: int, reference: Tensor | None = None) -> Grams:
    """Runs of n tokens within a sample, each kind of them numbered."""
    parts = [_runs(tokens, n)] + ([] if reference is None else [_runs(reference, n)])
    runs = np.concatenate([part.reshape(-1, n) for part in parts])
    base, kinds = int(runs.max()) + 1, np.zeros(len(runs), dtype=np.int64)
    for column in runs.T:
        kinds = np.unique(kinds * base + column, return_inverse=True)[1].reshape(-1)
    size, (samples, each) = int(kinds.max()) + 1, parts[0].shape[:2]
    made, other = kinds[: samples * each], kinds[samples * each :]
    pairs, inside = np.unique(
        np.repeat(np.arange(samples), each) * size + made, return_counts=True
    )
    protocol: dict[str, Any] = {"n": n, "samples": samples, "length": tokens.shape[1]}
    if reference is not None:
        protocol["reference_tokens"] = reference.numel()
    return Grams(
        np.bincount(made, minlength=size),
        pairs // size,
        pairs % size,
        inside,
        np.bincount(other, minlength=size),
        protocol,
    )


def jackknife(
    name: str,
    f: Callable[[np.ndarray, int, np.ndarray | slice], np.ndarray],
    found: Grams,
    unit: str = "",
) -> Measure:
    """sum over kinds g of f(c_g, N, g), for counts c of N n-grams.

    error^2 = (B - 1) / B sum_i (theta_i - mean)^2, theta_i without sample i: only the kinds
    that occur in it change their counts.
    """
    total, samples = int(found.counts.sum()), found.protocol["samples"]
    value = float(f(found.counts, total, slice(None)).sum())
    protocol = {**found.protocol, "error": "jackknife over samples"}
    if samples == 1:
        return Measure(name, value, None, unit, protocol)
    rest, here = total - total // samples, found.counts[found.kind]
    change = f(here - found.inside, rest, found.kind) - f(here, rest, found.kind)
    without = np.bincount(found.sample, weights=change, minlength=samples)
    error = math.sqrt((samples - 1) * without.var())  # what all theta_i share cancels
    return Measure(name, value, error, unit, protocol)


def ngram_entropy(tokens: Tokens, n: int = 1) -> Measure:
    """-sum_g p_g log p_g over the n-grams of all samples together"""

    def surprise(count: np.ndarray, total: int, kinds: Any) -> np.ndarray:
        return -_xlogx(count / total)

    return jackknife(f"{n}-gram entropy", surprise, grams(tokens, n), "nats")


def sample_entropy(tokens: Tokens) -> Measure:
    """The entropy of the tokens within a sample, averaged: what the released code prints."""
    found = grams(tokens, 1)
    terms = -_xlogx(found.inside / tokens.shape[1])
    values = np.bincount(found.sample, weights=terms, minlength=len(tokens))
    return mean_of("entropy within a sample", values.tolist(), "nats", found.protocol)


def distinct(tokens: Tokens, n: int = 2) -> Measure:
    """Kinds of n-grams for each n-gram, of all samples together."""

    def one_each(count: np.ndarray, total: int, kinds: Any) -> np.ndarray:
        return (count > 0) / total

    return jackknife(f"distinct-{n}", one_each, grams(tokens, n))


def repetition(tokens: Tokens, n: int = 4) -> Measure:
    """The share of n-grams that occurred before in the same sample."""
    found = grams(tokens, n)
    kinds = np.bincount(found.sample, minlength=len(tokens))
    values = 1 - kinds / (tokens.shape[1] - n + 1)
    return mean_of(f"repeated {n}-grams", values.tolist(), protocol=found.protocol)


def divergence(tokens: Tokens, reference: Tensor, n: int = 4) -> Measure:
    """JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2 of n-grams, at most log 2.

    The reference counts as fixed. Finite sets are never at 0, even if of one source.
    """
    found = grams(tokens, n, reference)
    q = found.of_reference / found.of_reference.sum()

    def part(count: np.ndarray, total: int, kinds: Any) -> np.ndarray:
        p = count / total
        return (_xlogx(p) + _xlogx(q[kinds])) / 2 - _xlogx((p + q[kinds]) / 2)

    return jackknife(f"{n}-gram Jensen-Shannon divergence", part, found, "nats")


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
        _some(texts, "the share of words")
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


def mauve(
    features_p: np.ndarray,
    features_q: np.ndarray,
    features: str = "given",
    clusters: int | None = None,
    scaling: float | int = 5,
    seed: int = 0,
) -> Measure:
    """MAUVE of two sets of features (N, d): the area under their divergence curve.

    Our own implementation of the published definition: rows of length 1, the principal
    components with 90% of the variance, k-means of both sets together (scikit-learn's; a tenth
    as many clusters as the smaller set has rows), then `divergence_area`. Only numbers with
    equal features, clusters and numbers of texts compare. Error: jackknife over the texts of
    both sets, clusters held fixed.
    """
    made, real = np.asarray(features_p), np.asarray(features_q)
    if made.ndim != 2 or real.ndim != 2 or made.shape[1] != real.shape[1]:
        shapes = f"{made.shape} and {real.shape}"
        raise ValueError(f"MAUVE needs features (N, d) of one width d, got shapes {shapes}")
    if min(len(made), len(real)) < 2:
        raise ValueError("MAUVE needs two texts or more on both sides")
    clusters = clusters or max(2, round(min(len(made), len(real)) / 10))
    labels = _clusters(np.concatenate([made, real]), clusters, seed)
    p = np.bincount(labels[: len(made)], minlength=clusters)
    q = np.bincount(labels[len(made) :], minlength=clusters)
    variance = _left_out(p, lambda less: divergence_area(less, q, scaling))
    variance += _left_out(q, lambda less: divergence_area(p, less, scaling))
    protocol = {
        "features": features,
        "samples": len(made),
        "reference": len(real),
        "clusters": clusters,
        "scaling": scaling,
        "seed": seed,
        "error": "jackknife over texts, clusters fixed",
    }
    value = divergence_area(p, q, scaling)
    return Measure(f"MAUVE (features: {features})", value, math.sqrt(variance), "", protocol)


def divergence_area(p: np.ndarray, q: np.ndarray, scaling: float | int = 5) -> float:
    """The area under (exp(-c KL(q | r)), exp(-c KL(p | r))), r = w p + (1 - w) q, 0 < w < 1."""
    p, q = p / p.sum(), q / q.sum()
    w = np.linspace(1e-6, 1 - 1e-6, 25)[:, None]
    r = w * p + (1 - w) * q
    x, y = ((_xlogx(s) - s * np.log(np.where(s, r, 1))).sum(-1) for s in (q, p))
    x, y = np.r_[1, np.exp(-scaling * x), 0], np.r_[0, np.exp(-scaling * y), 1]
    return float(((x[:-1] - x[1:]) * (y[:-1] + y[1:])).sum() / 2)


def trigrams(texts: Sequence[str]) -> np.ndarray:
    """The plainest features for `mauve`: the character trigrams of a text, hashed to 1,024."""
    kind = _sklearn("feature_extraction.text").HashingVectorizer
    hashed = kind(analyzer="char", ngram_range=(3, 3), n_features=1024)
    return hashed.transform(texts).toarray()


def trigram_mauve(texts: Sequence[str], reference: Sequence[str]) -> Measure:
    """MAUVE by character trigrams."""
    _some(texts, "MAUVE")
    return mauve(trigrams(texts), trigrams(reference), "character trigrams")


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


def _runs(tokens: Tokens, n: int) -> np.ndarray:
    """(B, L - n + 1, n)"""
    _some(tokens, f"a statistic of {n}-grams")
    if tokens.shape[1] < n:
        raise ValueError(f"sequences of {tokens.shape[1]} tokens have no {n}-grams")
    ids = tokens.cpu().numpy().astype(np.int64)
    return np.lib.stride_tricks.sliding_window_view(ids, n, axis=1)


def _some(samples: Any, name: str) -> None:
    if not len(samples):
        raise ValueError(f"there are no samples to measure: {name} needs at least one")


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _xlogx(p: np.ndarray) -> np.ndarray:
    return p * np.log(np.where(p > 0, p, 1))


def _left_out(counts: np.ndarray, statistic: Callable[[np.ndarray], float]) -> float:
    """The jackknife's variance of a statistic of counts: those of a kind are alike."""
    kinds = np.flatnonzero(counts)
    values = [statistic(counts - np.eye(len(counts), dtype=int)[kind]) for kind in kinds]
    weights = counts[kinds]
    mean = np.average(values, weights=weights)
    spread = float((weights * (np.array(values) - mean) ** 2).sum())
    return spread * (counts.sum() - 1) / counts.sum()


def _clusters(rows: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """The number of the cluster that each row is in."""
    rows = _sklearn("preprocessing").normalize(rows)
    rows = _sklearn("decomposition").PCA(0.9, svd_solver="full").fit_transform(rows)
    means = _sklearn("cluster").KMeans(clusters, n_init=5, max_iter=500, random_state=seed)
    return means.fit(rows).labels_


def _sklearn(module: str) -> Any:
    try:
        return import_module(f"sklearn.{module}")
    except ImportError as error:
        raise ValueError(f"MAUVE needs scikit-learn: {INSTALL}") from error

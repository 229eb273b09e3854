"""Statistics of text: of n-grams of tokens, the share of words that real text has, and MAUVE.

Errors are over samples. Where a statistic is no mean they are by the jackknife (one sample left
out at a time), which for any statistic tends to be too large rather than too small (Efron and
Stein). All of them depend on how much text there is: compare equal amounts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..registry import optional_module
from ..types import Tokens
from .metric_result import (
    UNKNOWN,
    MetricResult,
    check_some,
    mean_of,
    ratio_of,
    with_wilson_interval,
)
from .scoring_lm import INSTALL, CausalLM

NEEDS_MAUVE = "the metric mauve-text needs: pip install 'psidiff[judge,mauve]'"
_MANY = 2**22  # numbers that are counted at a time
_WORD = re.compile(r"[^\W\d_]{3,}")


class NgramCounts(NamedTuple):
    """The n-grams of samples: how often each kind occurs, in all and in each sample."""

    counts: np.ndarray  # (kinds,)
    sample: np.ndarray  # of each (sample, kind) that occurs
    kind: np.ndarray
    inside: np.ndarray  # how often it does
    of_reference: np.ndarray  # (kinds,), how often in a reference, if there is one
    protocol: dict[str, Any]


def grams(tokens: Tokens, n: int, reference: Tensor | None = None) -> NgramCounts:
    """Runs of n tokens within a sample, each kind of them numbered."""
    parts = [_runs(tokens, n)] + ([] if reference is None else [_runs(reference, n)])
    runs = np.concatenate([part.reshape(-1, n) for part in parts])
    base, kinds = int(runs.max()) + 1, np.zeros(len(runs), dtype=np.int64)
    for column in runs.T:
        kinds = _ranks(kinds * base + column)
    size, (samples, each) = int(kinds.max()) + 1, parts[0].shape[:2]
    made, other = kinds[: samples * each], kinds[samples * each :]
    pairs, inside = _in_each_sample(made.reshape(samples, each), size)
    protocol: dict[str, Any] = {"n": n, "samples": samples, "length": tokens.shape[1]}
    if reference is not None:
        protocol["reference_tokens"] = reference.numel()
    return NgramCounts(
        np.bincount(made, minlength=size),
        pairs // size,
        pairs % size,
        inside,
        np.bincount(other, minlength=size),
        protocol,
    )


def _ranks(values: np.ndarray) -> np.ndarray:
    """The place (N,) of each number among the different ones in order."""
    if values.max() > _MANY:
        return np.unique(values, return_inverse=True)[1].reshape(-1)
    return (np.cumsum(np.bincount(values) > 0) - 1)[values]


def _in_each_sample(kinds: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Each sample * size + kind that occurs, in order, and how often; kinds (B, L) < size.

    Block by block: of 50,000 images all at once is 10 GiB.
    """
    pairs, counts = [], []
    block = max(1, _MANY // kinds.shape[1])
    for first in range(0, len(kinds), block):
        part = kinds[first : first + block]
        numbered = (np.arange(len(part))[:, None] * size + part).reshape(-1)
        if size <= kinds.shape[1]:
            often = np.bincount(numbered)
            found = often.nonzero()[0]
            often = often[found]
        else:
            found, often = np.unique(numbered, return_counts=True)
        pairs.append(found + first * size)
        counts.append(often)
    return np.concatenate(pairs), np.concatenate(counts)


def jackknife(
    name: str,
    f: Callable[[np.ndarray, int, np.ndarray | slice], np.ndarray],
    found: NgramCounts,
    unit: str = "",
) -> MetricResult:
    """sum over kinds g of f(c_g, N, g), for counts c of N n-grams.

    error^2 = (B - 1) / B sum_i (theta_i - mean)^2, theta_i without sample i: only the kinds
    that occur in it change their counts.
    """
    total, samples = int(found.counts.sum()), found.protocol["samples"]
    value = float(f(found.counts, total, slice(None)).sum())
    protocol = {**found.protocol, "error": "jackknife over samples"}
    if samples == 1:
        return MetricResult(name, value, UNKNOWN, unit, protocol)
    rest, here = total - total // samples, found.counts[found.kind]
    change = f(here - found.inside, rest, found.kind) - f(here, rest, found.kind)
    without = np.bincount(found.sample, weights=change, minlength=samples)
    error = math.sqrt((samples - 1) * without.var())  # what all theta_i share cancels
    return MetricResult(name, value, error, unit, protocol)


def ngram_entropy(tokens: Tokens, n: int = 1) -> MetricResult:
    """-sum_g p_g log p_g over the n-grams of all samples together"""
    found = grams(tokens, n)
    return jackknife(f"{n}-gram entropy", lambda c, N, g: -xlogx(c / N), found, "nats")


def sample_entropy(tokens: Tokens) -> MetricResult:
    """The entropy of the tokens within a sample, averaged: what the released code prints."""
    found = grams(tokens, 1)
    terms = -xlogx(found.inside / tokens.shape[1])
    values = np.bincount(found.sample, weights=terms, minlength=len(tokens))
    return mean_of("entropy within a sample", values.tolist(), "nats", found.protocol)


def distinct_ngrams(tokens: Tokens, n: int = 2) -> MetricResult:
    """Kinds of n-grams for each n-gram, of all samples together."""
    return jackknife(f"distinct-{n}", lambda c, N, g: (c > 0) / N, grams(tokens, n))


def repetition(tokens: Tokens, n: int = 4) -> MetricResult:
    """The share of n-grams that occurred before in the same sample."""
    found = grams(tokens, n)
    kinds = np.bincount(found.sample, minlength=len(tokens))
    values = 1 - kinds / (tokens.shape[1] - n + 1)
    mean = mean_of(f"repeated {n}-grams", values.tolist(), protocol=found.protocol)
    return with_wilson_interval(mean, len(tokens))


def divergence(tokens: Tokens, reference: Tensor, n: int = 4) -> MetricResult:
    """JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2 of n-grams, at most log 2.

    The reference counts as fixed. Finite sets are never at 0, even if of one source.
    """
    found = grams(tokens, n, reference)
    q = found.of_reference / found.of_reference.sum()

    def part(count: np.ndarray, total: int, kinds: Any) -> np.ndarray:
        p = count / total
        return (xlogx(p) + xlogx(q[kinds])) / 2 - xlogx((p + q[kinds]) / 2)

    return jackknife(f"{n}-gram Jensen-Shannon divergence", part, found, "nats")


def _runs(tokens: Tokens, n: int) -> np.ndarray:
    """(B, L - n + 1, n)"""
    check_some(tokens, f"a statistic of {n}-grams")
    if tokens.shape[1] < n:
        raise ValueError(f"sequences of {tokens.shape[1]} tokens have no {n}-grams")
    ids = tokens.cpu().numpy().astype(np.int64)
    return np.lib.stride_tricks.sliding_window_view(ids, n, axis=1)


def xlogx(p: np.ndarray) -> np.ndarray:
    return p * np.log(np.where(p > 0, p, 1))


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


def mauve(
    features_p: np.ndarray,
    features_q: np.ndarray,
    features: str = "given",
    clusters: int | None = None,
    scaling: float | int = 5,
    seed: int = 0,
) -> MetricResult:
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
    return MetricResult(
        f"MAUVE (features: {features})", value, math.sqrt(variance), "", protocol
    )


def divergence_area(p: np.ndarray, q: np.ndarray, scaling: float | int = 5) -> float:
    """The area under (exp(-c KL(q | r)), exp(-c KL(p | r))), r = w p + (1 - w) q, 0 < w < 1."""
    p, q = p / p.sum(), q / q.sum()
    w = np.linspace(1e-6, 1 - 1e-6, 25)[:, None]
    r = w * p + (1 - w) * q
    x, y = ((xlogx(s) - s * np.log(np.where(s, r, 1))).sum(-1) for s in (q, p))
    x, y = np.r_[1, np.exp(-scaling * x), 0], np.r_[0, np.exp(-scaling * y), 1]
    return float(((x[:-1] - x[1:]) * (y[:-1] + y[1:])).sum() / 2)


def trigrams(texts: Sequence[str]) -> np.ndarray:
    """The plainest features for `mauve`: the character trigrams of a text, hashed to 1,024."""
    kind = sklearn_module("feature_extraction.text").HashingVectorizer
    hashed = kind(analyzer="char", ngram_range=(3, 3), n_features=1024)
    return hashed.transform(texts).toarray()


def trigram_mauve(texts: Sequence[str], reference: Sequence[str]) -> MetricResult:
    """MAUVE by character trigrams."""
    check_some(texts, "MAUVE")
    return mauve(trigrams(texts), trigrams(reference), "character trigrams")


def mauve_module() -> Any:
    """The package mauve-text."""
    return optional_module("mauve", NEEDS_MAUVE)


def package_mauve(
    texts: Sequence[str], reference: Sequence[str], judge: CausalLM | None = None
) -> MetricResult:
    """MAUVE as the package mauve-text computes it, by the features of GPT-2 large.

    judge: another language model for the features. The package gives no error.
    """
    check_some(texts, "MAUVE")
    package = mauve_module()
    lm = CausalLM("gpt2-large") if judge is None else judge
    p, q = lm.features(reference), lm.features(texts)
    found = package.compute_mauve(p_features=p, q_features=q, verbose=False)
    protocol = {"features": lm.name, "samples": len(texts), "reference": len(reference)}
    protocol |= {"package": "mauve-text", "error": "unknown"}
    return MetricResult("mauve-text", float(found.mauve), UNKNOWN, "", protocol)


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
    rows = sklearn_module("preprocessing").normalize(rows)
    rows = sklearn_module("decomposition").PCA(0.9, svd_solver="full").fit_transform(rows)
    means = sklearn_module("cluster").KMeans(
        clusters, n_init=5, max_iter=500, random_state=seed
    )
    return means.fit(rows).labels_


def sklearn_module(module: str = "cluster") -> Any:
    """A part of scikit-learn, which MAUVE needs."""
    return optional_module(f"sklearn.{module}", f"MAUVE needs scikit-learn: {INSTALL}")

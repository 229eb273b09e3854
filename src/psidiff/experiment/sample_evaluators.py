"""What samples of each kind are measured by, and which of the numbers is their quality.

A bench is made once for a model and measures every cell of a comparison by the same protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..data.codec import Codec, same_codec
from ..data.sudoku import Sudoku
from ..data.text_sources import NotHere
from ..data.toy import Chain
from ..evaluation.image_metrics import SPLITS, image_batches, image_metrics, label_agreement
from ..evaluation.inception import Classifier, FeatureExtractor, Inception
from ..evaluation.known_distribution import KnownDistribution
from ..evaluation.metric_result import UNKNOWN, MetricResult, mean_of, with_wilson_interval
from ..evaluation.metrics import METRICS, Metric, SampleSet
from ..evaluation.scoring_lm import (
    CausalLM,
    PsidiffScoringLM,
    ScoringLM,
    generative_perplexity,
)
from ..evaluation.sudoku_metrics import clue_count, held_out_clues, sudoku_metrics
from ..evaluation.text_metrics import Lexicon, ngram_entropy
from ..model import Decoded, Model, list_pretrained, load
from ..registry import load_object
from ..types import Dataset
from .datasets import Corpus
from .held_out import own_corpus, rows_of, tokens_of, whole_texts

_MOST_ROWS = 2000  # of real data that is compared with
_MOST_TOKENS = 4_000_000  # of each part of it whose words count


@runtime_checkable
class Bench(Protocol):
    """Measures samples; `better` says which way `quality` should go."""

    @property
    def quality(self) -> str: ...

    @property
    def better(self) -> str: ...

    @property
    def entropy(self) -> str: ...

    def asks(self, count: int) -> dict[str, Any]:
        """What samples are asked for: labels, clues."""
        ...

    def measures(self, made: Decoded) -> list[MetricResult]: ...

    def chosen(self, made: Decoded, metrics: Sequence[Metric]) -> list[MetricResult]:
        """These metrics, the same numbers by the same names as among all."""
        ...

    def reference(self) -> dict[str, float]:
        """The same numbers of real data, where they mean something."""
        ...


@dataclass
class TextBench:
    """A judge's NLL if there is a judge, else the share of words that the real text has; the
    divergence of 2-grams of a text without words.

    Where the text was sampled from a known model, that is the truth: the NLL in excess of it.
    """

    real: SampleSet | None
    lexicon: Lexicon | None = None
    judge: ScoringLM | None = None
    codec: Codec | None = None
    truth: KnownDistribution | None = None
    entropy: ClassVar[str] = "entropy-sample"  # which does not grow with their number

    def __post_init__(self) -> None:
        judged = "excess NLL" if self.truth else "generative NLL" if self.judge else None
        if self.real is None and judged is None:
            raise ValueError("text needs a judge (--judge) or real text (--reference)")
        compared = "divergence-2" if self.lexicon is None else "lexicon"
        self.quality = judged or compared
        self.better = "low" if judged else METRICS[compared].better

    def asks(self, count: int) -> dict[str, Any]:
        return {}

    def measures(self, made: Decoded) -> list[MetricResult]:
        """All that there is a reference for, but MAUVE, which takes long."""
        read = SampleSet(made.tokens.cpu(), made.text)
        known = {"lexicon": self.lexicon is not None, "mauve": False}
        names = sorted(METRICS, key="lexicon".__ne__)
        return self._judged(read) + [
            self._metric(METRICS[name], read)
            for name in names
            if known.get(name, self.real is not None or not METRICS[name].compares)
        ]

    def chosen(self, made: Decoded, metrics: Sequence[Metric]) -> list[MetricResult]:
        read = SampleSet(made.tokens.cpu(), made.text)
        return [self._metric(metric, read) for metric in metrics]

    def reference(self) -> dict[str, float]:
        return self._of_real

    @cached_property
    def _of_real(self) -> dict[str, float]:
        """Judged once: a judge may take longer over them than over a cell's samples."""
        if self.real is None:
            return {}
        rows = min(len(self.real.texts), 256)
        some = SampleSet(self.real.tokens[-rows:], self.real.texts[-rows:])
        found = [self._metric(METRICS[self.entropy], some), *self._judged(some)]
        return {measure.name: measure.value for measure in found}

    def _metric(self, metric: Metric, made: SampleSet) -> MetricResult:
        """A metric; words are looked for in the whole corpus, not in a part of it."""
        if metric is METRICS["lexicon"] and self.lexicon is not None:
            return self.lexicon.share(made.texts)
        return metric(made, self.real)

    def _judged(self, made: SampleSet) -> list[MetricResult]:
        exact = [] if self.truth is None else [self.truth.excess(made.tokens)]
        if self.judge is None:
            return exact
        if isinstance(self.judge, PsidiffScoringLM) and same_codec(
            self.judge.model.codec, self.codec
        ):
            scored = self.judge.score_tokens(made.tokens)
            nats = [each.nats / each.tokens for each in scored]
            about = {"judge": self.judge.name, "ids": "the model's own"}
            return [*exact, mean_of("generative NLL", nats, "nats a token", about)]
        return [*exact, generative_perplexity(self.judge, made.texts)[0]]


@dataclass
class ImageBench:
    """Label agreement where there are labels, and distances in features."""

    real: Tensor
    labels: Tensor | None
    images: list[np.ndarray]
    features: FeatureExtractor
    wanted: Tensor | None = None  # of the samples; None: each class in turn, as `asks` says
    entropy: ClassVar[str] = "entropy-1"

    def __post_init__(self) -> None:
        labelled = self.labels is not None
        distance = "FID" if self.features.is_inception else _distance(self.features)
        self.quality = "label agreement" if labelled else distance
        self.better = "high" if labelled else "low"

    def asks(self, count: int) -> dict[str, Any]:
        if self.labels is None:
            return {}
        return {"labels": torch.arange(count) % (int(self.labels.max()) + 1)}

    def check_counts(self, samples: int) -> None:
        """Raise ValueError if there are too few images for `quality`."""
        if self.labels is None and min(samples, len(self.real)) < SPLITS:
            raise ValueError(
                f"images without labels are compared by {self.quality}, which needs {SPLITS} "
                f"samples (--samples) and {SPLITS} real images, got {samples} and "
                f"{len(self.real)}"
            )

    def measures(self, made: Decoded) -> list[MetricResult]:
        tokens, found = made.tokens.cpu(), []
        if self.labels is not None:
            wanted = self.asks(len(tokens))["labels"] if self.wanted is None else self.wanted
            asked = wanted <= self.labels.max()  # the null class asks for nothing
            if bool(asked.any()):
                chosen = tokens[asked], wanted[asked]
                found.append(label_agreement(*chosen, self.real, self.labels))
        if min(len(tokens), len(self.real)) >= SPLITS:
            generated, real = image_batches(made.images), image_batches(self.images)
            found += image_metrics(generated, real, self.features)
        return [*found, METRICS["entropy-1"](SampleSet(tokens))]

    def chosen(self, made: Decoded, metrics: Sequence[Metric]) -> list[MetricResult]:
        samples = SampleSet(made.tokens.cpu(), (), made.images)
        real = SampleSet(self.real, (), self.images)
        return [metric(samples, real) for metric in metrics]

    def reference(self) -> dict[str, float]:
        return {"entropy-1": ngram_entropy(self.real, 1).value}


@dataclass
class PuzzleBench:
    """The share of puzzles solved. Their clues: none, random:24 or 24, or minimal; None for
    samples whose clues nobody knows, which can only be valid."""

    clues: str | int | None
    seed: int = 0
    quality: ClassVar[str] = "solved"
    better: ClassVar[str] = "high"
    entropy: ClassVar[str] = "entropy-1"

    def __post_init__(self) -> None:
        if self.clues is not None:
            clue_count(self.clues)

    def asks(self, count: int) -> dict[str, Any]:
        if self.clues is None:
            return {}
        clues = held_out_clues(self.clues, count, self.seed)
        return {} if clues is None else {"infill": clues}

    def measures(self, made: Decoded) -> list[MetricResult]:
        asked = self.asks(len(made.tokens)).get("infill")
        found = sudoku_metrics(made.tokens.cpu(), asked)
        if self.clues is not None:
            shown = self.clues if isinstance(self.clues, str) else f"random:{self.clues}"
            found = [replace(each, protocol={"clues": shown} | each.protocol) for each in found]
            if asked is None:
                found[0] = _renamed(found[0], "solved")
        return [*found, METRICS["entropy-1"](SampleSet(made.tokens.cpu()))]

    def chosen(self, made: Decoded, metrics: Sequence[Metric]) -> list[MetricResult]:
        return [metric(SampleSet(made.tokens.cpu(), made.text)) for metric in metrics]

    def reference(self) -> dict[str, float]:
        return {}


@dataclass
class TokenBench:
    """How far the 2-grams of token ids are from those of real data (models without a codec)."""

    real: SampleSet
    quality: ClassVar[str] = "divergence-2"
    better: ClassVar[str] = "low"
    entropy: ClassVar[str] = "entropy-1"

    def asks(self, count: int) -> dict[str, Any]:
        return {}

    def measures(self, made: Decoded) -> list[MetricResult]:
        named = [METRICS[self.quality], *METRICS.values()]
        of_ids = [m for m in dict.fromkeys(named) if set(m.needs) <= {"tokens", "reference"}]
        return self.chosen(made, of_ids)

    def chosen(self, made: Decoded, metrics: Sequence[Metric]) -> list[MetricResult]:
        return [metric(SampleSet(made.tokens.cpu()), self.real) for metric in metrics]

    def reference(self) -> dict[str, float]:
        return {"entropy-1": ngram_entropy(self.real.tokens, 1).value}


@dataclass
class OracleBench:
    """The truth: a toy whose distribution is known."""

    chain: Chain
    quality: ClassVar[str] = "KL of pairs"
    better: ClassVar[str] = "low"
    entropy: ClassVar[str] = "entropy-1"

    def asks(self, count: int) -> dict[str, Any]:
        return {}

    def measures(self, made: Decoded) -> list[MetricResult]:
        tokens = made.tokens.cpu()
        truth = KnownDistribution(
            self.chain.log_prob, self.chain.entropy(), "the toy's own distribution"
        )
        about = {"truth": truth.name, "samples": len(tokens), "length": tokens.shape[1]}
        illegal = self.chain.illegal(tokens).double().mean(1).tolist()
        return [
            self._divergence(tokens, about),
            truth.excess(tokens),
            with_wilson_interval(mean_of("illegal pairs", illegal, "", about), len(tokens)),
            METRICS["entropy-1"](SampleSet(tokens)),
        ]

    def chosen(self, made: Decoded, metrics: Sequence[Metric]) -> list[MetricResult]:
        return [metric(SampleSet(made.tokens.cpu(), made.text)) for metric in metrics]

    def reference(self) -> dict[str, float]:
        own = self.chain.pairs().sum(0)
        return {"entropy-1": -float(torch.xlogy(own, own).sum()), "excess NLL": 0.0}

    def _divergence(self, tokens: Tensor, truth: dict[str, Any]) -> MetricResult:
        """With the spread of ten parts of the samples as its error."""
        parts = [p for p in tokens.tensor_split(10) if len(p)]
        value, count = self.chain.pair_divergence(tokens), len(parts)
        if count < 2:
            return MetricResult("KL of pairs", value, UNKNOWN, "nats", truth)
        left = [
            self.chain.pair_divergence(torch.cat(parts[:i] + parts[i + 1 :]))
            for i in range(count)
        ]
        spread = float(np.var(left)) * (count - 1)
        about = {**truth, "error": f"jackknife over {count} parts"}
        return MetricResult("KL of pairs", value, spread**0.5, "nats", about)


def bench_of(
    name: str,
    model: Model,
    reference: str | None = None,
    judge: ScoringLM | None = None,
    features: FeatureExtractor | None = None,
    clues: str | int | None = "random:24",
    seed: int = 0,
    truth: KnownDistribution | None = None,
) -> Bench:
    """The bench for what a model makes.

    Real data is a file of text (`reference`), or the corpus of the recipe it was trained by:
    the held-out part, and for the words that there are the part it learnt from, too.
    """
    kind = kind_of(model)
    if isinstance(model.codec, Sudoku):
        return PuzzleBench(clues, seed)
    judged = kind == "text" and (judge or truth) is not None
    known = _corpus_here(name, model, judged) if reference is None else None
    data = known.valid if known is not None else None
    if reference is not None:
        data = rows_of(reference, model)
    if kind == "text":
        assert model.codec is not None  # it says the kind
        real = None if data is None else _texts(model.codec, data)
        whole = [] if data is None else [data] if known is None else [known.train, data]
        source = reference or "its own corpus"
        lexicon = _lexicon(model.codec, whole, source) if whole else None
        return TextBench(real, lexicon, judge, model.codec, truth)
    if data is None:
        raise ValueError(
            f"there is nothing to judge the samples of {name} by: nobody knows what it was "
            "trained on"
        )
    rows = data.rows(torch.arange(min(len(data), _MOST_ROWS)))
    if model.codec is None or kind == "puzzle":
        return TokenBench(SampleSet(rows.tokens))
    images = [model.codec.decode(row) for row in rows.tokens]
    labels = None if model.num_classes is None else rows.labels
    return ImageBench(rows.tokens, labels, images, features or pixels())


def _corpus_here(name: str, model: Model, judged: bool) -> Corpus | None:
    """What a model was trained on, if anybody knows; judged: it may be elsewhere."""
    try:
        return own_corpus(name, model)
    except NotHere as error:
        if judged:
            return None
        others = "; --reference names other text, --judge a language model"
        more = others if kind_of(model) == "text" else ""
        raise ValueError(
            f"{name} was trained on data that are not here: {error}{more}"
        ) from error


def kind_of(model: Model) -> str:
    """text, image or puzzle; tokens where nobody knows."""
    return "tokens" if model.codec is None else model.codec.kind


def judge_of(name: str, device: str) -> ScoringLM:
    """An autoregressive model of ours, a causal LM of transformers, or FILE.py:NAME."""
    if ".py:" in name:
        own = load_object(name)
        judge = own() if isinstance(own, type) else own
        if not isinstance(judge, ScoringLM):
            raise ValueError(
                f"the judge {name} must have a name, a protocol and score(texts), which gives "
                "a TextScore for each text"
            )
        return judge
    path = Path(name).expanduser()
    if name in list_pretrained():
        raise ValueError(
            f"the judge {name} is no autoregressive model: it has no NLL of a text"
        )
    if not (path / "psidiff.json").is_file():
        if name.startswith((".", "/", "~")) and not path.exists():
            raise ValueError(f"there is no judge at {name}")
        return CausalLM(name, device=device).ready()
    model = load(name, device)
    if model.prior is not None:
        raise ValueError(
            f"the judge {name} is no autoregressive model: it has no NLL of a text"
        )
    return PsidiffScoringLM(model)


def truth_of(name: str, device: str, samples: int = 256) -> KnownDistribution:
    """An autoregressive model of ours as the distribution that text was sampled from."""
    judge = judge_of(name, device)
    if not isinstance(judge, PsidiffScoringLM):
        raise ValueError(f"the truth is an autoregressive model of ours, which {name} is not")
    return judge.ground_truth(judge.model.sample(samples, split=False).tokens)


def features_of(path: str | None, device: str) -> FeatureExtractor | None:
    """The Inception network in a file."""
    return None if path is None else Inception.from_file(path, device)


def pixels() -> Classifier:
    """The plainest features: the pixels themselves."""
    return Classifier(lambda images: images.flatten(1).double() / 255, "pixels")


def _texts(codec: Codec, data: Dataset) -> SampleSet:
    chosen = torch.arange(min(len(data), _MOST_ROWS))
    rows = data.rows(chosen, torch.Generator().manual_seed(0)).tokens
    return SampleSet(rows, [codec.decode(row) for row in rows])


def _lexicon(codec: Codec, parts: Sequence[Dataset], source: str) -> Lexicon | None:
    """All words of a corpus, if it has some; of a large one those that its parts begin with."""
    if any(tokens_of(part) > _MOST_TOKENS for part in parts):
        source = f"the first {_MOST_TOKENS:,} tokens of each part of {source}"
    texts = [text for part in parts for text in whole_texts(part, codec, _MOST_TOKENS)]
    with suppress(ValueError):
        return Lexicon.of("\n".join(texts), source)
    return None


def _distance(features: FeatureExtractor) -> str:
    return f"Fréchet distance (features: {features.name})"


def _renamed(measure: MetricResult, name: str) -> MetricResult:
    return MetricResult(name, measure.value, measure.stderr, measure.unit, measure.protocol)

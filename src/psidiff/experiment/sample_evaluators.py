"""What samples of each kind are measured by, and which of the numbers is their quality.

A bench is made once for a model and measures every cell of a comparison by the same protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data.codec import Codec, same_codec
from ..data.sudoku import Sudoku
from ..data.text_sources import NotHere
from ..data.toy import Chain
from ..evaluation.image_metrics import SPLITS, image_batches, image_metrics, label_agreement
from ..evaluation.inception import Classifier, FeatureExtractor, Inception
from ..evaluation.metric_result import (
    UNKNOWN,
    KnownDistribution,
    MetricResult,
    mean_of,
    with_wilson_interval,
)
from ..evaluation.metrics import METRICS, Metric, SampleSet
from ..evaluation.scoring_lm import CausalLM, PsidiffScoringLM, ScoringLM, generative_perplexity
from ..evaluation.sudoku_metrics import clue_count, held_out_clues, sudoku_metrics
from ..evaluation.text_metrics import Lexicon
from ..model import Decoded, Model, list_pretrained, load
from ..registry import load_object
from ..types import Dataset
from .held_out import rows_of, training_data_of, whole_texts

_MOST_ROWS = 2000  # of real data that is compared with
_MOST_TOKENS = 4_000_000  # of each part of it whose words count


class Bench:
    """Measures samples; `better`, "high" or "low", says which way `quality` should go.

    entropy: the name of the measure of variety; real: real data to compare with.
    """

    quality: str
    better: str
    entropy = "entropy-1"
    real: SampleSet | None

    def asks(self, count: int) -> dict[str, Any]:
        """What samples are asked for: labels, clues."""
        return {}

    def measures(self, made: Decoded) -> list[MetricResult]:
        """All numbers that samples of this kind have."""
        raise NotImplementedError

    def chosen(self, made: Decoded, metrics: Sequence[Metric]) -> list[MetricResult]:
        """These metrics, the same numbers by the same names as among all."""
        samples = _sample_set(made)
        return [self._metric(metric, samples) for metric in metrics]

    @cached_property
    def reference(self) -> dict[str, float]:
        """The same numbers of real data, where they mean something."""
        return {} if self.real is None else {"entropy-1": _entropy(self.real.tokens).value}

    def _metric(self, metric: Metric, samples: SampleSet) -> MetricResult:
        return metric(samples, self.real)


def _sample_set(made: Decoded) -> SampleSet:
    """Samples as metrics read them."""
    kind = None if made.codec is None else made.codec.kind
    texts = made.text if kind in ("text", "puzzle") else ()
    return SampleSet(made.tokens.cpu(), texts, made.images if kind == "image" else ())


def _entropy(tokens: Tensor) -> MetricResult:
    """Of the tokens over all samples."""
    return METRICS["entropy-1"](SampleSet(tokens.cpu()))


class Judges(NamedTuple):
    """What samples may be judged by beside real data."""

    judge: ScoringLM | None = None
    features: FeatureExtractor | None = None
    truth: KnownDistribution | None = None


_NO_JUDGES = Judges()


@dataclass
class TextBench(Bench):
    """A judge's NLL if there is a judge, else the share of words that the real text has; the
    divergence of 2-grams of a text without words.

    Where the text was sampled from a known model, that is the truth: the NLL in excess of it.
    """

    real: SampleSet | None
    lexicon: Lexicon | None = None
    judges: Judges = _NO_JUDGES
    codec: Codec | None = None
    entropy = "entropy-sample"  # which does not grow with their number

    def __post_init__(self) -> None:
        judge, truth = self.judges.judge, self.judges.truth
        judged = "excess NLL" if truth else "generative NLL" if judge else None
        if self.real is None and judged is None:
            raise ValueError("text needs a judge (--judge) or real text (--reference)")
        compared = "divergence-2" if self.lexicon is None else "lexicon"
        self.quality = judged or compared
        self.better = "low" if judged else METRICS[compared].better

    def measures(self, made: Decoded) -> list[MetricResult]:
        """All that there is a reference for, but MAUVE, which takes long."""
        read = _sample_set(made)
        known = {"lexicon": self.lexicon is not None, "mauve": False}
        names = sorted(METRICS, key="lexicon".__ne__)
        return self._judged(read) + [
            self._metric(METRICS[name], read)
            for name in names
            if known.get(name, self.real is not None or not METRICS[name].compares)
        ]

    @cached_property
    def reference(self) -> dict[str, float]:
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
        judge, truth = self.judges.judge, self.judges.truth
        exact = [] if truth is None else [truth.excess(made.tokens)]
        if judge is None:
            return exact
        if isinstance(judge, PsidiffScoringLM) and same_codec(judge.model.codec, self.codec):
            nats = [each.nats / each.tokens for each in judge.score_tokens(made.tokens)]
            about = {"judge": judge.name, "ids": "the model's own"}
            return [*exact, mean_of("generative NLL", nats, "nats a token", about)]
        return [*exact, generative_perplexity(judge, made.texts)[0]]


@dataclass
class ImageBench(Bench):
    """Label agreement where there are labels, and distances in features."""

    real: SampleSet
    labels: Tensor | None
    features: FeatureExtractor
    wanted: Tensor | None = None  # of the samples; None: each class in turn, as `asks` says

    def __post_init__(self) -> None:
        named = f"Fréchet distance (features: {self.features.name})"
        distance = "FID" if self.features.is_inception else named
        labelled = self.labels is not None
        self.quality, self.better = (
            ("label agreement", "high") if labelled else (distance, "low")
        )

    def asks(self, count: int) -> dict[str, Any]:
        if self.labels is None:
            return {}
        return {"labels": torch.arange(count) % (int(self.labels.max()) + 1)}

    def check_counts(self, samples: int) -> None:
        """Raise ValueError if there are too few images for `quality`."""
        real = len(self.real.images)
        if self.labels is None and min(samples, real) < SPLITS:
            raise ValueError(
                f"images without labels are compared by {self.quality}, which needs {SPLITS} "
                f"samples (--samples) and {SPLITS} real images, got {samples} and {real}"
            )

    def measures(self, made: Decoded) -> list[MetricResult]:
        tokens, found = made.tokens.cpu(), []
        if self.labels is not None:
            wanted = self.asks(len(tokens))["labels"] if self.wanted is None else self.wanted
            asked = wanted <= self.labels.max()  # the null class asks for nothing
            if bool(asked.any()):
                chosen = tokens[asked], wanted[asked]
                found.append(label_agreement(*chosen, self.real.tokens, self.labels))
        if min(len(tokens), len(self.real.images)) >= SPLITS:
            generated, real = image_batches(made.images), image_batches(self.real.images)
            found += image_metrics(generated, real, self.features)
        return [*found, _entropy(tokens)]


@dataclass
class PuzzleBench(Bench):
    """The share of puzzles solved. Their clues: none, random:24 or 24, or minimal; None for
    samples whose clues nobody knows, which can only be valid."""

    clues: str | int | None
    seed: int = 0
    quality = "solved"
    better = "high"
    real = None

    def __post_init__(self) -> None:
        if self.clues is not None:
            clue_count(self.clues)

    def asks(self, count: int) -> dict[str, Any]:
        clues = None if self.clues is None else held_out_clues(self.clues, count, self.seed)
        return {} if clues is None else {"infill": clues}

    def measures(self, made: Decoded) -> list[MetricResult]:
        asked = self.asks(len(made.tokens)).get("infill")
        found = sudoku_metrics(made.tokens.cpu(), asked)
        if self.clues is not None:
            shown = self.clues if isinstance(self.clues, str) else f"random:{self.clues}"
            found = [replace(each, protocol={"clues": shown} | each.protocol) for each in found]
            if asked is None:
                found[0] = replace(found[0], name="solved")
        return [*found, _entropy(made.tokens)]


@dataclass
class TokenBench(Bench):
    """How far the 2-grams of token ids are from those of real data (models without a codec)."""

    real: SampleSet
    quality = "divergence-2"
    better = "low"

    def measures(self, made: Decoded) -> list[MetricResult]:
        named = [METRICS[self.quality], *METRICS.values()]
        of_ids = [m for m in dict.fromkeys(named) if set(m.needs) <= {"tokens", "reference"}]
        return self.chosen(made, of_ids)


@dataclass
class OracleBench(Bench):
    """The truth: a toy whose distribution is known."""

    chain: Chain
    quality = "KL of pairs"
    better = "low"
    real = None

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
            _entropy(tokens),
        ]

    @cached_property
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


def load_judges(options: Any, device: str) -> Judges:
    """Those that `judge`, `features` and `truth` of the options name, each None or a name."""
    features = options.features and Inception.from_file(options.features, device)
    judge = options.judge and _judge_of(options.judge, device)
    return Judges(judge, features, options.truth and _truth_of(options.truth, device))


def bench_of(
    name: str,
    model: Model,
    reference: str | None = None,
    judges: Judges = _NO_JUDGES,
    clues: str | int | None = "random:24",
    seed: int = 0,
) -> Bench:
    """The bench for what a model makes; options for another kind of model are left aside.

    Real data is a file of text (`reference`), or the corpus of the recipe it was trained by:
    the held-out part, and for the words that there are the part it learnt from, too.
    """
    kind = kind_of(model)
    if isinstance(model.codec, Sudoku):
        return PuzzleBench(clues, seed)
    if kind == "text" and reference is not None:
        parts: list[Dataset] = [rows_of(reference, model)]
    else:
        judged = kind == "text" and (judges.judge or judges.truth) is not None
        parts = _corpus_parts(name, model, judged)
    if not parts and kind == "text":
        return TextBench(None, None, judges, model.codec)
    if not parts:
        raise ValueError(
            f"there is nothing to judge the samples of {name} by: nobody knows what it was "
            "trained on"
        )
    rows = parts[-1].rows(torch.arange(min(len(parts[-1]), _MOST_ROWS)))
    if model.codec is None or kind == "puzzle":
        return TokenBench(SampleSet(rows.tokens))
    decoded = [model.codec.decode(row) for row in rows.tokens]
    if kind == "text":
        lexicon = _lexicon(model.codec, parts, reference or "its own corpus")
        return TextBench(SampleSet(rows.tokens, decoded), lexicon, judges, model.codec)
    labels = None if model.num_classes is None else rows.labels
    pixels = Classifier(lambda images: images.flatten(1).double() / 255, "pixels")
    return ImageBench(SampleSet(rows.tokens, (), decoded), labels, judges.features or pixels)


def _corpus_parts(name: str, model: Model, judged: bool) -> list[Dataset]:
    """What a model was trained on and what was held out, if anybody knows; judged: they may
    be elsewhere."""
    try:
        corpus = training_data_of(name, model)
        return [] if corpus is None else [corpus.train, corpus.valid]
    except NotHere as error:
        if judged:
            return []
        others = "; --reference names other text, --judge a language model"
        more = others if kind_of(model) == "text" else ""
        raise ValueError(
            f"{name} was trained on data that are not here: {error}{more}"
        ) from error


def kind_of(model: Model) -> str:
    """text, image or puzzle; tokens where nobody knows."""
    return "tokens" if model.codec is None else model.codec.kind


def _judge_of(name: str, device: str) -> ScoringLM:
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
    if name not in list_pretrained() and not (path / "psidiff.json").is_file():
        if name.startswith((".", "/", "~")) and not path.exists():
            raise ValueError(f"there is no judge at {name}")
        return CausalLM(name, device=device).ready()
    model = load(name, device)
    if model.prior is not None:
        raise ValueError(
            f"the judge {name} is no autoregressive model: it has no NLL of a text"
        )
    return PsidiffScoringLM(model)


def _truth_of(name: str, device: str) -> KnownDistribution:
    """An autoregressive model of ours as the distribution that text was sampled from."""
    judge = _judge_of(name, device)
    if not isinstance(judge, PsidiffScoringLM):
        raise ValueError(f"the truth is an autoregressive model of ours, which {name} is not")
    return judge.ground_truth(judge.model.sample(256, split=False).tokens)


def _lexicon(codec: Codec, parts: Sequence[Any], source: str) -> Lexicon | None:
    """All words of a corpus, if it has some; of a large one those that its parts begin with."""
    if any(len(part.store.tokens) > _MOST_TOKENS for part in parts):
        source = f"the first {_MOST_TOKENS:,} tokens of each part of {source}"
    texts = [text for part in parts for text in whole_texts(part, codec, _MOST_TOKENS)]
    with suppress(ValueError):
        return Lexicon.of("\n".join(texts), source)
    return None

"""The evaluator of each kind of samples: puzzles, tokens, toys, and what a model needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.puzzle import Puzzle
from ..data.sudoku import Sudoku
from ..data.text_sources import NotHere
from ..data.toy import Chain
from ..evaluation.inception import FeatureExtractor
from ..evaluation.metric_result import (
    UNKNOWN,
    KnownDistribution,
    MetricResult,
    mean_of,
    with_wilson_interval,
)
from ..evaluation.metrics import METRICS, SampleSet
from ..evaluation.puzzle_metrics import clue_count, held_out_questions, puzzle_metrics
from ..model import Decoded, Model
from ..types import Dataset
from .held_out import rows_of, training_data_of
from .image_evaluator import ImageEvaluator
from .image_sets import as_arrays, read_reference, shape_of, training_reference
from .judges import NO_JUDGES, Judges
from .sample_evaluator import SampleEvaluator, entropy_1
from .text_evaluator import TextEvaluator, lexicon_of

MOST_ROWS = 2000  # of real data that is compared with


@dataclass
class PuzzleEvaluator(SampleEvaluator):
    """The share of puzzles solved. Clues of a Sudoku: none, random:24 or 24, or minimal; None
    for samples whose clues nobody knows, which can only be valid."""

    codec: Puzzle
    clues: str | int | None
    seed: int = 0
    quality = "solved"
    better = "high"
    real = None

    def __post_init__(self) -> None:
        if self.clues is not None:
            clue_count(self.clues)

    def sampling_inputs(self, count: int) -> dict[str, Any]:
        if self.clues is None:
            return {}
        asked = held_out_questions(self.codec, self.clues, count, self.seed)
        return {} if asked is None else {"infill": asked}

    def evaluate(self, made: Decoded) -> list[MetricResult]:
        asked = self.sampling_inputs(len(made.tokens)).get("infill")
        found = puzzle_metrics(self.codec, made.tokens.cpu(), asked)
        if self.clues is not None and isinstance(self.codec, Sudoku):
            shown = self.clues if isinstance(self.clues, str) else f"random:{self.clues}"
            found = [replace(each, protocol={"clues": shown} | each.protocol) for each in found]
            if asked is None:
                found[0] = replace(found[0], name="solved")
        return [*found, entropy_1(made.tokens)]


@dataclass
class TokenEvaluator(SampleEvaluator):
    """How far the 2-grams of token ids are from those of real data (models without a codec)."""

    real: SampleSet
    quality = "divergence-2"
    better = "low"

    def evaluate(self, made: Decoded) -> list[MetricResult]:
        named = [METRICS[self.quality], *METRICS.values()]
        of_ids = [m for m in dict.fromkeys(named) if set(m.needs) <= {"tokens", "reference"}]
        return self.chosen(made, of_ids)


@dataclass
class OracleEvaluator(SampleEvaluator):
    """The truth: a toy whose distribution is known."""

    chain: Chain
    quality = "KL of pairs"
    better = "low"
    real = None

    def evaluate(self, made: Decoded) -> list[MetricResult]:
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
            entropy_1(tokens),
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


def build_evaluator(
    name: str,
    model: Model,
    reference: str | None = None,
    judges: Judges = NO_JUDGES,
    clues: str | int | None = "random:24",
    seed: int = 0,
) -> SampleEvaluator:
    """The evaluator for what a model makes; options for another kind of model are left aside.

    Real data is a file of text or a set of images (`reference`), or the corpus of the recipe
    it was trained by: of text the held-out part, and for the words that there are the part it
    learnt from, too; of images what `_image_evaluator` says.
    """
    kind = kind_of(model)
    if isinstance(model.codec, Puzzle):
        return PuzzleEvaluator(model.codec, clues, seed)
    if kind == "image":
        return _image_evaluator(name, model, reference, judges.features)
    if kind == "text" and reference is not None:
        parts: list[Dataset] = [rows_of(reference, model)]
    else:
        judged = kind == "text" and (judges.judge or judges.truth) is not None
        parts = _corpus_parts(name, model, judged)
    if not parts and kind == "text":
        return TextEvaluator(None, None, judges, model.codec)
    if not parts:
        raise ValueError(_nothing_known(name))
    rows = parts[-1].rows(torch.arange(min(len(parts[-1]), MOST_ROWS)))
    if model.codec is None or kind == "puzzle":
        return TokenEvaluator(SampleSet(rows.tokens))
    decoded = [model.codec.decode(row) for row in rows.tokens]
    lexicon = lexicon_of(model.codec, parts, reference or "its own corpus")
    return TextEvaluator(SampleSet(rows.tokens, decoded), lexicon, judges, model.codec)


def _image_evaluator(
    name: str, model: Model, reference: str | None, features: FeatureExtractor | None
) -> ImageEvaluator:
    """Distances are to the images of `reference` or else to the model's own training set; the
    labels are those of a part of `reference` or else of what was held out."""
    codec = model.codec
    assert codec is not None
    if reference is not None:
        held = read_reference(reference)
        blank = codec.decode(torch.zeros(model.length or 0, dtype=torch.int64))
        held.check_shape(shape_of(blank), "this model makes")
        some = held.some(MOST_ROWS)
        tokens = torch.stack([codec.encode(image) for image in as_arrays(some.pixels)])
        known = some.labels is not None and some.classes == codec.classes
        labels = torch.as_tensor(some.labels) if known else None
    else:
        parts = _corpus_parts(name, model, judged=False)
        if not parts:
            raise ValueError(f"{_nothing_known(name)}; --reference names real images")
        held = training_reference(parts[0], codec)
        rows = parts[-1].rows(torch.arange(min(len(parts[-1]), MOST_ROWS)))
        tokens, labels = rows.tokens, rows.labels
    real = SampleSet(tokens, (), [codec.decode(row) for row in tokens])
    labels = None if model.num_classes is None else labels
    return ImageEvaluator(real, labels, held, features, model.num_classes)


def _nothing_known(name: str) -> str:
    return (
        f"there is nothing to judge the samples of {name} by: nobody knows what it was "
        "trained on"
    )


def _corpus_parts(name: str, model: Model, judged: bool) -> list[Dataset]:
    """What a model was trained on and what was held out, if anybody knows; judged: they may
    be elsewhere."""
    try:
        corpus = training_data_of(name, model)
        return [] if corpus is None else [corpus.train, corpus.valid]
    except NotHere as error:
        if judged:
            return []
        others = {
            "text": "; --reference names other text, --judge a language model",
            "image": "; --reference names real images",
        }
        more = others.get(kind_of(model), "")
        raise ValueError(
            f"{name} was trained on data that are not here: {error}{more}"
        ) from error


def kind_of(model: Model) -> str:
    """text, image or puzzle; tokens where nobody knows."""
    return "tokens" if model.codec is None else model.codec.kind

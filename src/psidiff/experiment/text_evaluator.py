"""What samples of text are measured by."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from ..data.codec import Codec, same_codec
from ..evaluation.metric_result import MetricResult
from ..evaluation.metrics import METRICS, Metric, SampleSet
from ..evaluation.scoring_lm import (
    CausalLM,
    PsidiffScoringLM,
    generative_perplexity,
    perplexity_of,
)
from ..evaluation.text_metrics import Lexicon, package_mauve
from ..model import Decoded
from .held_out import whole_texts
from .judges import NO_JUDGES, Judges
from .sample_evaluator import SampleEvaluator, sample_set

_MOST_TOKENS = 4_000_000  # of each part of a corpus whose words count


@dataclass
class TextEvaluator(SampleEvaluator):
    """A judge's NLL if there is a judge (in the released protocol its perplexity), else the
    share of words that the real text has; the divergence of 2-grams of a text without words.

    Where the text was sampled from a known model, that is the truth: the NLL in excess of it.
    All read the same tokens: the whole row, also after an end of text.
    """

    real: SampleSet | None
    lexicon: Lexicon | None = None
    judges: Judges = NO_JUDGES
    codec: Codec | None = None
    entropy = "entropy-sample"  # which does not grow with their number

    def __post_init__(self) -> None:
        judge, truth, protocol = self.judges.judge, self.judges.truth, self.judges.protocol
        by_judge = "generative perplexity" if protocol == "released" else "generative NLL"
        judged = "excess NLL" if truth else by_judge if judge else None
        if self.real is None and judged is None:
            raise ValueError("text needs a judge (--judge) or real text (--reference)")
        compared = "divergence-2" if self.lexicon is None else "lexicon"
        self.quality = judged or compared
        self.better = "low" if judged else METRICS[compared].better

    def evaluate(self, made: Decoded) -> list[MetricResult]:
        """All that there is a reference for, but MAUVE, which takes long."""
        read = sample_set(made)
        known = {"lexicon": self.lexicon is not None, "mauve": False, "mauve-text": False}
        names = sorted(METRICS, key="lexicon".__ne__)
        return self._judged(read) + [
            self._metric(METRICS[name], read)
            for name in names
            if known.get(name, self.real is not None or not METRICS[name].compares)
        ]

    def judged(self, made: Decoded) -> list[MetricResult]:
        """What the judge and the truth say of samples; nothing where there are none."""
        return self._judged(sample_set(made))

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
        judge = self.judges.judge
        if metric is METRICS["mauve-text"] and isinstance(judge, CausalLM):
            metric = replace(metric, function=partial(package_mauve, judge=judge))
        return metric(made, self.real)

    def _judged(self, made: SampleSet) -> list[MetricResult]:
        judge, truth = self.judges.judge, self.judges.truth
        exact = [] if truth is None else [truth.excess(made.tokens)]
        if judge is None:
            return exact
        if self.judges.protocol == "released":
            found = self._as_released(made.tokens)
        elif isinstance(judge, PsidiffScoringLM) and same_codec(judge.model.codec, self.codec):
            about = {"ids": "the model's own"}
            scored = judge.score_tokens(made.tokens)
            found = perplexity_of(scored, len(scored), judge, about)
        else:
            found = generative_perplexity(judge, made.texts)
        return [*exact, *sorted(found, key=lambda each: each.name != self.quality)]

    def _as_released(self, tokens: Tensor) -> tuple[MetricResult, MetricResult]:
        """By the papers' protocol, which cuts a text to as many of the judge's tokens as it
        has itself."""
        assert self.judges.judge is not None and self.codec is not None
        texts = [self.codec.decode_as_released(row) for row in tokens]
        return generative_perplexity(self.judges.judge, texts, "released", tokens.shape[1])


def lexicon_of(codec: Codec, parts: Sequence[Any], source: str) -> Lexicon | None:
    """All words of a corpus, if it has some; of a large one those that its parts begin with."""
    if any(len(part.store.tokens) > _MOST_TOKENS for part in parts):
        source = f"the first {_MOST_TOKENS:,} tokens of each part of {source}"
    texts = [text for part in parts for text in whole_texts(part, codec, _MOST_TOKENS)]
    with suppress(ValueError):
        return Lexicon.of("\n".join(texts), source)
    return None

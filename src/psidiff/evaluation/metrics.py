"""The table of metrics of samples, by name; a metric of the user's own is FILE.py:NAME."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..registry import import_file, load_object, optional_module
from .metric_result import UNKNOWN, MetricResult, check_some, mean_of
from .text_metrics import (
    NEEDS_MAUVE,
    distinct_ngrams,
    divergence,
    lexicon_share,
    mauve_module,
    ngram_entropy,
    package_mauve,
    repetition,
    sample_entropy,
    sklearn_module,
    trigram_mauve,
)


class SampleSet(NamedTuple):
    """Samples, or real data, as metrics read them.

    Args:
        tokens: ids, (N, L).
        texts: what they decode to, if they are text.
        images: what they decode to, if they are images: arrays (H, W) or (H, W, C) of uint8.
    Example:
        >>> SampleSet(torch.tensor([[1, 2]]), ["ab"]).texts
        ['ab']
    """

    tokens: Any
    texts: Sequence[str] = ()
    images: Sequence[Any] = ()


@dataclass(frozen=True)
class Metric:
    """A function of samples, and what a table says of it.

    Args:
        name: in tables, result lines and `--metrics`.
        function: its first argument is called what it needs: `tokens` (N, L), `texts` or
            `images`; the second, where there is one, is `reference`, the same of real data. It
            returns a `MetricResult`, a value for each sample (N,), whose mean is taken, or a
            number, whose error is then unknown.
        better: which direction is better, "high" or "low"; "" where it is neither.
        unit: such as "nats"; "" for a share or a count.
        about: one line for the documentation.
        ready: raises a ValueError where a package is missing; it is called before any work.
    Raises:
        ValueError: if the arguments of the function have other names.
    Example:
        >>> Metric("length", lambda texts: [len(text) for text in texts])(
        ...     SampleSet(None, ["a", "abc"])
        ... ).value
        2.0
    """

    name: str
    function: Callable[..., MetricResult | Tensor | Sequence[float] | float]
    better: Literal["high", "low", ""] = ""
    unit: str = ""
    about: str = ""
    ready: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.needs not in _NEEDS:
            known = " or ".join(SampleSet._fields)
            raise ValueError(
                f"the metric {self.name} must be a function of {known}, and of reference if it "
                f"compares; its arguments are {', '.join(self.needs) or 'none'}"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the arguments that have no default."""
        arguments = inspect.signature(self.function).parameters.values()
        return tuple(each.name for each in arguments if each.default is each.empty)

    @property
    def compares(self) -> bool:
        """Whether it needs real data to compare with."""
        return len(self.needs) == 2

    def __call__(self, samples: SampleSet, reference: SampleSet | None = None) -> MetricResult:
        """The metric of samples, beside a reference if it compares."""
        if self.compares and reference is None:
            raise ValueError(f"{self.name} compares with a reference, and there is none")
        both = (samples, reference) if self.compares else (samples,)
        found = self.function(*(self._read(each) for each in both if each is not None))
        if isinstance(found, MetricResult):
            return replace(found, name=self.name)
        values = torch.as_tensor(found, dtype=torch.float64)
        protocol = {"samples": len(self._read(samples))}
        if values.ndim == 1:
            return mean_of(self.name, values.tolist(), self.unit, protocol)
        return MetricResult(self.name, values.item(), UNKNOWN, self.unit, protocol)

    def _read(self, data: SampleSet) -> Any:
        field = self.needs[0]
        value, count = getattr(data, field), 0 if data.tokens is None else len(data.tokens)
        if not len(value) and count:
            raise ValueError(f"{self.name} is a metric of {field}, and these samples have none")
        check_some(value, self.name)
        return value


_NEEDS = {(field, *more) for field in SampleSet._fields for more in ((), ("reference",))}
_DISTANCE = "Jensen-Shannon, of {}-grams from real data's"
_TABLE = (
    Metric("entropy-1", partial(ngram_entropy, n=1), "", "nats", "of tokens, over all samples"),
    Metric("entropy-4", partial(ngram_entropy, n=4), "", "nats", "of 4-grams"),
    Metric("entropy-sample", sample_entropy, "", "nats", "of the tokens within a sample"),
    *(
        Metric(
            f"distinct-{n}", partial(distinct_ngrams, n=n), "high", "", f"{n}-grams that differ"
        )
        for n in (1, 2, 4)
    ),
    Metric("repetition-4", partial(repetition, n=4), "low", about="4-grams that occur again"),
    *(
        Metric(f"divergence-{n}", partial(divergence, n=n), "low", "nats", _DISTANCE.format(n))
        for n in range(1, 5)
    ),
    Metric("lexicon", lexicon_share, "high", about="words that real text has, too"),
    Metric(
        "mauve",
        trigram_mauve,
        "high",
        about="MAUVE by character trigrams",
        ready=sklearn_module,
    ),
    Metric(
        "mauve-text",
        package_mauve,
        "high",
        about="MAUVE of mauve-text, by the judge",
        ready=mauve_module,
    ),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}


def metrics_named(names: str | None) -> list[Metric]:
    """Metrics by their names, apart by commas: those of `METRICS`, and FILE.py:NAME.

    Args:
        names: NAME is a function or a `Metric` in the file, which is imported. None: none.
    Returns:
        The metrics, in this order.
    Raises:
        ValueError: if there is no such metric, which the sentence answers with the nearest; if
            a package that it needs is missing.
    Example:
        >>> [metric.name for metric in metrics_named("distinct-2, entropy-1")]
        ['distinct-2', 'entropy-1']
    """
    found = [_named(name.strip()) for name in (names or "").split(",") if name.strip()]
    for metric in found:
        if metric.ready is not None:
            metric.ready()
    return found


def _named(text: str) -> Metric:
    if ".py:" in text:
        path, _, name = text.rpartition(":")
        found = vars(import_file(path)).get(name)
        return found if isinstance(found, Metric) else Metric(name, load_object(text))
    if text not in METRICS:
        close = difflib.get_close_matches(text, METRICS, n=3, cutoff=0.4)
        nearest = f"the nearest {'is' if len(close) == 1 else 'are'} {', '.join(close)}"
        nearest = nearest if close else f"it must be one of {', '.join(METRICS)}"
        raise ValueError(f"{text!r} is not a metric; {nearest}, or FILE.py:NAME")
    if text == "mauve-text":
        optional_module("mauve", NEEDS_MAUVE)  # said before anything is measured
    return METRICS[text]

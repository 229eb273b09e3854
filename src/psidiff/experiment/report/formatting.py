"""Numbers, names and lists as they are written in a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...evaluation.metric_result import MetricResult


def short(value: float | int | None, error: float | None = None) -> str:
    """Three digits; with an error as many as that one allows. An unknown error is a "?"."""
    if value is None or not math.isfinite(value):
        return "–"
    if error is not None and not math.isfinite(error):
        return f"{short(value)} ± ?"
    if isinstance(value, int) or not (error or value):
        return f"{value:,.0f}"
    lead = math.floor(math.log10(abs(error or value)))
    digits = (error < 2 * 10**lead) - lead if error else 2 - lead
    digits = min(max(digits, 0), 6)
    return f"{value:,.{digits}f}" + (f" ± {error:,.{digits}f}" if error else "")


def format_metric(measure: MetricResult | None) -> str:
    return "–" if measure is None else short(measure.value, measure.stderr)


def short_name(measure: MetricResult) -> str:
    """Its name, without what is said in brackets."""
    return measure.name.partition(" (")[0]


def short_models(names: Sequence[str]) -> list[str]:
    """The last parts of their paths, where these differ."""
    last = [name.rstrip("/").rpartition("/")[2] for name in names]
    return last if len(set(last)) == len(last) else list(names)


def pluralize(number: int | str, what: str) -> str:
    """1 sample, 2 samples."""
    return f"{number} {what}" if str(number) == "1" else f"{number} {what}s"


def join_words(words: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def protocol(protocols: Sequence[Mapping[str, Any]]) -> str:
    """Protocols in words, but for empty ones; where they differ, between what and what."""
    protocols = [{k: v for k, v in p.items() if v != ""} for p in protocols]
    keys = dict.fromkeys(key for p in protocols for key in p)
    return ", ".join(
        f"{key.replace('_', ' ')} {between([p[key] for p in protocols if key in p])}"
        for key in sorted(keys, key="error".__eq__)  # how sure, last
    )


def between(values: Sequence[Any]) -> str:
    kinds = list(dict.fromkeys(map(_word, values)))
    if len(kinds) > 1 and all(type(v) in (int, float) for v in values):
        return f"{_word(min(values))} to {_word(max(values))}"
    if len(kinds) > 1 and all(map(_is_interval, values)):
        low, high = (pick(end for v in values for end in v) for pick in (min, max))
        return f"each within {_word(low)} to {_word(high)}"
    return join_words(kinds, "or")


def _is_interval(value: Any) -> bool:
    return isinstance(value, Sequence) and [type(end) for end in value] == [float, float]


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        words = list(map(_word, value))
        return " to ".join(words) if _is_interval(value) else join_words(words)
    return short(value) if isinstance(value, float) else str(value)

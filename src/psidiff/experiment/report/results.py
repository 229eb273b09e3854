"""Records of a comparison, read into cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...evaluation.metric_result import UNKNOWN, MetricResult
from ...files import known_version
from ...sampling import format_options, parse_options
from .formatting import join_words, pluralize

Records = Sequence[Mapping[str, Any]]
TOLERANCE = 0.03  # how far, relative, an entropy may be off and still be called kept
SETTLED = 1.96  # a difference counts if it is as many times its own standard error


@dataclass(frozen=True, eq=False)
class Cell:
    """A record, read; `setting` says what of top-p and temperature varies within its model.

    place: where it is among the others, by model, steps, kappa, top-p and temperature.
    """

    about: Mapping[str, Any]
    measures: dict[str, MetricResult]
    model: str
    steps: int
    kappa: str
    quality: MetricResult
    entropy: MetricResult | None
    setting: str
    place: tuple[Any, ...]

    @property
    def at(self) -> str:
        """16 steps"""
        return pluralize(self.steps, "step")

    @property
    def name(self) -> str:
        return f"{self.kappa}, {self.setting}" if self.setting else self.kappa

    @property
    def settings(self) -> str:
        """All that is set of top-p and temperature."""
        return settings_of(self.about)

    @property
    def ancestral(self) -> bool:
        return is_ancestral(self.kappa)

    @property
    def score(self) -> float:
        """Quality, made so that more is better."""
        value = self.quality.value if self.about["better"] == "high" else -self.quality.value
        return value if math.isfinite(value) else -math.inf

    def real(self, measure: MetricResult | None) -> float | None:
        """The value of a measure on real data."""
        value = (self.about.get("reference") or {}).get(measure.name if measure else "")
        return float(value) if isinstance(value, (int, float)) else None

    def beats(self, other: Cell) -> bool:
        """Whether it is better by more than the errors; one sample alone has none to tell."""
        sure = math.hypot(self.quality.stderr or 0.0, other.quality.stderr or 0.0)
        alone = min(self.about["samples"], other.about["samples"]) < 2
        return not alone and self.score - other.score > SETTLED * sure


def read(records: Records) -> list[Cell]:
    """Cells by model, steps, kappa, top-p and temperature.

    Models and rules stay in the order in which the records first name them.
    """
    if not records:
        raise ValueError("there are no records to report on: psidiff compare makes them")
    for record in records:
        known_version("a record", record)
    cells = []
    models = grouped(records, lambda record: record["cell"]["model"])
    for number, (model, ours) in enumerate(models.items()):
        ours = _spelled_out(ours)
        judged = sorted({record["quality"] for record in ours})
        if len(judged) > 1:
            raise ValueError(f"{model} is judged by {join_words(judged)}: report them apart")
        varied = varied_settings(ours)
        rules = list(dict.fromkeys(record["cell"]["kappa"] for record in ours))
        cells += [_cell(record, varied, number, rules) for record in ours]
    return sorted(cells, key=lambda cell: cell.place)


def is_ancestral(words: str) -> bool:
    """Whether a sampler in words is ancestral sampling, at whatever levels."""
    rule, *others = words.split() or [""]
    return rule == "ancestral" and all(w.startswith(_OF_LEVELS) for w in others)


_OF_LEVELS = ("schedule=", "grid=", "last=")


def _spelled_out(records: Records) -> list[Mapping[str, Any]]:
    """Records whose cells name their rules where they said presets, and have top-p and
    temperature where the grid has them; words that all of these share are left out."""
    said = {}
    for place, record in enumerate(records):
        cell = record["cell"]
        with suppress(ValueError):  # of a file that nobody imported
            words = parse_options(cell["kappa"])
            if "preset" in words or not SETTINGS.keys().isdisjoint(words):
                said[place] = parse_options(record["sampler"])
    shared = [
        name
        for name in next(iter(said.values()), {})
        if len(said) == len(records) and len({each.get(name) for each in said.values()}) == 1
    ]
    found = list(records)
    for place, options in said.items():
        apart = {name: options.pop(name, None) for name in SETTINGS}
        kept = {n: v for n, v in options.items() if n != "steps" and n not in shared}
        rule = format_options({"kappa": options["kappa"], **kept})
        cell = records[place]["cell"] | apart | {"kappa": rule}
        found[place] = {**records[place], "cell": cell}
    return found


SETTINGS = {"top_p": "top-p", "temperature": "temperature"}


def _cell(
    record: Mapping[str, Any], varied: Sequence[str], number: int, rules: Sequence[str]
) -> Cell:
    """One of the model with this number, which has these rules."""
    measures = {m["name"]: _measure(m) for m in record["measures"]}
    if record["quality"] not in measures:
        raise ValueError(f"{record['sampler']} has no measure {record['quality']!r}")
    asked, steps, kappa = record["cell"], record["cell"]["steps"], record["cell"]["kappa"]
    quality, entropy = measures[record["quality"]], measures.get(record.get("entropy") or "")
    given = [math.inf if asked.get(w) is None else asked[w] for w in SETTINGS]
    place = (number, steps, rules.index(kappa), *given)
    known = (asked["model"], steps, kappa, quality, entropy)
    return Cell(record, measures, *known, settings_of(record, varied, "no "), place)


def _measure(found: Mapping[str, Any]) -> MetricResult:
    value, error = found["value"], found.get("error")
    if error is None and not found.get("exact", True):  # records of before do not say
        error = UNKNOWN
    value = math.nan if value is None else float(value)
    error = None if error is None else float(error)
    unit, about = found.get("unit") or "", found.get("protocol") or {}
    return MetricResult(found["name"], value, error, unit, about)


def settings_of(
    record: Mapping[str, Any], which: Iterable[str] = SETTINGS, absent: str = ""
) -> str:
    """top-p 0.9, temperature 0.8; what is not set is left out if absent is empty."""
    given = [(SETTINGS[w], record["cell"].get(w)) for w in which]
    words = [f"{n} {v:g}" if v is not None else absent and absent + n for n, v in given]
    return ", ".join(filter(None, words))


def varied_settings(records: Records) -> list[str]:
    """What of top-p and temperature is not the same in all."""
    return [w for w in SETTINGS if len({record["cell"].get(w) for record in records}) > 1]


def grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def by_model(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    return grouped(cells, lambda cell: cell.model)


def best_of(cells: Sequence[Cell]) -> set[Cell]:
    """The best of each model and number of steps, where there is a choice."""
    groups = grouped(cells, lambda cell: (cell.model, cell.steps)).values()
    return {max(g, key=lambda c: c.score) for g in groups if len({c.score for c in g}) > 1}


def ancestral_of(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """Ancestral sampling at the same steps, top-p and temperature."""
    place = (cell.model, cell.steps, cell.setting)
    alike = (c for c in cells if c.ancestral and (c.model, c.steps, c.setting) == place)
    return next(alike, None)


def finite(value: Any) -> Any:
    """A value, or that of a measure; None for a number that is not finite."""
    value = value.value if isinstance(value, MetricResult) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value

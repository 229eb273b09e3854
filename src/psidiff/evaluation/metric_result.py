"""The result of a metric: a value with its standard error and how it was made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..process.prior import Prior
from ..types import Tokens, as_count

UNKNOWN = math.inf  # the error of what one sample says: it could be anything


@dataclass(frozen=True)
class MetricResult:
    """The value of a metric with its standard error and the protocol that made it.

    Args:
        name: of the metric.
        value: the estimate.
        stderr: its standard error; None if the value is exact, UNKNOWN (infinite) if one sample
            is all there is.
        unit: such as "nats/token"; "" for a share or a count.
        protocol: plain data that says how the value was made: number of samples, draws, seed.
            Results with unequal protocols are not comparable.
    Example:
        >>> print(MetricResult("nll", 2.115, 0.009, "nats/token"))
        nll 2.1150 ± 0.0090 nats/token
    """

    name: str
    value: float
    stderr: float | None = None
    unit: str = ""
    protocol: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sure = "" if self.stderr is None else f" ± {_sure(self.stderr)}"
        return f"{self.name} {_short(self.value)}{sure}{' ' * bool(self.unit)}{self.unit}"

    @property
    def interval(self) -> tuple[float, float]:
        """95%, by the normal distribution."""
        half = 1.96 * (self.stderr or 0.0)
        return self.value - half, self.value + half

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; "error" is null where unknown, and where "exact" is true."""
        values = (self.name, self.value, self.stderr, self.unit, self.protocol)
        fields = dict(zip(("name", "value", "error", "unit", "protocol"), values, strict=True))
        return as_json({**fields, "exact": self.stderr is None})


@dataclass(frozen=True)
class Likelihood:
    """The NLL of a dataset in several units; of a diffusion model an upper bound.

    Args:
        nats_per_token: with its standard error.
        tokens: how many were scored.
    Example:
        >>> print(Likelihood(MetricResult("nll", 2.0, 0.1, "nats/token"), 300).bits_per_token)
        nll 2.8854 ± 0.1443 bits/token
    """

    nats_per_token: MetricResult
    tokens: int

    @property
    def bits_per_token(self) -> MetricResult:
        return self.per(self.tokens, "token")

    @property
    def perplexity(self) -> MetricResult:
        """exp(nats a token); its error to first order."""
        return exp_of("perplexity", self.nats_per_token)

    def per(self, count: int, unit: str) -> MetricResult:
        """Bits a unit, of which the same data has `count`: characters, bytes, pixels."""
        nats = self.nats_per_token
        scale = self.tokens / as_count("count", count) / math.log(2)
        stderr = scale * (nats.stderr or 0.0)
        return MetricResult("nll", scale * nats.value, stderr, f"bits/{unit}", nats.protocol)


def mean_of(
    name: str, values: Sequence[float], unit: str = "", protocol: dict[str, Any] | None = None
) -> MetricResult:
    """The mean of independent values, and its standard error."""
    if not len(values):
        raise ValueError(f"there is nothing to take the mean of: {name} needs samples")
    return ratio_of(name, values, [1] * len(values), unit, protocol)


def ratio_of(
    name: str,
    tops: Sequence[float | int],
    bottoms: Sequence[float | int],
    unit: str = "",
    protocol: dict[str, Any] | None = None,
) -> MetricResult:
    """r = sum_i a_i / sum_i b_i, and sqrt(n / (n - 1) sum_i (a_i - r b_i)^2) / sum_i b_i."""
    total, n = math.fsum(bottoms), len(bottoms)
    if not total:
        raise ValueError(f"there is nothing to measure: {name} needs samples that hold some")
    ratio = math.fsum(tops) / total
    spread = math.fsum((a - ratio * b) ** 2 for a, b in zip(tops, bottoms, strict=True))
    error = math.sqrt(spread * n / (n - 1)) / total if n > 1 else UNKNOWN
    return MetricResult(name, ratio, error, unit, protocol or {})


def ratio_estimate(
    nats: Tensor,
    tokens: Tensor,
    strata: Tensor,
    prior: Prior | None,
    seed: int,
    about: dict[str, Any],
) -> MetricResult:
    """Nats a token of sequences (count,): a ratio of sums, and its error to first order.

    Rows that lie next to each other in the strata (count,) differ by chance alone, so half of
    their squared difference is what a row adds to the variance.
    """
    order = strata.argsort()
    nats, tokens = nats[order], tokens[order]
    mean = nats.sum() / tokens.sum()
    steps = (nats - mean * tokens).diff()
    count, stderr = len(nats), UNKNOWN
    if count > 1:
        variance = count / (count - 1) * (steps**2).sum() / 2
        stderr = (variance.sqrt() / tokens.sum()).item()
    protocol = {
        **about,
        "sequences": count,
        "tokens": int(tokens.sum()),
        "seed": seed,
        "prior": None if prior is None else str(prior),
    }
    return MetricResult("nll", mean.item(), stderr, "nats/token", protocol)


def exp_of(name: str, measure: MetricResult) -> MetricResult:
    """exp of a measure, its error to first order."""
    value = math.exp(measure.value)
    return MetricResult(name, value, value * (measure.stderr or 0.0), "", measure.protocol)


def with_wilson_interval(measure: MetricResult, samples: int) -> MetricResult:
    """The same, but where all samples say 0, or all 1, with the error of a Wilson interval.

    They do not differ, which does not make them exact. The interval is that of as many yes or
    no, so it holds however alike the parts of a sample are.
    """
    if measure.stderr != 0 or measure.value not in (0, 1):
        return measure
    low, high = wilson(samples if measure.value else 0, samples)
    protocol = {**measure.protocol, "interval": [low, high], "error": WILSON}
    return replace(measure, stderr=(high - low) / 2 / 1.96, protocol=protocol)


WILSON = "half of the 95% Wilson interval over 1.96"


def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """(p + z^2/2n ± z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n), p = k/n"""
    p, shrink = k / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    return max(0.0, centre - half), min(1.0, centre + half)


def share(name: str, hits: Tensor, of: str = "grids") -> MetricResult:
    """A share (N,), its Wilson interval, and the standard error that this one speaks of.

    Half its width over z: unlike sqrt(p (1 - p) / n), it is not 0 where all are right.
    """
    n, k = len(hits), int(hits.sum())
    low, high = wilson(k, n)
    protocol: dict[str, Any] = {of: n, "interval": [low, high], "error": WILSON}
    return MetricResult(name, k / n, (high - low) / 2 / 1.96, "", protocol)


def check_some(samples: Any, name: str) -> None:
    if not len(samples):
        raise ValueError(f"there are no samples to measure: {name} needs at least one")


def as_json(data: Any) -> Any:
    """Plain data with None for every number that is not finite, which JSON does not have."""
    if isinstance(data, dict):
        return {name: as_json(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [as_json(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _sure(error: float) -> str:
    return _short(error) if math.isfinite(error) else "unknown"


def _short(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"


@dataclass(frozen=True)
class KnownDistribution:
    """The very distribution p that was to be sampled: not a score, but what is in excess of it.

    log_prob gives log p (B,) of tokens (B, L); entropy is that of a sequence in nats, known or
    measured; length: of the sequences it is the entropy of, where only one will do.
    """

    log_prob: Callable[[Tensor], Tensor]
    entropy: float | MetricResult
    name: str
    length: int | None = None

    def excess(self, tokens: Tokens) -> MetricResult:
        """(E_made[-log p] - H(p)) / L = (KL(made | p) + H(made) - H(p)) / L

        0 for exact samples; below 0 for samples surer of themselves than the truth is.
        """
        count, length = tokens.shape
        if self.length not in (None, length):
            raise ValueError(
                f"the entropy of {self.name} is that of {self.length} tokens, got {length}"
            )
        nll = mean_of("NLL", (-self.log_prob(tokens)).tolist())
        entropy = self.entropy
        if not isinstance(entropy, MetricResult):
            entropy = MetricResult("entropy", entropy)
        error = math.hypot(nll.stderr or 0.0, entropy.stderr or 0.0) / length
        protocol = {"truth": self.name, "samples": count, "length": length}
        value = (nll.value - entropy.value) / length
        return MetricResult("excess NLL", value, error, "nats a token", protocol)

"""A known distribution as the judge of its own samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..types import Tokens
from .metric_result import MetricResult, mean_of


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

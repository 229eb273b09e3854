"""Denoisers that wrap denoisers: temperature, truncation, memory.

`Nucleus(Cached(model), p=0.9)` is itself a denoiser. A filter acts on rows of logits, so it
also works behind a lazy head. Truncation is always of x_theta, never of the posterior.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels import fused_sampling, truncation
from ..registry import Registry
from ..types import (
    Level,
    Levels,
    LogitRows,
    Probs,
    Tokens,
    Traits,
    as_count,
    as_number,
    at_least_float32,
    check_choice,
    check_unit,
    traits,
)

_COOL = 1e-20  # temperatures beyond this, or its inverse, overflow float32 with usual logits
LogitsProcessor = Callable[[Tensor], Tensor]


def hidden_of(
    denoiser: Any,
    z: Tokens,
    alpha: Level | Levels,
    labels: Tensor | None,
    mask: Tensor | None = None,
) -> Tensor:
    """What the head reads; of a denoiser without a head, its output itself."""
    run = denoiser.hidden if traits(denoiser).head else denoiser
    return run(z, alpha, labels, *(() if mask is None else (mask,)))


def head_of(denoiser: Any, rows: Tensor) -> Tensor:
    """Logits (N, K) from rows of hidden states."""
    return denoiser.head(rows) if traits(denoiser).head else rows


@dataclass(frozen=True)
class Filter(ABC):
    """A denoiser that changes each row of another one's logits by itself."""

    denoiser: Any

    @property
    def traits(self) -> Traits:
        return Traits(head=True, num_classes=traits(self.denoiser).num_classes)

    @abstractmethod
    def rows(self, logits: LogitRows) -> LogitRows:
        """The changed logits; they need not be normalised."""

    def __call__(self, z: Tokens, alpha: Level, labels: Tensor | None = None) -> Probs:
        log_x = at_least_float32(self.denoiser(z, alpha, labels))
        return self.rows(log_x.flatten(0, 1)).log_softmax(-1).view_as(log_x)

    def hidden(self, z: Tokens, alpha: Level, labels: Tensor | None = None) -> Tensor:
        return hidden_of(self.denoiser, z, alpha, labels)

    def head(self, rows: Tensor) -> Tensor:
        return self.rows(at_least_float32(head_of(self.denoiser, rows)))


@dataclass(frozen=True)
class Temperature(Filter):
    """x_theta^(1/temperature), renormalised.

    Args:
        denoiser: any denoiser; None where only `rows` is called.
        temperature: above 0; below 1 sharpens x_theta, above 1 flattens it.

    Example:
        >>> from psidiff.sampling import Temperature
        >>> def denoiser(z, alpha, labels=None):
        ...     return torch.tensor([0.8, 0.2]).log().expand(*z.shape, 2)
        >>> sharper = Temperature(denoiser, 0.5)
        >>> sharper(torch.zeros(1, 1, dtype=torch.long), 0.5).exp()  # 16 to 1
        tensor([[[0.9412, 0.0588]]])
    """

    temperature: float

    def __post_init__(self) -> None:
        if not as_number("temperature", self.temperature) > 0:
            raise ValueError(
                f"temperature must be above 0, got {self.temperature:g}; "
                "for the most probable tokens at the end say last=greedy"
            )

    def rows(self, logits: LogitRows) -> LogitRows:
        if _is_usual(self.temperature):
            return logits / self.temperature
        # the same up to a constant, and no number overflows: 0 for the most probable tokens
        held = torch.finfo(logits.dtype)
        gaps = logits - logits.amax(-1, keepdim=True)
        return gaps / min(max(self.temperature, held.tiny), held.max)


def _is_usual(temperature: float) -> bool:
    return _COOL < temperature < 1 / _COOL


@dataclass(frozen=True)
class Nucleus(Filter):
    """Nucleus sampling (Holtzman et al., 2020): the most probable tokens, up to mass p.

    Args:
        denoiser: any denoiser; None where only `rows` is called.
        p: the mass, in (0, 1].
        crossing: "keep" or "drop" the token that crosses p; one token always stays.
        static: shapes that no value decides, for CUDA graphs; on a CPU the same result.

    Example:
        >>> from psidiff.sampling import Nucleus
        >>> def denoiser(z, alpha, labels=None):
        ...     return torch.tensor([0.5, 0.3, 0.2]).log().expand(*z.shape, 3)
        >>> Nucleus(denoiser, p=0.7)(torch.zeros(1, 1, dtype=torch.long), 0.5).exp()
        tensor([[[0.6250, 0.3750, 0.0000]]])
    """

    p: float
    crossing: str = "keep"
    static: bool = False  # as `truncation.top_p` means it

    def __post_init__(self) -> None:
        if not 0 < as_number("top_p", self.p) <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.p:g}")
        check_choice("nucleus", self.crossing, ("keep", "drop"))

    def rows(self, logits: LogitRows) -> LogitRows:
        if self.p == 1:
            return logits
        return truncation.top_p(logits, self.p, self.crossing == "keep", self.static)


@dataclass(frozen=True)
class MinP(Filter):
    """Min-p sampling: the tokens at least p times as probable as the most probable one.

    Args:
        denoiser: any denoiser; None where only `rows` is called.
        p: the share, in [0, 1]; 0 keeps all tokens.

    Example:
        >>> from psidiff.sampling import MinP
        >>> def denoiser(z, alpha, labels=None):
        ...     return torch.tensor([0.5, 0.3, 0.2]).log().expand(*z.shape, 3)
        >>> MinP(denoiser, p=0.5)(torch.zeros(1, 1, dtype=torch.long), 0.5).exp()
        tensor([[[0.6250, 0.3750, 0.0000]]])
    """

    p: float

    def __post_init__(self) -> None:
        check_unit("min_p", self.p)

    def rows(self, logits: LogitRows) -> LogitRows:
        return truncation.min_p(logits, self.p)


@dataclass(frozen=True)
class TopK(Filter):
    """The k most probable tokens.

    Args:
        denoiser: any denoiser; None where only `rows` is called.
        k: how many tokens stay, at least 1.

    Example:
        >>> from psidiff.sampling import TopK
        >>> def denoiser(z, alpha, labels=None):
        ...     return torch.tensor([0.5, 0.3, 0.2]).log().expand(*z.shape, 3)
        >>> TopK(denoiser, 1)(torch.zeros(1, 1, dtype=torch.long), 0.5).exp()
        tensor([[[1., 0., 0.]]])
    """

    k: int

    def __post_init__(self) -> None:
        as_count("top_k", self.k)

    def rows(self, logits: LogitRows) -> LogitRows:
        return truncation.top_k(logits, self.k)


class Cached:
    """A denoiser that remembers the sequences it saw lately (MDLM's cache, for every prior).

    For denoisers that ignore the time: alpha is not part of what is compared. Only new
    sequences reach the denoiser, so the batch shape that it sees varies; `passes` counts them.

    Args:
        denoiser: a denoiser that gives the same for every alpha.
        size: how many sequences are kept; `sample` raises it to twice its batch.

    Example:
        >>> from psidiff.sampling import Cached
        >>> def denoiser(z, alpha, labels=None):
        ...     return torch.zeros(*z.shape, 5).log_softmax(-1)
        >>> cached, z = Cached(denoiser), torch.zeros(1, 4, dtype=torch.long)
        >>> for alpha in (0.1, 0.2, 0.3):
        ...     log_x = cached(z, alpha)
        >>> cached.passes
        1
    """

    def __init__(self, denoiser: Any, size: int = 2) -> None:
        self.denoiser = denoiser
        self.size = size
        self.passes: int = 0
        self.traits: Traits = Traits(head=True, num_classes=traits(denoiser).num_classes)
        self._states: OrderedDict[bytes, Tensor] = OrderedDict()

    def __call__(self, z: Tokens, alpha: Level, labels: Tensor | None = None) -> Probs:
        logits = self.head(self.hidden(z, alpha, labels).flatten(0, 1))
        return logits.log_softmax(-1).view(*z.shape, -1)

    def head(self, rows: Tensor) -> Tensor:
        return head_of(self.denoiser, rows)

    def hidden(self, z: Tokens, alpha: Level, labels: Tensor | None = None) -> Tensor:
        keys = _fingerprints(z, labels)
        fresh = {key: i for i, key in enumerate(keys) if key not in self._states}
        self.passes += len(fresh)
        if fresh:
            at = torch.tensor(list(fresh.values()), device=z.device)
            if isinstance(alpha, Tensor) and alpha.ndim == 3 and len(alpha) == len(z):
                alpha = alpha[at]
            made = hidden_of(
                self.denoiser, z[at], alpha, None if labels is None else labels[at]
            )
            self._states.update(zip(fresh, made, strict=True))
        for key in keys:
            self._states.move_to_end(key)
        states = torch.stack([self._states[key] for key in keys])
        while len(self._states) > self.size:
            self._states.popitem(last=False)
        return states


def find_cache(denoiser: Any) -> Cached | None:
    """The Cached among the wrappers, if there is one."""
    while denoiser is not None and not isinstance(denoiser, Cached):
        denoiser = getattr(denoiser, "denoiser", None)
    return denoiser


def check_classes(denoiser: Any, labels: Tensor) -> None:
    """Labels are classes of a denoiser that says how many it has; so many: the null class."""
    most = traits(denoiser).num_classes
    if most is None:
        return
    wrong = labels[(labels < 0) | (labels > most)]
    if len(wrong):
        raise ValueError(f"labels must be classes from 0 to {most - 1}, got {wrong[0].item()}")


def _fingerprints(z: Tokens, labels: Tensor | None) -> list[bytes]:
    known = z if labels is None else torch.cat((z, labels[:, None].to(z)), 1)
    return [row.tobytes() for row in known.cpu().numpy()]


@dataclass(frozen=True)
class Processed(Filter):
    """Logits that a function of rows (N, K) changes; -inf is a token that is ruled out."""

    function: LogitsProcessor

    def __post_init__(self) -> None:
        if not callable(self.function) or type(self.function).__hash__ is None:
            raise ValueError(
                "processor must be a function of rows of logits, or a frozen dataclass that is "
                f"called with them (equal ones act together), got {self.function!r}"
            )

    def rows(self, logits: LogitRows) -> LogitRows:
        changed = self.function(logits)
        if not isinstance(changed, Tensor) or changed.shape != logits.shape:
            got = tuple(getattr(changed, "shape", ())) or type(changed).__name__
            raise ValueError(
                f"the processor must return logits of shape {tuple(logits.shape)}, got {got}"
            )
        return changed


PROCESSORS = Registry("logits processor", Callable)


def chain(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    nucleus: str = "keep",
    processor: LogitsProcessor | None = None,
    static: bool = False,
) -> Chain:
    """Temperature, then a processor, top-k, top-p and min-p, as one function of rows.

    static: without asking the host.
    """
    filters: list[Filter] = [Temperature(None, temperature)] if temperature != 1 else []
    filters += [Processed(None, processor)] if processor is not None else []
    filters += [TopK(None, top_k)] if top_k is not None else []
    filters += [Nucleus(None, 1.0 if top_p is None else top_p, nucleus, static)]
    filters += [MinP(None, min_p)] if min_p is not None else []
    return Chain(tuple(filters))


@dataclass(frozen=True)
class Chain:
    """Filters of rows, one after the other."""

    filters: tuple[Filter, ...]

    def __call__(self, logits: Tensor) -> Tensor:
        for each in self.filters:
            logits = each.rows(logits)
        return logits

    @cached_property
    def values(self) -> tuple[float, ...] | None:
        """Temperature, top-k (0: all), top-p and log of min-p; None if there is more to it."""
        found = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0, "min_p": -math.inf}
        for each in self.filters:
            match each:
                case Temperature(temperature=temperature) if _is_usual(temperature):
                    found["temperature"] = temperature
                case TopK(k=k):
                    found["top_k"] = k
                case Nucleus(p=p, crossing=crossing) if crossing == "keep" or p == 1:
                    found["top_p"] = p
                case MinP(p=p):
                    found["min_p"] = math.log(p) if p else -math.inf
                case _:
                    return None
        return tuple(map(float, found.values()))


@dataclass(frozen=True)
class SequenceFilters:
    """Filters of which each sequence has its own, in tensors of fixed shapes.

    values  (B, 4), of each sequence the `Chain.values`
    most_k  the largest top-k, or more; 0: nobody has one
    top_p, min_p  whether somebody has one
    """

    values: Tensor
    most_k: int = 0
    top_p: bool = False
    min_p: bool = False

    def of(self, sequences: Tensor) -> SequenceFilters:
        """Those of rows, by the number (n,) of the sequence that each belongs to."""
        return replace(self, values=self.values[sequences])

    def process_and_sample(
        self, logits: Tensor, z: Tensor, bits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x_theta at z, and a draw by `bits`, of rows with values (n, 4)."""
        temperature, k, top_p, log_p = self.values.to(logits).split(1, -1)
        logits = logits / temperature
        if self.most_k:
            logits = truncation.top_k_by_row(logits, k.long(), self.most_k)
        if not self.min_p:
            return fused_sampling.draw(logits, z, bits, top_p if self.top_p else None)
        if self.top_p:
            logits = truncation.top_p(logits, top_p, static=True)
        return fused_sampling.draw(truncation.near_largest(logits, log_p), z, bits, None)

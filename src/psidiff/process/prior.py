"""The prior pi: the distribution that every token decays to as alpha falls to 0."""

from __future__ import annotations

import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor

from ..kernels.counter_rng import Purpose, Stream, device_of
from ..types import as_count


class Prior(ABC):
    """A new prior says its size and `probs`; draws follow from these.

    `mask_id` is the token that never occurs in data, or None: denoisers never predict it.
    """

    vocab_size: int
    mask_id: int | None = None

    @abstractmethod
    def probs(self, like: Tensor) -> Tensor:
        """pi as a vector (K,), with the dtype and device of `like`."""

    def without_mask(self, logits: Tensor) -> Tensor:
        """Logits (..., K) in which the mask is impossible: it never occurs in data."""
        if self.mask_id is None:
            return logits
        mask = torch.full((1,), self.mask_id, device=logits.device)  # made on the device
        return logits.index_fill(-1, mask, -torch.inf)

    def sample(self, shape: tuple[int, ...], generator: Generator | None = None) -> Tensor:
        """Independent draws from pi, on the generator's device."""
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            raise ValueError(f"shape must be a tuple such as (2, 8), got {shape!r}")
        count = math.prod(as_count("every size in shape", size, least=0) for size in shape)
        device = device_of(generator)
        stream = Stream.seeded(generator, (1, count), device)
        return self.from_bits(stream.bits(0, Purpose.NOISE)).view(shape)

    def from_bits(self, bits: Tensor) -> Tensor:
        """Tokens distributed as pi from uniform 64-bit words: the inverse of its CDF.

        The CDF is made of integers, so that no accelerator needs float64 for it.
        """
        tables = self._tables
        if bits.device not in tables:
            tables[bits.device] = tables[torch.device("cpu")].to(bits.device)
        return torch.searchsorted(tables[bits.device], (bits & (2**63 - 1)) >> 1, right=True)

    @cached_property
    def _tables(self) -> dict[torch.device, Tensor]:
        """The CDF in units of 2^-62, one copy a device. Its last entry is never reached."""
        cdf = self.probs(like=torch.zeros((), dtype=torch.float64, device="cpu")).cumsum(0)
        steps = (cdf / cdf[-1] * 2.0**62).to(torch.int64)
        return {torch.device("cpu"): steps[:-1].contiguous()}


@dataclass(frozen=True)
class Masked(Prior):
    """All mass on a token that never occurs in data (masked diffusion)."""

    vocab_size: int
    mask_id: int | None = None

    def __post_init__(self) -> None:
        _set_size(self, self.vocab_size)
        _set_mask(self, self.mask_id)

    def probs(self, like: Tensor) -> Tensor:
        pi = like.new_zeros(self.vocab_size)
        pi[self.mask_id] = 1
        return pi

    def from_bits(self, bits: Tensor) -> Tensor:
        return torch.full_like(bits, int(self.mask_id or 0))


@dataclass(frozen=True)
class Uniform(Prior):
    """Equal mass on every token (uniform-state diffusion)."""

    vocab_size: int

    def __post_init__(self) -> None:
        _set_size(self, self.vocab_size)

    def probs(self, like: Tensor) -> Tensor:
        return like.new_full((self.vocab_size,), 1 / self.vocab_size)

    def from_bits(self, bits: Tensor) -> Tensor:
        return (bits & (2**63 - 1)) % self.vocab_size


@dataclass(frozen=True)
class Mixed(Prior):
    """A share of the noise spread over the real tokens, the rest on the mask."""

    vocab_size: int
    mask_id: int | None = None
    uniform: float = 0.1

    def __post_init__(self) -> None:
        _set_size(self, self.vocab_size)
        _set_mask(self, self.mask_id)
        if not 0 < self.uniform < 1:
            raise ValueError(
                f"uniform must be in (0, 1), got {self.uniform:g}: 0 is Masked, 1 is Uniform"
            )

    def probs(self, like: Tensor) -> Tensor:
        pi = like.new_full((self.vocab_size,), self.uniform / (self.vocab_size - 1))
        pi[self.mask_id] = 1 - self.uniform
        return pi


@dataclass(frozen=True)
class Unigram(Prior):
    """pi_j proportional to how often token j occurs in the corpus."""

    counts: tuple[float, ...]

    def __init__(self, counts: Iterable[float | int]) -> None:
        try:
            listed = counts if isinstance(counts, Tensor) else list(counts)
            values = torch.as_tensor(listed, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            said = textwrap.shorten(repr(counts), 40)
            raise ValueError(f"counts must be a sequence of numbers, got {said}") from None
        if values.ndim != 1:
            raise ValueError(f"counts must be a flat sequence, got shape {tuple(values.shape)}")
        as_count("the number of counts", len(values), least=2)
        wrong = ~((values >= 0) & values.isfinite())
        if bool(wrong.any()):
            raise ValueError(f"counts must be finite and >= 0, got {values[wrong][0]:g}")
        if values.sum() == 0:
            raise ValueError("counts must not all be 0")
        object.__setattr__(self, "counts", tuple(values.tolist()))

    def __repr__(self) -> str:
        return f"Unigram({len(self.counts)} counts)"

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return len(self.counts)

    def probs(self, like: Tensor) -> Tensor:
        return self._pi.to(like)

    @cached_property
    def _pi(self) -> Tensor:
        counts = torch.tensor(self.counts, dtype=torch.float64)
        return counts / counts.sum()


def _set_size(prior: Prior, vocab_size: int) -> None:
    object.__setattr__(prior, "vocab_size", as_count("vocab_size", vocab_size, least=2))


def _set_mask(prior: Prior, mask_id: int | None) -> None:
    if mask_id is None:
        raise ValueError("mask_id is missing: name the id of the mask token")
    mask = as_count("mask_id", mask_id, least=0)
    if mask >= prior.vocab_size:
        raise ValueError(
            f"mask_id must be a token id in [0, {prior.vocab_size}), got {mask_id}"
        )
    object.__setattr__(prior, "mask_id", mask)

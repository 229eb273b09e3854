"""The prior pi, to which every token decays as alpha falls to 0; and exact draws of tokens."""

from __future__ import annotations

import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from ..kernels.counter_rng import CounterRNG, Purpose, blocked_race, device_of
from ..registry import Registry
from ..types import Probs, Tokens, as_count


class Prior(ABC):
    """Base class of noise priors: the distribution pi that tokens decay to as alpha falls to 0.

    A new prior defines `vocab_size` and `probs`; draws follow from these. `mask_id` is the
    token that never occurs in data, or None: denoisers never predict it.

    Example:
        >>> from dataclasses import dataclass
        >>> from torch import Tensor
        >>> from psidiff.process import Prior
        >>> @dataclass(frozen=True)
        ... class Rising(Prior):
        ...     vocab_size: int
        ...
        ...     def probs(self, like: Tensor) -> Tensor:
        ...         mass = torch.arange(1, self.vocab_size + 1).to(like)
        ...         return mass / mass.sum()
        >>> Rising(4).probs(like=torch.zeros(()))
        tensor([0.1000, 0.2000, 0.3000, 0.4000])
    """

    vocab_size: int
    mask_id: int | None = None

    @abstractmethod
    def probs(self, like: Tensor) -> Tensor:
        """Return pi as a vector.

        Args:
            like: a tensor whose dtype and device the result has.

        Returns:
            Probabilities (K,), summing to 1.

        Example:
            >>> from psidiff.process import Mixed
            >>> Mixed(5, mask_id=4, uniform=0.2).probs(like=torch.zeros(()))
            tensor([0.0500, 0.0500, 0.0500, 0.0500, 0.8000])
        """

    def without_mask(self, logits: Tensor) -> Tensor:
        """Logits (..., K) in which the mask is impossible: it never occurs in data."""
        if self.mask_id is None:
            return logits
        mask = torch.full((1,), self.mask_id, device=logits.device)  # made on the device
        return logits.index_fill(-1, mask, -torch.inf)

    def sample(self, shape: tuple[int, ...], generator: Generator | None = None) -> Tensor:
        """Draw independent tokens from pi.

        Args:
            shape: of the result, such as (B, L).
            generator: where one random key is drawn from; None: torch's global generator.

        Returns:
            Token ids of that shape, on the generator's device.

        Raises:
            ValueError: if shape is no tuple of counts.

        Example:
            >>> from psidiff.process import Uniform
            >>> Uniform(9).sample((2, 8), torch.Generator().manual_seed(0)).shape
            torch.Size([2, 8])
        """
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            raise ValueError(f"shape must be a tuple such as (2, 8), got {shape!r}")
        count = math.prod(as_count("every size in shape", size, least=0) for size in shape)
        device = device_of(generator)
        stream = CounterRNG.seeded(generator, (1, count), device)
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
class _WithMask(Prior):
    """A prior over tokens of which one, the mask, never occurs in data."""

    vocab_size: int
    mask_id: int | None = None

    def __post_init__(self) -> None:
        _set_size(self)
        if self.mask_id is None:
            raise ValueError("mask_id is missing: name the id of the mask token")
        mask = as_count("mask_id", self.mask_id, least=0)
        if mask >= self.vocab_size:
            raise ValueError(
                f"mask_id must be a token id in [0, {self.vocab_size}), got {self.mask_id}"
            )
        object.__setattr__(self, "mask_id", mask)


@dataclass(frozen=True)
class Masked(_WithMask):
    """All mass on a token that never occurs in data (masked diffusion).

    Args:
        vocab_size: number of tokens K, the mask included.
        mask_id: id of the mask token.

    Example:
        >>> from psidiff.process import Masked
        >>> Masked(4, mask_id=3).probs(like=torch.zeros(()))
        tensor([0., 0., 0., 1.])
    """

    def probs(self, like: Tensor) -> Tensor:
        pi = like.new_zeros(self.vocab_size)
        pi[self.mask_id] = 1
        return pi

    def from_bits(self, bits: Tensor) -> Tensor:
        return torch.full_like(bits, int(self.mask_id or 0))


@dataclass(frozen=True)
class Uniform(Prior):
    """Equal mass on every token (uniform-state diffusion).

    Args:
        vocab_size: number of tokens K.

    Example:
        >>> from psidiff.process import Uniform
        >>> Uniform(4).probs(like=torch.zeros(()))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    vocab_size: int

    def __post_init__(self) -> None:
        _set_size(self)

    def probs(self, like: Tensor) -> Tensor:
        return like.new_full((self.vocab_size,), 1 / self.vocab_size)

    def from_bits(self, bits: Tensor) -> Tensor:
        return (bits & (2**63 - 1)) % self.vocab_size


@dataclass(frozen=True)
class Mixed(_WithMask):
    """A share of the noise mass spread over the real tokens, the rest on the mask.

    Args:
        vocab_size: number of tokens K, the mask included.
        mask_id: id of the mask token.
        uniform: share of the mass on the real tokens, between 0 (Masked) and 1 (Uniform).

    Example:
        >>> from psidiff.process import Mixed
        >>> Mixed(3, mask_id=2, uniform=0.5).probs(like=torch.zeros(()))
        tensor([0.2500, 0.2500, 0.5000])
    """

    uniform: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
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
    """pi_j proportional to how often token j occurs in the corpus.

    Args:
        counts: K numbers >= 0, not all of them 0.

    Example:
        >>> from psidiff.process import Unigram
        >>> Unigram([6, 3, 1]).probs(like=torch.zeros(()))
        tensor([0.6000, 0.3000, 0.1000])
    """

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


def categorical(probs: Probs, generator: Generator | None = None) -> Tokens:
    """Draw one token at each position, exactly in float32 and float64.

    Args:
        probs: weights (B, L, K) >= 0; rows need not sum to 1.
        generator: where one random key is drawn from; None: torch's global generator.

    Returns:
        Token ids (B, L).

    Raises:
        ValueError: if a weight is negative, or a row has none above 0.

    Example:
        >>> from psidiff.process import categorical
        >>> categorical(torch.tensor([[[0.0, 1.0], [2.0, 0.0]]]))
        tensor([[1, 0]])
    """
    if probs.ndim != 3 or not probs.is_floating_point():
        raise ValueError(
            f"probs must be floats of shape (B, L, K), got {probs.dtype} {tuple(probs.shape)}"
        )
    if bool((probs < 0).any()) or not bool((probs.sum(-1) > 0).all()):
        raise ValueError("probs must be >= 0, and some of each row above 0")
    num_samples, length, vocab_size = probs.shape
    stream = CounterRNG.seeded(generator, (num_samples, length), probs.device)
    bits = stream.bits(0, Purpose.DRAW).flatten()
    return blocked_race(probs.reshape(-1, vocab_size), bits).view(num_samples, length)


def _set_size(prior: Prior) -> None:
    object.__setattr__(prior, "vocab_size", as_count("vocab_size", prior.vocab_size, least=2))


PRIORS = Registry("prior", Prior)
PRIORS.register("masked")(Masked)
PRIORS.register("uniform")(Uniform)
PRIORS.register("mixed")(Mixed)
PRIORS.register("unigram")(Unigram)


def prior_over(words: str, num_tokens: int, mask_id: int | None = None, **known: Any) -> Prior:
    """The prior that words mean over so many tokens.

    Args:
        words: such as uniform, mixed:uniform=.2, or FILE.py:NAME of a file that was imported.
        num_tokens: the size of the vocabulary.
        mask_id: the mask in it; None: a prior with a mask gets one token more.
        known: other parameters, for priors that have them, such as counts.
    """
    more = mask_id is None and "mask_id" in PRIORS.parameters(words)
    mask = num_tokens if mask_id is None else mask_id
    return PRIORS.parse(words, vocab_size=num_tokens + more, mask_id=mask, **known)

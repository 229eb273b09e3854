"""Sequences that make a step together, each at a level, with numbers and a length of its own.

The samples of one call share all of these; the sequences of a server's batch share none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, fold_in, uniform
from ..process.posterior import PREDICTORS, Predictor, superpose
from ..process.prior import Prior
from ..types import Tokens, check_shape, check_unit
from .kappa import Memory
from .plan import Step

Number = Any  # a float, (B, 1), or (B, L) where it differs between tokens


class StepNumbers(NamedTuple):
    """A step as numbers; each a float, (B, 1), or (B, L) where it differs between tokens.

    Where only the device knows the step, each is a tensor without dimensions.

    With p the probability that a token is noise, W_predict = predict_slope p and
    W_renoise = renoise_slope p + renoise_offset. At a greedy step all noise is predicted.
    """

    t: Number
    alpha_t: Number
    noise: Number  # 1 - alpha_t
    alpha_s: Number
    kappa: Number
    predict_slope: Number
    renoise_slope: Number
    renoise_offset: Number
    greedy: Number  # 1 where the most probable token is taken, else 0


def step_numbers(
    step: Step, predictor: Predictor | None = None, memory: Memory | None = None
) -> StepNumbers:
    """The numbers of a step of a plan, in float64; without a predictor no step is weighed."""
    if callable(step.kappa):
        return _numbers(step, predictor, _kappa(step, memory))
    return _fixed_numbers(step, predictor)


@lru_cache(2**14)
def _fixed_numbers(step: Step, predictor: Predictor | None) -> StepNumbers:
    """Of a step that many requests make."""
    return _numbers(step, predictor, step.kappa)


def _numbers(step: Step, predictor: Predictor | None, kappa: Any) -> StepNumbers:
    levels = step.t, step.alpha_t, 1 - step.alpha_t, step.alpha_s
    if step.greedy or predictor is None:
        return StepNumbers(*levels, kappa, 1.0, 0.0, 0.0, float(step.greedy))
    at_0, at_1 = (
        superpose(predictor, p, step.alpha_s, step.alpha_t, kappa) for p in (0.0, 1.0)
    )
    return StepNumbers(
        *levels, kappa, at_1.predict, at_1.renoise - at_0.renoise, at_0.renoise, 0.0
    )


def check_affine(predictor: Predictor, step: Step) -> None:
    """A predictor of the user's own: W_predict = a p and W_renoise = b p + c."""
    if predictor in PREDICTORS.values():
        return
    none, half, sure = (
        superpose(predictor, p, step.alpha_s, step.alpha_t, 1.0) for p in (0.0, 0.5, 1.0)
    )
    middle = (none.renoise + sure.renoise) / 2
    wrong = max(
        abs(none.predict), abs(half.predict - sure.predict / 2), abs(half.renoise - middle)
    )
    if wrong > 1e-9:
        raise ValueError(
            "a predictor must be linear in p_noise, with predict = 0 at p_noise = 0: the law "
            f"of total probability asks for it; this one is off by {wrong:.2g} at t={step.t:g}"
        )


def _kappa(step: Any, memory: Memory | None) -> float | Tensor:
    """(B, L) of a rule with memory; for all tokens where there is nothing to remember."""
    if step.greedy or memory is None:
        return 1.0
    kappa = step.kappa(memory)
    check_shape("the kappa of a rule with memory", kappa, tuple(memory.confidence.shape))
    check_unit("the kappa of a rule with memory", kappa)
    return kappa.to(memory.confidence)


@dataclass(frozen=True)
class BatchSegment:
    """Consecutive sequences of a batch that came together, and what is decided on the host.

    level            noise level that the network is conditioned on
    index            the number of the step in its plan
    guidance_weight  None without guidance
    numbers          of the step
    num_free         positions that are free, or a few more
    """

    count: int
    length: int
    level: float
    index: int
    logits_processor: Any
    labelled: bool = False
    conditioned: bool = False  # on given tokens
    guidance_weight: float | None = None
    numbers: Any = None
    num_free: int = 0

    @property
    def passes(self) -> tuple[bool, ...]:
        """Whether with labels, for each forward pass that a sequence needs."""
        if self.guidance_weight is None:
            return (self.labelled,)
        if self.guidance_weight in (0, 1):
            return (self.guidance_weight == 1,)
        return (True, False)

    @property
    def one_level(self) -> bool:
        """Whether a guided network is told the level of each token, not `Levels`."""
        return self.conditioned and self.guidance_weight is not None


@dataclass(frozen=True)
class StepBatch:
    """B sequences, padded on the right to L positions, about to make a step.

    pi           (K,), the prior's probabilities at t
    prior        the prior at s, from which tokens are renoised
    sample_hash  (B,), the hash of each sample's key and number
    draw         which random numbers of a sample: an int, or (B,)
    free         (B, L), False where a token is given or padding
    given        (B, L), True where the network is told that a token is clean; None: nowhere
    confidence   (B, L), for rules and decoders that look at it
    """

    prior: Prior | None
    pi: Tensor
    segments: tuple[BatchSegment, ...]
    numbers: StepNumbers
    sample_hash: Tensor
    draw: int | Tensor
    z: Tokens
    free: Tensor
    given: Tensor | None = None
    labels: Tensor | None = None
    confidence: Tensor | None = None

    @cached_property
    def rng_state(self) -> Tensor:
        """Hashes (B, L), to which a purpose is added."""
        return rng_state(self.sample_hash, self.draw, self.z.shape[1])

    def bits(self, at: Tensor, purpose: Purpose) -> Tensor:
        """Random bits at flat positions (n,)."""
        return fold_in(self.rng_state.flatten()[at], int(purpose))

    def uniform(self, purpose: Purpose = Purpose.COIN) -> Tensor:
        """u in (0, 1), (B, L)."""
        return uniform(fold_in(self.rng_state, int(purpose)), self.pi.dtype)

    @cached_property
    def pi_z(self) -> Tensor:
        """The prior's probability of z, (B, L)."""
        return self.pi[self.z]

    @cached_property
    def owners(self) -> list[BatchSegment]:
        """The segment of each sequence."""
        return [segment for segment in self.segments for _ in range(segment.count)]

    def at(self, number: Number, at: Tensor) -> Number:
        """A number of the step at flat positions (n,): one for all, or (n,)."""
        if not isinstance(number, Tensor) or number.ndim == 0:
            return number
        if number.shape[1] == 1:
            at = at // self.z.shape[1]
        return number.flatten()[at]

    @classmethod
    def join(cls, parts: Sequence[StepBatch]) -> StepBatch:
        """One batch of all sequences, padded to the longest."""
        if len(parts) == 1:
            return parts[0]
        places = _places(parts)
        draws: list[Any] = [part.draw for part in parts for _ in part.owners]
        if len(set(draws)) > 1:
            draws = [torch.tensor(draws, device=parts[0].z.device)]
        fills = dict[str, Any](
            sample_hash=0, z=0, free=False, given=False, labels=0, confidence=torch.inf
        )
        tensors: dict[str, Any] = {
            name: _filled(parts, name, fill, places) for name, fill in fills.items()
        }
        return replace(
            parts[0],
            segments=tuple(segment for part in parts for segment in part.segments),
            numbers=_joined(parts, places),
            draw=draws[0],
            **tensors,
        )


def rng_state(sample_hash: Tensor, draw: int | Tensor, length: int) -> Tensor:
    """Hashes of (key, sample, step, position), (B, L)."""
    state = fold_in(sample_hash, draw)
    return fold_in(state[:, None], torch.arange(length, device=state.device))


def is_mask(prior: Prior | None, z: Tokens) -> Tensor:
    """Where z is the mask: noise for certain."""
    if prior is None or prior.mask_id is None:
        return torch.zeros_like(z, dtype=torch.bool)
    return z == prior.mask_id


def _places(parts: Sequence[StepBatch]) -> Tensor | None:
    """Where the tokens of all sequences, one after the other, are in (B, L); behind their end
    where there is padding. None: they have one length."""
    lengths = torch.tensor([part.z.shape[1] for part in parts for _ in part.z])
    if bool((lengths == lengths[0]).all()):
        return None
    inside = torch.arange(int(lengths.max()))
    places = (lengths.cumsum(0) - lengths)[:, None] + inside
    end = int(lengths.sum())
    return places.masked_fill(inside >= lengths[:, None], end).to(parts[0].z.device)


def _filled(
    parts: Sequence[StepBatch], name: str, fill: Any, places: Tensor | None
) -> Tensor | None:
    """(B, L) or (B,), `fill` for sequences that have none and as padding; None if none has."""
    values = [getattr(part, name) for part in parts]
    like = next((value for value in values if value is not None), None)
    if like is None:
        return None
    values = [
        like.new_full(part.z.shape[: like.ndim], fill) if value is None else value
        for part, value in zip(parts, values, strict=True)
    ]
    return _padded(values, fill, places)


def _padded(tensors: Sequence[Tensor], fill: Any, places: Tensor | None) -> Tensor:
    """(B,) or (B, L) of all parts, to the longest."""
    if places is None or tensors[0].ndim == 1:
        return torch.cat(list(tensors))
    flat = [each.flatten() for each in tensors]
    return torch.cat((*flat, flat[0].new_full((1,), fill)))[places]


def _joined(parts: Sequence[StepBatch], places: Tensor | None) -> StepNumbers:
    """Each number of the step: a float where all agree, else (B, 1), or (B, L) if some parts
    have a tensor."""
    pi, found = parts[0].pi, list[Number]()
    rows = [
        [0.0 if isinstance(number, Tensor) else number for number in part.numbers]
        for part in parts
        for _ in part.owners
    ]
    columns = torch.tensor(rows, dtype=torch.float64).to(pi).split(1, 1)
    numbers = zip(*(part.numbers for part in parts), strict=True)
    for values, column in zip(numbers, columns, strict=True):
        if any(isinstance(value, Tensor) for value in values):
            pairs = zip(parts, values, strict=True)
            full = [pi.new_zeros(part.z.shape) + value for part, value in pairs]
            found.append(_padded(full, 0, places))
        else:
            found.append(values[0] if len(set(values)) == 1 else column)
    return StepNumbers(*found)

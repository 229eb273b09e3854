"""Objectives: what a denoiser is trained to minimise, as a loss for each token.

An objective is a callable (denoiser, batch, generator) -> (B, L) nats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ..duality import diffusion_transform, gamma_at, relax_dense
from ..duality.relaxation import check_relaxation, relaxed
from ..kernels.fused_linear_loss import FusedLinearLoss, RowLoss
from ..process.nelbo import integrand
from ..process.posterior import corrupt_unchecked, to_plain
from ..process.prior import Prior, Uniform
from ..process.schedule import NoiseSchedule
from ..registry import Registry
from ..types import (
    Levels,
    PerToken,
    Probs,
    SoftTokens,
    Tokens,
    at_least_float32,
    check_choice,
    working_dtype,
)
from .batch import Batch
from .row_losses import NEXT_TOKEN, nelbo_rows


@runtime_checkable
class Objective(Protocol):
    """Protocol of objectives: objective(denoiser, batch, generator) -> loss (B, L).

    `Batch.mean` of the result is what the optimizer minimises.

    Example:
        >>> from psidiff.process import LogLinear, Uniform
        >>> from psidiff.training import Nelbo, Objective
        >>> isinstance(Nelbo(Uniform(5), LogLinear()), Objective)
        True
    """

    def __call__(
        self, denoiser: Any, batch: Batch, generator: Generator | None = None
    ) -> PerToken: ...


@dataclass(frozen=True)
class NoisedBatch:
    """What a denoiser reads, and the loss of its log x_theta.

    alpha is a number, or one a sequence (B, 1, 1); at given tokens the level is 1 whatever it
    says. row_loss: the same loss for single rows of logits, if it has a closed form.
    """

    z: Any
    alpha: Any
    loss_fn: Callable[[Probs], PerToken]
    row_loss: RowLoss | None = None


class DenoisingObjective(ABC):
    """An objective that corrupts a batch and calls the denoiser once."""

    @abstractmethod
    def prepare(self, batch: Batch, generator: Generator | None = None) -> NoisedBatch: ...

    def __call__(
        self, denoiser: Any, batch: Batch, generator: Generator | None = None
    ) -> PerToken:
        noised = self.prepare(batch, generator)
        padding = () if batch.real is None else (batch.real,)  # few denoisers know of it
        level = _level_per_position(noised.alpha, batch)
        loss = noised.loss_fn(denoiser(noised.z, level, batch.labels, *padding))
        mask = batch.loss_mask()
        return loss if mask is None else torch.where(mask, loss, 0.0)


class FusedLossInputs(NamedTuple):
    """A noised batch and the columns of its loss, all on one device."""

    row_loss: RowLoss
    z: Any
    alpha: Any
    labels: Any
    real: Any
    weights: Any

    @classmethod
    def of(cls, noised: NoisedBatch, batch: Batch) -> FusedLossInputs:
        assert noised.row_loss is not None
        row_loss, alpha, device = noised.row_loss, noised.alpha, batch.tokens.device
        if batch.given is not None and isinstance(alpha, Tensor):
            alpha = Levels(alpha.float(), batch.given)
        columns = tuple(c.to(device, non_blocking=True) for c in row_loss.columns)
        row_loss, weights = row_loss._replace(columns=columns), batch.weights()
        return cls(row_loss, noised.z, alpha, batch.labels, batch.real, weights)

    def loss(self, denoiser: Any, compiled: bool = False) -> Tensor:
        """`batch.mean` of the objective, without a tensor of all logits."""
        then = FusedLinearLoss(self.row_loss, self.weights, compiled)
        return denoiser(self.z, self.alpha, self.labels, self.real, then=then)


@dataclass(frozen=True)
class Nelbo(DenoisingObjective):
    """The exact negative ELBO of any prior (Eq. 4): corrupt, denoise, compare.

    It depends on the schedule only through its ends, its variance on all of it.

    Args:
        prior: the noise pi.
        schedule: the noise schedule.
        time_power: p; the level at time t is that of t^p, which samples high noise less often.

    Example:
        >>> from psidiff.process import LogLinear, Uniform
        >>> from psidiff.training import Batch, Nelbo, stratified_times
        >>> def denoiser(z, alpha, labels=None):
        ...     return torch.zeros(*z.shape, 5).log_softmax(-1)
        >>> batch = Batch(torch.randint(5, (3, 8)), stratified_times(3))
        >>> Nelbo(Uniform(5), LogLinear())(denoiser, batch).shape
        torch.Size([3, 8])
    """

    prior: Prior
    schedule: NoiseSchedule
    time_power: float = 1.0

    def prepare(self, batch: Batch, generator: Generator | None = None) -> NoisedBatch:
        levels = self.levels(batch.times)
        level = _to_batch_device(levels[0], batch)
        z = corrupt_unchecked(
            self.prior, batch.tokens, _level_per_position(level, batch), generator
        )
        return NoisedBatch(z, level.float(), *_nelbo_losses(self.prior, batch, z, *levels))

    def levels(self, times: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and its slope (B,) in float64, on the CPU."""
        u, p = times.double().cpu(), self.time_power
        t = u**p
        return self.schedule.alpha(t), self.schedule.dalpha(t) * (p * u ** (p - 1))


@dataclass(frozen=True)
class CrossEntropy(DenoisingObjective):
    """-log p(x_l | z), unweighted.

    Args:
        prior: the noise pi.
        schedule: the noise schedule.
        predicts: "loo" for a leave-one-out denoiser, which is converted before it is compared
            and
            so stays one; "plain" for p(x_l | z) itself.

    Example:
        >>> from psidiff.process import LogLinear, Uniform
        >>> from psidiff.training import Batch, CrossEntropy, stratified_times
        >>> def denoiser(z, alpha, labels=None):
        ...     return torch.zeros(*z.shape, 5).log_softmax(-1)
        >>> batch = Batch(torch.randint(5, (3, 8)), stratified_times(3))
        >>> CrossEntropy(Uniform(5), LogLinear(), "plain")(denoiser, batch).mean()  # log 5
        tensor(1.6094)
    """

    prior: Prior
    schedule: NoiseSchedule
    predicts: str = "loo"

    def __post_init__(self) -> None:
        check_choice("predicts", self.predicts, ("loo", "plain"))

    def prepare(self, batch: Batch, generator: Generator | None = None) -> NoisedBatch:
        prior, x = self.prior, batch.tokens
        level = _to_batch_device(self.schedule.alpha(batch.times.double().cpu()), batch)
        per_position = _level_per_position(level, batch)
        z = corrupt_unchecked(prior, x, per_position, generator)

        def loss_fn(log_x: Probs) -> PerToken:
            if self.predicts == "loo":
                log_x = to_plain(prior, z, log_x, per_position).log_softmax(-1)
            return -log_x.gather(-1, x[..., None]).squeeze(-1)

        return NoisedBatch(z, level.float(), loss_fn)


@dataclass(frozen=True)
class RelaxedNelbo(DenoisingObjective):
    """The curriculum's loss (Eq. 9): the network reads soft tokens, the loss their argmax.

    Args:
        vocab_size: number of tokens K.
        top_k: the k largest weights, the others are never formed (Duo++); None: all K (Duo).
        temperature: of the softmax, above 0.
        alpha_range: levels (most, least) between which times are uniform in gamma.

    Example:
        >>> from psidiff.training import RelaxedNelbo
        >>> low, high = RelaxedNelbo(5).gamma_range
        >>> low < high
        True
    """

    vocab_size: int
    top_k: int | None = 2
    temperature: float = 1e-3
    alpha_range: tuple[float, float] = (0.945, 0.049)

    def __post_init__(self) -> None:
        check_relaxation(self.vocab_size, self.top_k, self.temperature)
        most, least = self.alpha_range
        if not 1 > most > least > 0:
            raise ValueError(
                f"alpha_range must fall, between 1 and 0, got {list(self.alpha_range)}"
            )

    @cached_property
    def gamma_range(self) -> tuple[float, float]:
        low, high = (gamma_at(alpha, self.vocab_size) for alpha in self.alpha_range)
        return float(low), float(high)

    def prepare(self, batch: Batch, generator: Generator | None = None) -> NoisedBatch:
        low, high = self.gamma_range
        gamma = low + (high - low) * batch.times.double().cpu()
        alpha, slope = diffusion_transform(gamma, self.vocab_size)
        soft, z = self.relax(batch, gamma, generator)
        prior, dalpha = Uniform(self.vocab_size), slope * (high - low)
        level = _to_batch_device(alpha, batch).float()
        return NoisedBatch(soft, level, *_nelbo_losses(prior, batch, z, alpha, dalpha))

    def relax(
        self, batch: Batch, gamma: Tensor, generator: Generator | None = None
    ) -> tuple[Any, Tokens]:
        """Soft tokens and z_t; both the token itself where it is given."""
        K, tokens, known = self.vocab_size, batch.tokens, batch.given
        gamma = gamma.to(tokens.device, torch.float32, non_blocking=True)
        if self.top_k is None:
            probs, z = relax_dense(tokens, gamma, K, self.temperature, generator)
            if known is not None:
                clean = F.one_hot(tokens[known], K).to(probs)
                probs, z = probs.index_put((known,), clean), torch.where(known, tokens, z)
            return probs, z
        soft = relaxed(tokens, gamma, K, self.top_k, self.temperature, generator)
        if known is not None:
            ids, weights, z = soft
            first = torch.arange(self.top_k, device=tokens.device) == 0
            soft = SoftTokens(
                torch.where(known[..., None], tokens[..., None], ids),
                torch.where(known[..., None], first.to(weights), weights),
                torch.where(known, tokens, z),
            )
        return soft, soft.hard


@dataclass(frozen=True)
class NextToken(DenoisingObjective):
    """-log p(x_l | x before l) of a causal network.

    Args:
        bos_id: the token that it reads before the sequence.

    Example:
        >>> from psidiff.training import Batch, NextToken
        >>> def network(tokens, alpha, labels=None):
        ...     return torch.zeros(*tokens.shape, 5)
        >>> batch = Batch(torch.randint(5, (3, 8)), torch.ones(3))
        >>> NextToken(bos_id=4)(network, batch).mean()  # log 5
        tensor(1.6094)
    """

    bos_id: int

    def prepare(self, batch: Batch, generator: Generator | None = None) -> NoisedBatch:
        x = batch.tokens
        start = torch.full_like(x[:, :1], self.bos_id)

        def loss_fn(logits: Tensor) -> PerToken:
            log_p = at_least_float32(logits).log_softmax(-1)
            return -log_p.gather(-1, x[..., None]).squeeze(-1)

        read = torch.cat((start, x[:, :-1]), 1)
        return NoisedBatch(read, 1.0, loss_fn, RowLoss(NEXT_TOKEN, (x,)))


def _nelbo_losses(
    prior: Prior, batch: Batch, z: Tokens, alpha: Tensor, dalpha: Tensor
) -> tuple[Callable[[Probs], PerToken], RowLoss | None]:
    """The NELBO of noised tokens z, and that of single rows; alpha and dalpha (B,)."""

    def loss_fn(log_x: Probs) -> PerToken:
        a, da = alpha[:, None, None], dalpha[:, None, None]
        if batch.given is not None:
            known = batch.given.cpu()[..., None]
            a, da = torch.where(known, 1.0, a), torch.where(known, 0.0, da)
        return integrand(prior, z, batch.tokens, log_x, a, da)

    return loss_fn, nelbo_rows(prior, z, batch.tokens, alpha[:, None], dalpha[:, None])


def _to_batch_device(alpha: Tensor, batch: Batch) -> Tensor:
    """Levels (B,) as (B, 1, 1) on the batch's device."""
    device = batch.tokens.device
    return alpha.to(device, working_dtype(device), non_blocking=True)[:, None, None]


def _level_per_position(alpha: Any, batch: Batch) -> Any:
    """The level of each token: 1 where it is given."""
    if batch.given is None or not isinstance(alpha, Tensor):
        return alpha
    return Levels(alpha, batch.given).per_position()


OBJECTIVES = Registry("objective")
OBJECTIVES.register("nelbo")(Nelbo)
OBJECTIVES.register("cross-entropy")(CrossEntropy)
OBJECTIVES.register("plain-cross-entropy")(CrossEntropy)
OBJECTIVES.register("next-token")(NextToken)

"""Objectives: what a denoiser is trained to minimise, as a loss for each token.

An objective is a callable (denoiser, batch, generator) -> (B, L) nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ..duality import diffusion_transform, gamma_at, relax_dense, relax_sparse
from ..process.conversion import to_plain
from ..process.nelbo import nelbo
from ..process.posterior import corrupt
from ..process.prior import Prior, Uniform
from ..process.schedule import NoiseSchedule
from ..types import PerToken, SoftTokens, Tokens, working_dtype


@dataclass(frozen=True)
class Batch:
    """Sequences to learn from.

    times (B,) in (0, 1] come from `stratified_times`. given (B, L) marks tokens that are shown
    clean and cost nothing, which teaches a network what `sample(given=...)` asks of it. real
    (B, L) is False at padding, which is neither looked at nor counted.
    """

    tokens: Any  # (B, L)
    times: Any  # (B,)
    labels: Any = None  # (B,) or None
    given: Any = None  # (B, L) or None
    real: Any = None  # (B, L) or None

    def mean(self, loss: PerToken) -> Tensor:
        """The mean over the tokens that are to be learnt."""
        learnt = self.learnt()
        return loss.mean() if learnt is None else loss.sum() / learnt.sum()

    def learnt(self) -> Tensor | None:
        """Tokens that are neither given nor padding, (B, L); None: all."""
        if self.given is None or self.real is None:
            return self.real if self.given is None else ~self.given
        return self.real & ~self.given


@runtime_checkable
class Objective(Protocol):
    """`Batch.mean` of it is what the optimizer sees."""

    def __call__(
        self, denoiser: Any, batch: Batch, generator: Generator | None = None
    ) -> PerToken: ...


@dataclass(frozen=True)
class Nelbo:
    """The exact negative ELBO of any prior (Eq. 4): corrupt, denoise, compare."""

    prior: Prior
    schedule: NoiseSchedule

    def __call__(
        self, denoiser: Any, batch: Batch, generator: Generator | None = None
    ) -> PerToken:
        alpha, dalpha = _levels(self.schedule, batch)
        z = corrupt(self.prior, batch.tokens, _on(batch, alpha), generator)
        log_x = _ask(denoiser, z, _on(batch, alpha).float(), batch)
        return _learnt(nelbo(self.prior, z, batch.tokens, log_x, alpha, dalpha), batch)


@dataclass(frozen=True)
class CrossEntropy:
    """-log p(x_l | z), unweighted, for a leave-one-out denoiser ("loo") or a plain one.

    A leave-one-out denoiser is converted before it is compared, so it stays one.
    """

    prior: Prior
    schedule: NoiseSchedule
    predicts: str = "loo"

    def __post_init__(self) -> None:
        if self.predicts not in ("loo", "plain"):
            raise ValueError(f"predicts must be 'loo' or 'plain', got {self.predicts!r}")

    def __call__(
        self, denoiser: Any, batch: Batch, generator: Generator | None = None
    ) -> PerToken:
        alpha = _on(batch, _levels(self.schedule, batch)[0])
        z = corrupt(self.prior, batch.tokens, alpha, generator)
        log_x = _ask(denoiser, z, alpha.float(), batch)
        if self.predicts == "loo":
            log_x = to_plain(self.prior, z, log_x, alpha).log_softmax(-1)
        return _learnt(-log_x.gather(-1, batch.tokens[..., None]).squeeze(-1), batch)


@dataclass(frozen=True)
class RelaxedNelbo:
    """The curriculum's loss (Eq. 9): the network reads soft tokens, the loss their argmax.

    top_k None: all K weights (Duo); a number: the k largest, never the others (Duo++). Times
    are uniform in gamma between the two levels of `alpha_range`.
    """

    vocab_size: int
    top_k: int | None = 2
    temperature: float = 1e-3
    alpha_range: tuple[float, float] = (0.945, 0.049)

    @cached_property
    def gamma_range(self) -> tuple[float, float]:
        low, high = (gamma_at(alpha, self.vocab_size) for alpha in self.alpha_range)
        return float(low), float(high)

    def __call__(
        self, denoiser: Any, batch: Batch, generator: Generator | None = None
    ) -> PerToken:
        low, high = self.gamma_range
        gamma = low + (high - low) * batch.times.double().cpu()
        alpha, slope = diffusion_transform(gamma, self.vocab_size)
        alpha, dalpha = _clean_where_given(alpha, slope * (high - low), batch)
        soft, z = self.relax(batch, gamma, generator)
        log_x = _ask(denoiser, soft, _on(batch, alpha).float(), batch)
        prior = Uniform(self.vocab_size)
        return _learnt(nelbo(prior, z, batch.tokens, log_x, alpha, dalpha), batch)

    def relax(
        self, batch: Batch, gamma: Tensor, generator: Generator | None = None
    ) -> tuple[Any, Tokens]:
        """Soft tokens and z_t; both the token itself where it is given."""
        K, tokens, known = self.vocab_size, batch.tokens, batch.given
        gamma = gamma.to(tokens.device, torch.float32)
        if self.top_k is None:
            probs, z = relax_dense(tokens, gamma, K, self.temperature, generator)
            if known is not None:
                clean = F.one_hot(tokens[known], K).to(probs)
                probs, z = probs.index_put((known,), clean), torch.where(known, tokens, z)
            return probs, z
        soft = relax_sparse(tokens, gamma, K, self.top_k, self.temperature, generator)
        if known is not None:
            ids, weights, z = soft
            first = F.one_hot(torch.zeros_like(tokens), self.top_k).to(weights)
            soft = SoftTokens(
                torch.where(known[..., None], tokens[..., None], ids),
                torch.where(known[..., None], first, weights),
                torch.where(known, tokens, z),
            )
        return soft, soft.hard


@dataclass(frozen=True)
class NextToken:
    """-log p(x_l | x before l) of a causal network that reads `bos_id`, then the sequence."""

    bos_id: int

    def __call__(
        self, denoiser: Any, batch: Batch, generator: Generator | None = None
    ) -> PerToken:
        start = torch.full_like(batch.tokens[:, :1], self.bos_id)
        logits = _ask(denoiser, torch.cat((start, batch.tokens[:, :-1]), 1), 1.0, batch)
        log_p = logits.float().log_softmax(-1)
        return _learnt(-log_p.gather(-1, batch.tokens[..., None]).squeeze(-1), batch)


def stratified_times(
    count: int,
    generator: Generator | None = None,
    rank: int = 0,
    world_size: int = 1,
    t_min: float = 1e-3,
) -> Tensor:
    """One t for each of `count` sequences, spread evenly over the batch of *all* processes.

    u_i = (i + U_i)/n over the n = count * world_size sequences; process r holds i = r, r +
    world_size, ...: each sees the whole range. Give every process the same generator state.
    """
    total = count * world_size
    u = torch.rand(total, dtype=torch.float64, generator=generator)
    return between(u, total, t_min)[rank::world_size]


def between(u: Tensor, total: int, t_min: float) -> Tensor:
    """One number in each of `total` equal parts of [t_min, 1]."""
    place = (torch.arange(total, dtype=torch.float64, device=u.device) + u) / total
    return t_min + (1 - t_min) * place


def random_spans(
    shape: tuple[int, int], share: float, generator: Generator | None = None
) -> Tensor:
    """Which tokens are given, (B, L): in a share of sequences a random span, or all but one.

    At least one token of every sequence stays free.
    """
    batch, length = shape
    chosen, inside = torch.rand(2, batch, 1, generator=generator).unbind(0)
    cuts = torch.randint(0, length + 1, (batch, 2), generator=generator).sort(-1).values
    place = torch.arange(length)
    span = (place >= cuts[:, :1]) & (place < cuts[:, 1:])
    given = torch.where(inside < 0.5, span, ~span) & (chosen < share)
    return given & ~given.all(-1, keepdim=True)


def _levels(schedule: NoiseSchedule, batch: Batch) -> tuple[Tensor, Tensor]:
    """alpha and its slope in float64, on the CPU: one a sequence, or one a token."""
    times = batch.times.double().cpu()
    return _clean_where_given(schedule.alpha(times), schedule.dalpha(times), batch)


def _clean_where_given(alpha: Tensor, dalpha: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    alpha, dalpha = alpha[:, None, None], dalpha[:, None, None]
    if batch.given is None:
        return alpha, dalpha
    known = batch.given.cpu()[..., None]
    return torch.where(known, 1.0, alpha), torch.where(known, 0.0, dalpha)


def _on(batch: Batch, alpha: Tensor) -> Tensor:
    device = batch.tokens.device
    return alpha.to(device, working_dtype(device))


def _ask(denoiser: Any, z: Any, alpha: Any, batch: Batch) -> Tensor:
    """The denoiser's answer; only one that is trained on padded rows need know of padding."""
    padding = () if batch.real is None else (batch.real,)
    return denoiser(z, alpha, batch.labels, *padding)


def _learnt(loss: PerToken, batch: Batch) -> PerToken:
    """Given tokens and padding cost nothing."""
    learnt = batch.learnt()
    return loss if learnt is None else torch.where(learnt, loss, 0.0)

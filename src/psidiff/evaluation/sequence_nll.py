"""The NLL of single sequences: exact for autoregressive networks, a bound for diffusion.

Some of their tokens may be given. Differences of sequences of one group have little noise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..process.posterior import corrupt
from ..process.prior import Prior
from ..process.schedule import NoiseSchedule
from ..types import Tokens, as_count, as_ids, traits
from .nll import (
    EvalBatch,
    Noise,
    cubic_alpha,
    min_alpha_of,
    nelbo_values,
    next_token_values,
    predict,
    sum_over_tokens,
)


class ScoredSequences:
    """Sequences of any lengths.

    Args:
        tokens: ids, (L_i,) each.
        score_masks: True at the tokens that count, (L_i,) each; None: all count.
    """

    def __init__(
        self, tokens: Sequence[Tensor], score_masks: Sequence[Tensor] | None = None
    ) -> None:
        masks = [torch.ones(len(row)) for row in tokens] if score_masks is None else score_masks
        for row, mask in zip(tokens, masks, strict=True):
            if row.shape != mask.shape:
                raise ValueError(
                    f"scored must mark the tokens of its row: {len(mask)} marks, "
                    f"{len(row)} tokens"
                )
        self.tokens: list[Tensor] = [row.long().cpu() for row in tokens]
        self.score_masks: list[Tensor] = [mask.bool().cpu() for mask in masks]

    def after(self, bos_id: int | None) -> ScoredSequences:
        """The same after a token that is not scored; None: their own first token is not."""
        if bos_id is None:
            masks = [mask & (torch.arange(len(mask)) > 0) for mask in self.score_masks]
            return ScoredSequences(self.tokens, masks)
        tokens = [F.pad(row, (1, 0), value=bos_id) for row in self.tokens]
        return ScoredSequences(tokens, [F.pad(mask, (1, 0)) for mask in self.score_masks])

    @property
    def lengths(self) -> Sequence[int]:
        return [len(mask) if bool(mask.any()) else 0 for mask in self.score_masks]

    def batch(self, rows: Tensor, draws: Tensor) -> EvalBatch:
        each = rows.tolist()
        tokens = pad_sequence([self.tokens[i] for i in each], batch_first=True)
        score = pad_sequence([self.score_masks[i] for i in each], batch_first=True)
        sizes = torch.tensor([len(self.tokens[i]) for i in each])
        real = torch.arange(tokens.shape[1]) < sizes[:, None]
        return EvalBatch(rows, draws, tokens, score, None if bool(real.all()) else real)


class SequenceScore(NamedTuple):
    """The score of a sequence by an autoregressive network.

    Args:
        nats: -log p, summed over the scored tokens.
        is_greedy: whether each of them was the most likely one.
        num_tokens: how many were scored.
    Example:
        >>> SequenceScore(2.5, False, 2).nats
        2.5
    """

    nats: float
    is_greedy: bool
    num_tokens: int


@torch.no_grad()
def autoregressive_nll(
    network: Callable[[Tensor], Tensor],
    bos_id: int | None,
    tokens: Sequence[Tensor],
    *,
    scored: Sequence[Tensor] | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
) -> list[SequenceScore]:
    """-log p(x) = -sum_l log p(x_l | x before l), exactly.

    Args:
        network: causal; ids (n, L) -> logits (n, L, K) of the token after each.
        bos_id: what the network reads first; None: the first token of each sequence, which is
            then not scored.
        tokens: ids, (L_i,) each.
        scored: True at the tokens that count, (L_i,) each; None: all count.
        batch_size: sequences in a forward pass.
        device: where the network is.
    Returns:
        A score for each sequence.
    Example:
        >>> def even(ids):  # a network to which all of 4 tokens are alike
        ...     return torch.zeros(*ids.shape, 4)
        >>> (score,) = autoregressive_nll(even, 0, [torch.tensor([1, 3])])
        >>> round(score.nats, 3), score.num_tokens  # 2 log 4
        (2.773, 2)
    """
    source = ScoredSequences(tokens, scored).after(bos_id)
    values = next_token_values(network, device)
    sums = sum_over_tokens(source, values, 3, batch_size=batch_size)[..., 0]
    return [SequenceScore(nats, miss == 0, int(n)) for nats, miss, n in sums.T.tolist()]


class MeanEstimate(NamedTuple):
    """An estimate of a mean.

    Args:
        mean: over draws.
        stderr: its standard error.
    Example:
        >>> MeanEstimate(2.0, 0.5).stderr
        0.5
    """

    mean: float
    stderr: float


@torch.no_grad()
def sequence_nelbo(
    denoiser: Any,
    prior: Prior,
    schedule: NoiseSchedule,
    tokens: Sequence[Tensor],
    *,
    draws: int = 1024,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
    scored: Sequence[Tensor] | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """A bound on -log p(x) of each sequence at `draws` random times: `estimate_mean` averages.

    alpha falls from 1 to 0 (`cubic_alpha`), so no term is missing at either end. Half as many
    equal parts of [0, 1] hold two draws each, side by side. Random numbers are a function of
    the seed, the group (by its repr; or else the tokens), the draw and the position: order,
    batches and other sequences change nothing but rounding.

    Args:
        denoiser: (z, alpha, labels=None) -> log x_theta (B, L, K). One with a fourth argument
            `mask` gets sequences of several lengths in a batch.
        prior: of the noise.
        schedule: the model's; its least alpha is the least that the denoiser is called with.
        tokens: ids, (L_i,) each.
        draws: of (t, z_t) for each sequence, an even number.
        seed: of the random numbers.
        groups: sequences with equal labels share times and, from the left, noise, so that most
            of the noise cancels in their difference; None: each by itself.
        scored: True at the tokens that count, (L_i,) each. The others are given: clean, at
            level 1, and free of charge; the bound is then on -log p(scored | given).
        batch_size: sequences in a forward pass.
        device: where the denoiser is.
    Returns:
        sum_l nelbo_l(z_t, x) of each sequence, (draws,).
    Raises:
        ValueError: if draws is odd, or groups or scored do not fit the sequences.
    Example:
        >>> from psidiff.process import LogLinear, Uniform
        >>> def even(z, alpha, labels=None):  # a denoiser to which all of 4 tokens are alike
        ...     return torch.zeros(*z.shape, 4).log_softmax(-1)
        >>> (values,) = sequence_nelbo(even, Uniform(4), LogLinear(), [torch.tensor([1, 3])])
        >>> mean, stderr = estimate_mean(values)
        >>> abs(mean - 2 * math.log(4)) < 4 * stderr
        True
    """
    if as_count("draws", draws, least=2) % 2:
        raise ValueError(f"draws must be even, two for each part of time, got {draws}")

    def times(generator: Generator) -> Tensor:
        part = torch.arange(draws // 2)[:, None]
        u = torch.rand(draws // 2, 2, dtype=torch.float64, generator=generator)
        return ((part + u) / (draws // 2)).flatten()

    source = ScoredSequences(tokens, scored)
    noise = group_noise(prior, source, times, groups, seed, scored is not None)
    values = nelbo_values(denoiser, prior, noise, min_alpha_of(schedule), device)
    mixed = traits(denoiser).padding
    return list(sum_over_tokens(source, values, 2, draws, batch_size, mixed=mixed)[0])


def estimate_mean(values: Tensor) -> MeanEstimate:
    """The mean of stratified draws, or of the differences of two sequences of one group.

    Two draws of the same part of time differ by chance alone: (f - f')^2/4 is, without bias,
    the variance of their mean.

    Args:
        values: of `sequence_nelbo`, or a difference of two of them, (draws,).
    Returns:
        The mean and its standard error.
    Example:
        >>> estimate_mean(torch.tensor([1.0, 3.0, 2.0, 2.0]))
        MeanEstimate(mean=2.0, stderr=0.5)
    """
    pairs = values.double().view(-1, 2)
    mean = pairs.mean().item()
    if not math.isfinite(mean):
        return MeanEstimate(mean, math.inf)
    spread = (pairs.diff(dim=-1) ** 2).sum().sqrt() / 2
    return MeanEstimate(mean, (spread / len(pairs)).item())


@torch.no_grad()
def is_greedy_in_one_pass(
    denoiser: Any,
    prior: Prior,
    schedule: NoiseSchedule,
    tokens: Sequence[Tensor],
    scored: Sequence[Tensor],
    *,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
) -> list[bool]:
    """Whether, with pure noise at the scored tokens, x_theta is largest at each of them.

    One draw of the noise and one pass, as in the released code: not the mode of p, which no
    few passes can find.

    Args:
        denoiser: as in `sequence_nelbo`.
        prior: of the noise.
        schedule: the model's; its least alpha is the least that the denoiser is called with.
        tokens: ids, (L_i,) each.
        scored: True at the tokens in question, (L_i,) each; the others are given.
        seed: of the noise.
        groups: sequences with equal labels share noise; None: each by itself.
        batch_size: sequences in a forward pass.
        device: where the denoiser is.
    Returns:
        Whether it is so, for each sequence.
    Example:
        >>> from psidiff.process import LogLinear, Uniform
        >>> def threes(z, alpha, labels=None):  # a denoiser that is sure of the token 3
        ...     return torch.tensor([0.0, 0.0, 0.0, 9.0]).log_softmax(-1).expand(*z.shape, 4)
        >>> tokens, last = [torch.tensor([1, 3])], [torch.tensor([False, True])]
        >>> is_greedy_in_one_pass(threes, Uniform(4), LogLinear(), tokens, last)
        [True]
    """
    source, last = ScoredSequences(tokens, scored), torch.ones(1, dtype=torch.float64)
    noise = group_noise(prior, source, lambda generator: last, groups, seed, True)
    least = min_alpha_of(schedule)

    def misses(batch: EvalBatch) -> Tensor:
        z, alpha, _ = noise(batch)
        log_x = predict(denoiser, batch, z.to(device), alpha.clamp(min=least))
        return (log_x.argmax(-1).cpu() != batch.tokens)[None]

    mixed = traits(denoiser).padding
    sums = sum_over_tokens(source, misses, 1, 1, batch_size, mixed=mixed)
    return (sums[0, :, 0] == 0).tolist()


def group_noise(
    prior: Prior,
    source: ScoredSequences,
    times: Callable[[Generator], Tensor],
    groups: Sequence[Hashable] | None,
    seed: int,
    with_given: bool,
) -> Noise:
    """Noise at times (draws,); its random numbers are a function of the group and the seed.

    with_given: tokens that are not scored are given, clean at level 1.
    """
    if groups is not None and len(groups) != len(source.tokens):
        raise ValueError(f"there are {len(groups)} groups for {len(source.tokens)} rows")
    seed = as_count("seed", seed, least=0)
    for row in source.tokens:
        as_ids("rows", row, prior.vocab_size)

    @lru_cache(maxsize=1)  # the draws of a row are evaluated one after another
    def noisy(row: int) -> tuple[Tensor, Tensor]:
        """z_t (draws, L) and t (draws, 1 or L), on the CPU: equal on every device."""
        tokens, mask = source.tokens[row], source.score_masks[row]
        label = tokens.tolist() if groups is None else groups[row]
        digest = hashlib.blake2b(repr((seed, label)).encode(), digest_size=8).digest()
        generator = Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        t = times(generator)[:, None]
        t = torch.where(mask, t, 0.0) if with_given else t
        alpha = cubic_alpha(t)[0][..., None]
        return corrupt(prior, tokens.expand(len(t), -1), alpha, generator), t

    def noise(batch: EvalBatch) -> tuple[Tokens, Tensor, Tensor]:
        places = zip(batch.rows.tolist(), batch.draws.tolist(), strict=True)
        drawn = [[value[draw] for value in noisy(row)] for row, draw in places]
        z, t = (pad_sequence([pair[i] for pair in drawn], batch_first=True) for i in (0, 1))
        alpha, dalpha = cubic_alpha(t)
        return z, alpha[..., None], dalpha[..., None]

    return noise

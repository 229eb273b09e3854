"""The NLL of a dataset: exact for autoregressive networks, an upper bound for diffusion.

All likelihoods are `sum_over_tokens`; what differs is where sequences come from, what noise
they get, and how the sums are averaged. `sequence_nll` has those of sequences of any lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ..distributed import Processes
from ..process.nelbo import nelbo
from ..process.prior import Prior
from ..process.schedule import NoiseSchedule
from ..types import Dataset, Probs, Tokens, as_count, at_least_float32, check_choice
from .metric_result import Likelihood, ratio_estimate

MIN_ALPHA = 1e-9  # denoisers take -log alpha; the sampler asks no lower either
_RELEASED_T_MIN = 1e-3

OnBatch = Callable[[int, int], None]
"""Called after each batch: how many passes over a sequence are done, and of how many."""


class EvalBatch(NamedTuple):
    """Sequences of one forward pass: which they are, which draw of each, and their tokens.

    score_mask is True at the tokens that count, attention_mask at those that are not padding.
    """

    rows: Any  # (n,)
    draws: Any  # (n,)
    tokens: Any  # (n, L)
    score_mask: Any  # (n, L)
    attention_mask: Any = None  # (n, L), or None: nothing is padded
    labels: Any = None  # (n,) or None


TokenValues = Callable[[EvalBatch], Tensor]
"""A batch -> values of its tokens, (m, n, L): one or more quantities to be summed."""


@runtime_checkable
class SequenceSource(Protocol):
    """Sequences by number; those of length 0 have nothing to score."""

    @property
    def lengths(self) -> Sequence[int]: ...

    def batch(self, rows: Tensor, draws: Tensor) -> EvalBatch: ...


def sum_over_tokens(
    source: SequenceSource,
    values: TokenValues,
    num_values: int,
    draws: int = 1,
    batch_size: int = 32,
    *,
    mixed: bool = True,
    group: Processes | None = None,
    on_batch: OnBatch | None = None,
) -> Tensor:
    """Sums of the values of scored tokens, for each sequence and draw.

    Args:
        source: the sequences.
        values: gives `num_values` values m of each token of a batch.
        draws: number of draws of each sequence.
        batch_size: at most so many sequences are in a forward pass.
        mixed: whether sequences of several lengths may share a batch, padded on the right.
        group: processes that share the batches.
        on_batch: called after each batch of this process.
    Returns:
        float64 (m, number of sequences, draws), the same in all processes; 0 for a sequence
        that has nothing to score.
    """
    group, lengths = group or Processes(), source.lengths
    sums = torch.zeros(num_values, len(lengths), draws, dtype=torch.float64)
    done, total = 0, draws * sum(n > 0 for n in lengths)
    for number, (rows, draw) in enumerate(_batches(lengths, draws, batch_size, mixed)):
        done += len(rows)
        if number % group.world != group.rank:
            continue
        batch = source.batch(rows, draw)
        found = values(batch).cpu().double()
        sums[:, rows, draw] = torch.where(batch.score_mask, found, 0).sum(-1)
        if on_batch is not None:
            on_batch(done, total)
    return group.mean(sums).cpu() * group.world


def _batches(
    lengths: Sequence[int], draws: int, batch_size: int, mixed: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Numbers of rows and of draws (n,) of each batch: all draws of all rows, short ones first.

    Unless lengths may be mixed, a batch has one of them. Rows of length 0 are left out.
    """
    size = as_count("batch_size", batch_size)
    order = sorted((i for i, n in enumerate(lengths) if n), key=lengths.__getitem__)
    groups = [order] if mixed else [list(g) for _, g in groupby(order, lengths.__getitem__)]
    for rows in map(torch.tensor, groups):
        for first in range(0, len(rows) * draws, size):
            place = torch.arange(first, min(first + size, len(rows) * draws))
            yield rows[place // draws], place % draws


class EvaluationSubset:
    """A number of sequences, spread evenly over a dataset.

    Args:
        data: the dataset.
        count: how many of its sequences; None, or more than there are: all of them.
        bos_id: a token that is read before each sequence, and not scored; None: there is none.
    """

    def __init__(
        self, data: Dataset, count: int | None = None, bos_id: int | None = None
    ) -> None:
        total = as_count("the number of sequences in the data", len(data))
        wanted = total if count is None else as_count("sequences", count)
        self.count: int = min(wanted, total)
        self.data = data
        self.bos_id = bos_id
        self.numbers: Tensor = torch.arange(self.count) * total // self.count

    @property
    def lengths(self) -> Sequence[int]:
        return [1] * self.count  # all the same

    def batch(self, rows: Tensor, draws: Tensor) -> EvalBatch:
        tokens, labels, real, _ = self.data.rows(self.numbers[rows])
        score = torch.ones_like(tokens, dtype=torch.bool) if real is None else real.bool()
        if self.bos_id is not None:
            tokens, score = F.pad(tokens, (1, 0), value=self.bos_id), F.pad(score, (1, 0))
        return EvalBatch(rows, draws, tokens, score, real, labels)


Noise = Callable[[EvalBatch], tuple[Tokens, Tensor, Tensor]]
"""A batch -> z_t (n, L), alpha and its slope, (n, 1, 1) or (n, L, 1) in float64."""


def next_token_values(
    network: Callable[[Tensor], Tensor], device: torch.device | str
) -> TokenValues:
    """-log p(x_l | x before l), whether x_l is not the most likely token, and 1; the first
    token is only read. A causal network never sees the padding on the right."""

    def values(batch: EvalBatch) -> Tensor:
        x = batch.tokens.to(device)
        log_p = at_least_float32(network(x[:, :-1])).log_softmax(-1)
        nats = -log_p.gather(-1, x[:, 1:, None]).squeeze(-1)
        misses = (log_p.argmax(-1) != x[:, 1:]).to(nats)
        return F.pad(torch.stack((nats, misses, torch.ones_like(nats))), (1, 0))

    return values


# Diffusion: a bound at random levels of noise


def cubic_alpha(t: Tensor) -> tuple[Tensor, Tensor]:
    """alpha = 1 - t^3 and its slope: from 1 to 0, so that no term is missing at either end.

    The bound does not depend on how alpha falls, but its variance does: with 1 - t it would not
    be finite; 1 - t^3 did best on rows of text (docs/log.md), 1 - t^2 is about as good.
    """
    return 1 - t**3, -3 * t**2


def nelbo_values(
    denoiser: Any, prior: Prior, noise: Noise, min_alpha: float, device: torch.device | str
) -> TokenValues:
    """The integrand of the NELBO (Eq. 4), and 1; `min_alpha` is the least level asked."""

    def values(batch: EvalBatch) -> Tensor:
        z, alpha, dalpha = noise(batch)
        z, x = z.to(device), batch.tokens.to(device)
        log_x = predict(denoiser, batch, z, alpha.clamp(min=min_alpha))
        nats = nelbo(prior, z, x, log_x, alpha, dalpha)
        return torch.stack((nats, torch.ones_like(nats)))

    return values


def predict(denoiser: Any, batch: EvalBatch, z: Tokens, alpha: Tensor) -> Probs:
    """log x_theta; only a denoiser of padded sequences need take the argument for padding."""
    both = (batch.labels, batch.attention_mask)
    labels, real = (None if value is None else value.to(z.device) for value in both)
    return denoiser(z, alpha.float().to(z.device), labels, *(() if real is None else (real,)))


def min_alpha_of(schedule: NoiseSchedule) -> float:
    """The least level that a denoiser of this schedule was trained at."""
    return max(float(schedule.alpha(1.0)), MIN_ALPHA)


def stratify(count: int, draws: int, seed: int) -> Tensor:
    """One number in each of count * draws equal parts of [0, 1): (count, draws).

    The draws of a row are spread over the whole range; chance says which row is where.
    """
    order = torch.randperm(count, generator=generator_for(seed, 0))[:, None]
    u = torch.rand(count, draws, dtype=torch.float64, generator=generator_for(seed, 1))
    return (torch.arange(draws) + (order + u) / count) / draws


def generator_for(*numbers: int) -> Generator:
    """A generator whose state is a function of these numbers."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return Generator().manual_seed(int(state[0]) >> 1)


def noise_rows(
    prior: Prior, batch: EvalBatch, alpha: Tensor, numbers: Tensor, seed: int
) -> Tokens:
    """z_t ~ q_t(. | x) with random numbers of the seed, the row's number in the data and the
    draw: neither batches nor other rows change them."""
    u = torch.empty(batch.tokens.shape, dtype=torch.float64)
    bits = torch.empty(batch.tokens.shape, dtype=torch.int64)
    places = zip(numbers[batch.rows].tolist(), batch.draws.tolist(), strict=True)
    for i, (number, draw) in enumerate(places):
        generator = generator_for(seed, 2, number, draw)
        u[i].uniform_(generator=generator)
        bits[i].random_(-(2**63), None, generator=generator)
    return torch.where(u < alpha[..., 0], batch.tokens, prior.from_bits(bits))


# The likelihood of a dataset


@torch.no_grad()
def likelihood(
    denoiser: Any,
    prior: Prior | None,
    schedule: NoiseSchedule,
    data: Dataset,
    *,
    sequences: int | None = None,
    draws: int = 1,
    protocol: str = "exact",
    batch_size: int = 32,
    seed: int = 0,
    device: torch.device | str = "cpu",
    bos_id: int | None = None,
    group: Processes | None = None,
    on_batch: OnBatch | None = None,
) -> Likelihood:
    """Estimate the NELBO (Eq. 4) of a dataset, or its exact NLL by an autoregressive network.

    Random numbers are a function of the seed, the number of the row and the draw, so models are
    compared on common random numbers.

    Args:
        denoiser: (z, alpha, labels=None) -> log x_theta (B, L, K). With prior None: a causal
            network, ids (B, L) -> logits (B, L, K), that reads `bos_id` first.
        prior: of the noise; None for an autoregressive network.
        schedule: the model's; its least alpha is the least that the denoiser is called with.
        data: sequences of one length.
        sequences: how many of them, spread over the data; None: all.
        draws: of (t, z_t) for each sequence.
        protocol: "exact": alpha falls from 1 to 0 (`cubic_alpha`), no term is missing at either
            end. "released": as published numbers were made, t in [.001, 1] on the model's
            schedule, stratified in each batch; no terms for the ends.
        batch_size: sequences in a forward pass.
        seed: of the random numbers.
        device: where the denoiser is.
        bos_id: the token that an autoregressive network reads first.
        group: processes that share the batches.
        on_batch: called with the passes done and their number.
    Returns:
        Nats a token with a standard error over sequences.
    Raises:
        ValueError: if an option is out of range, or bos_id is missing.
    Example:
        >>> import psidiff
        >>> from psidiff.experiment.held_out import held_out
        >>> model = psidiff.load("digits", "cpu")
        >>> known = (model.denoiser, model.prior, model.schedule, held_out("digits", model))
        >>> print(likelihood(*known, sequences=8).nats_per_token)  # doctest: +ELLIPSIS
        nll 1... ± 0... nats/token
    """
    check_choice("protocol", protocol, ("exact", "released"))
    draws, seed = as_count("draws", draws), as_count("seed", seed, least=0)
    batch_size = as_count("batch_size", batch_size)
    if prior is None and bos_id is None:
        raise ValueError("bos_id is missing: name the token that the network reads first")
    draws = 1 if prior is None else draws
    subset = EvaluationSubset(data, sequences, bos_id if prior is None else None)
    strata, about = stratify(subset.count, draws, seed), {"protocol": protocol, "draws": draws}
    if prior is None:
        values = next_token_values(denoiser, device)
    else:
        if protocol == "exact":
            levels, least = cubic_alpha(strata), min_alpha_of(schedule)
            about |= {"alpha": "1 - t^3", "least_alpha_asked": least}
        else:
            strata = _released_times(subset.count, draws, batch_size, seed)
            levels, least = (schedule.alpha(strata), schedule.dalpha(strata)), MIN_ALPHA
            about |= {"schedule": str(schedule), "batch_size": batch_size}
        noise = row_noise(prior, *levels, subset.numbers, seed)
        values = nelbo_values(denoiser, prior, noise, least, device)
    sums = sum_over_tokens(
        subset,
        values,
        3 if prior is None else 2,
        draws,
        batch_size,
        group=group,
        on_batch=on_batch,
    )
    tokens = sums[-1, :, 0]
    nats = ratio_estimate(sums[0].mean(-1), tokens, strata[:, 0], prior, seed, about)
    return Likelihood(nats, int(tokens.sum()))


def _released_times(count: int, draws: int, batch_size: int, seed: int) -> Tensor:
    """t = t_min + (1 - t_min) (i + U_i)/n for row i of a batch of n."""
    number = torch.arange(count)
    first = number // batch_size * batch_size
    size = (count - first).clamp(max=batch_size)
    u = torch.rand(count, draws, dtype=torch.float64, generator=generator_for(seed, 1))
    place = ((number - first)[:, None] + u) / size[:, None]
    return _RELEASED_T_MIN + (1 - _RELEASED_T_MIN) * place


def row_noise(prior: Prior, alpha: Tensor, dalpha: Tensor, numbers: Tensor, seed: int) -> Noise:
    """Noise at levels (rows, draws), for rows of these numbers in a dataset."""

    def noise(batch: EvalBatch) -> tuple[Tokens, Tensor, Tensor]:
        a, da = (level[batch.rows, batch.draws, None, None] for level in (alpha, dalpha))
        return noise_rows(prior, batch, a, numbers, seed), a, da

    return noise

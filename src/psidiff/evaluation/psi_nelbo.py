"""The bound on -log p(x) of a sampler itself: what its steps lose, each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..process.posterior import psi
from ..process.prior import Prior
from ..sampling.plan import Step
from ..types import Dataset, Level, PerToken, Probs, Tokens, as_count, working_dtype
from .exact_distribution import kappa_of
from .metric_result import MetricResult, ratio_estimate
from .nll import (
    MIN_ALPHA,
    EvalBatch,
    EvaluationSubset,
    OnBatch,
    TokenValues,
    noise_rows,
    predict,
    stratify,
    sum_over_tokens,
)

_CHUNK = 2**22  # probabilities in memory at a time


@torch.no_grad()
def psi_nelbo(
    denoiser: Any,
    prior: Prior,
    steps: Sequence[Step],
    data: Dataset,
    *,
    sequences: int | None = None,
    draws: int = 1,
    steps_drawn: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    device: torch.device | str = "cpu",
    on_batch: OnBatch | None = None,
) -> MetricResult:
    """Estimate the bound on -log p(x) of a sampler itself (App. "NELBO").

    sum over steps of E_{z_t ~ q_t(.|x)} KL(Psi_{s|t}(. | z_t, x) || Psi^theta_{s|t}(. | z_t))
    + KL(q_1(. | x) || pi)

    The last step goes to alpha_s = 1, where its KL is the reconstruction term -log p(x | z_t).

    Args:
        denoiser: (z, alpha, labels=None) -> log x_theta (B, L, K).
        prior: of the noise.
        steps: of `plan`; each begins where the one before it ended.
        data: sequences of one length.
        sequences: how many of them, spread over the data; None: all.
        draws: of z_t for each sequence and step.
        steps_drawn: so many steps, drawn for each sequence and draw, stand for all of them;
            None: all steps are taken.
        on_batch: called with the passes done and their number.
    Returns:
        Nats a token with a standard error over sequences.
    Raises:
        ValueError: if the plan has gaps, greedy steps or a rule with memory, or an option is
            out of range.
    """
    _check_plan(steps)
    subset = EvaluationSubset(data, sequences)
    draws, seed = as_count("draws", draws), as_count("seed", seed, least=0)
    if steps_drawn is None:
        places = stratify(subset.count, 1, seed)
        numbers = torch.arange(len(steps)).repeat(draws).expand(subset.count, -1)
    else:
        places = stratify(subset.count, draws * as_count("steps_drawn", steps_drawn), seed)
        numbers = (places * len(steps)).long()
    ids = subset.numbers
    values = _step_divergence(denoiser, prior, steps, numbers, ids, seed, device)
    evaluations = numbers.shape[1]
    sums = sum_over_tokens(subset, values, 2, evaluations, batch_size, on_batch=on_batch)
    kappas = [kappa_of(step) for step in steps]
    about: dict[str, Any] = {
        "protocol": "psi",
        "draws": draws,
        "steps": len(steps) - 1,  # as `plan` counts them, which adds a last one
        "kappas": [min(kappas), max(kappas)],
        "alphas": [steps[0].alpha_t, steps[-1].alpha_t],
    }
    if steps_drawn is not None:
        about["steps_drawn"] = steps_drawn
    nats, tokens = sums[0].mean(-1) * len(steps), sums[1, :, 0]
    return ratio_estimate(nats, tokens, places[:, 0], prior, seed, about)


def psi_divergence(
    prior: Prior,
    z: Tokens,
    x: Tokens,
    log_x_theta: Probs,
    alpha_s: Level,
    alpha_t: Level,
    kappa: float | PerToken,
) -> PerToken:
    """KL(Psi_{s|t}(. | z_t, x) || Psi^theta_{s|t}(. | z_t)), summed over all K tokens.

    The terms are p log(p/q) - p + q, none of them below 0.
    """
    clean = F.one_hot(x, prior.vocab_size).to(log_x_theta)
    p, q = (
        psi(prior, z, each, alpha_s, alpha_t, kappa).probs(prior, z, each)
        for each in (clean, log_x_theta.exp())
    )
    log_ratio = torch.where(p > 0, p, 1).log() - torch.where(p > 0, q, 1).log()
    return (p * log_ratio - p + q).sum(-1)


def _step_divergence(
    denoiser: Any,
    prior: Prior,
    steps: Sequence[Step],
    numbers: Tensor,
    ids: Tensor,
    seed: int,
    device: torch.device | str,
) -> TokenValues:
    """The KL of the steps that are numbered (count, draws), a few rows of K at a time.

    Each carries its share of the prior's term, so that all of them together have it once.
    """
    plan = [(step.alpha_s, step.alpha_t, kappa_of(step)) for step in steps]
    levels, start = torch.tensor(plan, dtype=torch.float64), _start(prior, steps[0].alpha_t)
    size = max(_CHUNK // prior.vocab_size, 1)

    def values(batch: EvalBatch) -> Tensor:
        at = levels[numbers[batch.rows, batch.draws]]
        s, t, kappa = at.T[..., None, None]  # (B, 1, 1), each
        z, x = noise_rows(prior, batch, t, ids, seed).to(device), batch.tokens.to(device)
        log_x = predict(denoiser, batch, z, t.clamp(min=MIN_ALPHA))
        dtype = working_dtype(z.device)
        s, t, kappa = (v.to(z.device, dtype).expand(*z.shape, 1) for v in (s, t, kappa))
        flat = (v.flatten(0, 1).split(size) for v in (z, x, log_x, s, t, kappa))
        pieces = [[v[None] for v in piece] for piece in zip(*flat, strict=True)]
        found = [
            psi_divergence(prior, z, x, log_x.to(dtype), s, t, kappa[..., 0])
            for z, x, log_x, s, t, kappa in pieces
        ]
        prior_term = start[batch.tokens]
        if bool(prior_term[batch.score_mask].isinf().any()):
            raise ValueError(
                f"the plan starts at alpha = {steps[0].alpha_t:g}, where tokens can be clean, "
                f"but {prior} never draws them: the bound is infinite unless its schedule has "
                "eps=0"
            )
        nats = torch.cat(found, 1).view(z.shape).cpu() + prior_term / len(steps)
        return torch.stack((nats, torch.ones_like(nats)))

    return values


def _start(prior: Prior, alpha: float) -> Tensor:
    """KL(q_1(. | x) || pi) of each token x: the sampler starts at pi, not at q_1."""
    pi = prior.probs(like=torch.zeros((), dtype=torch.float64))
    q = alpha + (1 - alpha) * pi  # of x itself; all others have (1 - alpha) pi
    others = (1 - pi) * math.log1p(-alpha) * (1 - alpha) if alpha < 1 else 0 * pi
    return q * (q / pi).log() + others if alpha > 0 else 0 * pi


def _check_plan(steps: Sequence[Step]) -> None:
    """What a bound needs: every step begins where the last one ended, and all are draws."""
    if not steps or steps[-1].alpha_s != 1:
        raise ValueError("a plan has a likelihood if its last step goes to alpha_s = 1")
    for before, after in pairwise(steps):
        if before.alpha_s != after.alpha_t:
            raise ValueError(
                f"a step to alpha {before.alpha_s:g} is followed by one from "
                f"{after.alpha_t:g}: a plan with gaps has no likelihood"
            )
    if any(step.greedy for step in steps):
        raise ValueError("a greedy step has no likelihood: plan with last='sample'")

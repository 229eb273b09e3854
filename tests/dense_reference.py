"""The sampler as the formulas say it: what `sample` must agree with in law.

Every step has all of x_theta, all of the posterior over K tokens, a sort where there is a
nucleus, and one categorical draw, in float64. Of the engine's own step it shares nothing but
the posterior. Too slow for a network; on a toy `dense_probs` at every state is a transition
matrix, which gives the law of a whole run exactly (`evaluation.exact_distribution.propagate`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from psidiff.process.posterior import PREDICTORS, psi
from psidiff.process.prior import Prior
from psidiff.sampling.guidance import Guidance
from psidiff.sampling.plan import Step
from psidiff.types import Denoiser, Probs, Tokens


@torch.no_grad()
def dense_sample(
    denoiser: Denoiser,
    prior: Prior,
    steps: Iterable[Step],
    shape: tuple[int, int],
    generator: Generator | None = None,
    *,
    given: Tensor | None = None,
    **options: Any,
) -> Tokens:
    """z ~ pi, then z ~ dense_probs(. | z) at every step. `options` are those of dense_probs."""
    pi = prior.probs(like=torch.zeros((), dtype=torch.float64))
    z = _draw(pi.expand(*shape, -1), generator)
    z = z if given is None else torch.where(given < 0, z, given)
    for step in steps:
        z = _draw(dense_probs(denoiser, prior, step, z, given=given, **options), generator)
    return z


def dense_probs(
    denoiser: Denoiser,
    prior: Prior,
    step: Step,
    z: Tokens,
    *,
    labels: Tensor | None = None,
    given: Tensor | None = None,
    guidance: Guidance | None = None,
    temperature: float = 1.0,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k: int | None = None,
    nucleus: str = "keep",
    predictor: str = "markov",
) -> Probs:
    """Psi_{s|t}(. | z_t) at each position. A given token has level 1, before and after."""
    if callable(step.kappa):
        raise ValueError("a rule with memory has no law over z alone: take `sample`")
    on_posteriors = guidance is not None and guidance.on == "posterior"
    if on_posteriors and predictor != "markov":
        raise ValueError(f"guidance on posteriors needs predictor='markov', got {predictor!r}")
    kappa, pi = step.kappa, prior.probs(like=torch.zeros((), dtype=torch.float64))
    weight = 1.0 if guidance is None else guidance.at(step.t)
    known = torch.zeros_like(z, dtype=torch.bool) if given is None else given >= 0
    levels = torch.tensor([step.alpha_s, step.alpha_t], dtype=torch.float64)
    alpha_s, alpha_t = levels.expand(*z.shape, 2).masked_fill(known[..., None], 1).split(1, -1)

    def log_x(labels: Tensor | None) -> Tensor:
        level = max(step.alpha_t, 1e-9) if given is None else alpha_t.clamp(min=1e-9)
        return prior.without_mask(denoiser(z, level, labels).double()).log_softmax(-1)

    def truncated(logits: Tensor) -> Tensor:
        return _truncated(logits / temperature, top_k, top_p, min_p or 0.0, nucleus)

    if on_posteriors and not step.greedy:
        xs = [truncated(log_x(each)) for each in (labels, None)]

        def guided(alpha_s: float | Tensor) -> Tensor:
            q = [psi(prior, z, x, alpha_s, alpha_t, 1.0).probs(prior, z, x) for x in xs]
            return _product(q[0].log(), q[1].log(), weight).exp()

        corrector = alpha_s * guided(1.0) + (1 - alpha_s) * pi
        return kappa * guided(alpha_s) + (1 - kappa) * corrector
    with_label = log_x(labels)
    x = truncated(_product(with_label, log_x(None), weight) if guidance else with_label)
    if step.greedy:
        noisy = (pi[z] > 0) & (alpha_t[..., 0] < 1)
        return F.one_hot(torch.where(noisy, x.argmax(-1), z), prior.vocab_size).double()
    mixture = psi(prior, z, x, alpha_s, alpha_t, kappa, PREDICTORS[predictor])
    return mixture.probs(prior, z, x)


def _truncated(
    logits: Tensor, top_k: int | None, top_p: float | None, min_p: float, nucleus: str
) -> Probs:
    """Of each row the k most probable tokens, the nucleus of them, and no share below min_p."""
    if top_k is not None:
        rank = logits.argsort(-1, descending=True).argsort(-1)
        logits = logits.masked_fill(rank >= top_k, -torch.inf)
    if top_p is not None and top_p < 1:
        logits = top_p_by_sort(logits, top_p, nucleus == "keep")
    x = logits.softmax(-1)
    x = x.masked_fill(x < min_p * x.amax(-1, keepdim=True), 0)
    return x / x.sum(-1, keepdim=True)


def top_p_by_sort(logits: Tensor, p: float, keep_crossing: bool = True) -> Tensor:
    """As a sort has it: sort, accumulate, cut, unsort. Ties fall where the sort left them."""
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    total = probs.cumsum(-1)
    cut = (total - probs if keep_crossing else total) > p
    cut[..., 0] = False
    return logits.masked_fill(cut.gather(-1, order.argsort(-1)), -torch.inf)


def _product(log_p: Tensor, log_q: Tensor, weight: float) -> Tensor:
    """log of p^weight q^(1 - weight), normalised; impossible where either is; p if all is."""
    if weight in (0, 1):
        return log_p if weight else log_q
    possible = (log_p > -torch.inf) & (log_q > -torch.inf)
    mixed = torch.where(possible, weight * log_p + (1 - weight) * log_q, -torch.inf)
    return torch.where(possible.any(-1, keepdim=True), mixed, log_p).log_softmax(-1)


def _draw(probs: Probs, generator: Generator | None) -> Tokens:
    rows = probs.reshape(-1, probs.shape[-1])
    return torch.multinomial(rows, 1, generator=generator).view(probs.shape[:2])

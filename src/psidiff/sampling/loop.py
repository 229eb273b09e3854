"""The sampling loop: a plan of steps, walked once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from ..kernels.counter import Purpose, Stream, device_of, draw_key
from ..process.posterior import Predictor, markov, maximal
from ..process.prior import Masked, Prior
from ..types import Tokens, as_count, check_shape
from .confident import Confident
from .constraints import known_positions
from .corrector import Corrector
from .filters import chain
from .guidance import Guidance
from .kappa import Memory, from_remasking, max_remasking
from .network import Network
from .plan import Step
from .step import Run, guided_step, psi_step

OnStep = Callable[[int, Step, Tokens, Tensor], None]
_PREDICTORS: dict[str, Predictor | Confident] = {
    "markov": markov,
    "maximal": maximal,
    "confident": Confident(),
}


@dataclass(frozen=True)
class Samples:
    """tokens (B, L); nfe: forward passes a sequence, the mean; head_rows: rows of the head."""

    tokens: Tokens
    nfe: float
    head_rows: int


@torch.no_grad()
def sample(
    denoiser: Any,
    prior: Prior,
    steps: Iterable[Step],
    shape: tuple[int, int],
    generator: Generator | None = None,
    *,
    labels: Tensor | None = None,
    given: Tensor | None = None,
    guidance: Guidance | None = None,
    temperature: float = 1.0,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k: int | None = None,
    nucleus: str = "keep",
    predictor: str | Confident = "markov",
    corrector: Corrector | None = None,
    head: str = "lazy",
    micro_batch: int | None = None,
    first_index: int = 0,
    device: torch.device | str | None = None,
    on_step: OnStep | None = None,
) -> Samples:
    """Draw z at the prior and walk it down the plan.

    given (B, L) holds ids that never change, -1 where free; the denoiser is told that their
    level is 1. Sample number first_index + b gets the same random numbers in every batch.
    """
    steps = _plan_of(steps)
    if len(shape) != 2:
        raise ValueError(f"shape must be (num_samples, length), got {tuple(shape)}")
    shape = (as_count("num_samples", shape[0]), as_count("length", shape[1]))
    labels = None if labels is None else torch.as_tensor(labels)
    _check(prior, steps, shape, labels, guidance, predictor, corrector, head, micro_batch)
    device = device_of(generator) if device is None else torch.device(device)
    stream = Stream(draw_key(generator), shape, first_index, device)
    z = prior.from_bits(stream.bits(0, Purpose.START))
    free, known = torch.ones(shape, dtype=torch.bool, device=device), None
    if (fixed := known_positions(prior, given, shape, device)) is not None:
        ids, known = fixed
        z, free = torch.where(known, ids, z), ~known
    network = Network(
        denoiser,
        prior,
        None if labels is None else labels.to(device),
        known,
        guidance,
        chain(temperature, top_k, top_p, min_p, nucleus),
        micro_batch,
    )
    run = Run(prior, network, stream, free, head == "lazy")
    memory = Memory(torch.full(shape, torch.inf, dtype=run.dtype, device=device))
    advance = _PREDICTORS[predictor] if isinstance(predictor, str) else predictor
    for i, step in enumerate(steps):
        weight = 1.0 if guidance is None else guidance.at(step.t)
        if isinstance(advance, Confident):
            z, route, memory = advance(run, i, step, z, memory)
        elif (
            guidance and guidance.on == "posterior" and weight not in (0, 1) and not step.greedy
        ):
            z, route, memory = guided_step(run, i, step, z, memory, weight)
        else:
            z, route, memory = psi_step(run, advance, i, step, z, memory)
        if corrector is not None and step.alpha_s < 1:
            z, route, memory = corrector(run, i, step, z, memory, route)
        if on_step is not None:
            on_step(i, step, z, route)
    return Samples(z, network.passes / max(shape[0], 1), network.head_rows)


def _plan_of(steps: Any) -> tuple[Step, ...]:
    try:
        steps = tuple(steps)
    except TypeError:
        steps = ()
    if not steps or not all(isinstance(step, Step) for step in steps):
        raise ValueError(
            "steps must hold Steps: make them with plan(num_steps, schedule, kappa)"
        )
    return steps


def _check(
    prior: Prior,
    steps: tuple[Step, ...],
    shape: tuple[int, int],
    labels: Tensor | None,
    guidance: Guidance | None,
    predictor: str | Confident,
    corrector: Corrector | None,
    head: str,
    micro_batch: int | None,
) -> None:
    """What a caller can get wrong, said before anything runs."""
    if not isinstance(predictor, Confident) and predictor not in _PREDICTORS:
        raise ValueError(
            f"predictor must be one of {', '.join(_PREDICTORS)}, got {predictor!r}"
        )
    if guidance is not None and not isinstance(guidance, Guidance):
        raise ValueError(f"guidance must be a Guidance(weight), got {guidance!r}")
    if corrector is not None and not isinstance(corrector, Corrector):
        raise ValueError(f"corrector must be a Corrector(...), got {corrector!r}")
    if head not in ("lazy", "dense"):
        raise ValueError(f"head must be 'lazy' or 'dense', got {head!r}")
    if micro_batch is not None:
        as_count("micro_batch", micro_batch)
    if labels is not None:
        check_shape("labels", labels, shape[:1])
    if guidance is not None and labels is None:
        raise ValueError("guidance needs labels to be guided by")
    confident = predictor == "confident" or isinstance(predictor, Confident)
    if guidance is not None and guidance.on == "posterior" and predictor != "markov":
        raise ValueError(f"guidance on posteriors needs predictor='markov', got {predictor!r}")
    if corrector is not None and not bool((prior.probs(like=torch.zeros(())) > 0).all()):
        raise ValueError(
            f"a leave-one-out corrector needs a prior with mass on every token; "
            f"{type(prior).__name__} has none on some"
        )
    for step in steps:
        if confident and step.kappa != 1:
            raise ValueError("predictor 'confident' renoises by itself: plan it with kappa = 1")
        if not callable(step.kappa):
            _check_kappa(prior, step, step.kappa)


def _check_kappa(prior: Prior, step: Step, kappa: float) -> None:
    """In [0, 1]; for masks as low as ReMDM's largest sigma allows."""
    least = 0.0
    if isinstance(prior, Masked):
        most = max_remasking(step.alpha_s, step.alpha_t)
        least = min(from_remasking(most, step.alpha_s, clipped=False), 0.0)
    if not least - 1e-12 <= kappa <= 1:
        raise ValueError(f"kappa must be in [0, 1], got {kappa:g} at t={step.t:g}")

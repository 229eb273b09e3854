"""The sampling loop: a plan of steps, walked once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from ..kernels.counter_rng import Purpose, Stream, device_of, draw_key
from ..process.posterior import PREDICTORS, Predictor, markov
from ..process.prior import Masked, Prior
from ..types import Denoiser, Tokens, as_count, as_device, check_integers, check_shape
from .confident import Confident
from .constraints import known_positions
from .corrector import Corrector
from .filters import chain, check_classes, find_cache
from .guidance import Guidance
from .kappa import Memory, from_remasking, max_remasking
from .network import Network
from .plan import Step
from .static import Overflowed, Static, chosen
from .step import Run, greedy_step, guided_step, psi_step

OnStep = Callable[[int, Step, Tokens, Tensor], None]
_KNOWN: dict[str, Predictor | Confident] = {**PREDICTORS, "confident": Confident()}


@dataclass(frozen=True)
class Samples:
    """tokens (B, L); nfe: forward passes a sequence, the mean; head_rows: rows of the head."""

    tokens: Tokens
    nfe: float
    head_rows: int


@torch.no_grad()
def sample(
    denoiser: Denoiser,
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
    predictor: str | Confident | Predictor = "markov",
    corrector: Corrector | None = None,
    head: str = "lazy",
    micro_batch: int | None = None,
    first_index: int = 0,
    device: torch.device | str | None = None,
    on_step: OnStep | None = None,
    graph: bool | None = None,
) -> Samples:
    """Draw z at the prior and walk it down the plan. A network should be in eval mode.

    given         (B, L) ids that never change, -1 where free; the denoiser is then called with
                  levels (B, L, 1), 1 at these, in torch's default dtype
    labels        (B,); guidance combines passes with them and without (labels=None)
    temperature, top_k, top_p, min_p   change x_theta, in this order; nucleus="drop" drops the
                  token that crosses p
    predictor     "markov", "maximal" or "confident"; or such an object
    corrector     extra redraws at every level
    head          "lazy": only rows that the coins ask for; "dense": all, for the same tokens
    micro_batch   the batch the denoiser always sees, so that float32 networks give the same
                  tokens in every batch
    first_index   the number of the first sample: sample i has the same random numbers always
    on_step       called with (i, step, z, route); route 0 kept, 1 predicted, 2 renoised
    graph         steps of fixed shapes as CUDA graphs, the same law; None: on a GPU, for
                  denoisers that are `recordable`, without guidance, corrector, micro_batch,
                  and with rules and predictors that look at nothing but the level
    """
    steps, shape, advance = _plan_of(steps), _shape_of(shape), _predictor_of(predictor)
    labels = None if labels is None else torch.as_tensor(labels)
    _check(prior, steps, shape, labels, guidance, advance, corrector, head)
    check_classes(denoiser, labels)
    if micro_batch is not None:
        as_count("micro_batch", micro_batch)
    device = device_of(generator) if device is None else as_device(device)
    first_index = as_count("first_index", first_index, least=0)
    stream = Stream(draw_key(generator), shape, first_index, device)
    z = prior.from_bits(stream.bits(0, Purpose.START))
    free, known = torch.ones(shape, dtype=torch.bool, device=device), None
    if (fixed := known_positions(prior, given, shape, device)) is not None:
        ids, known = fixed
        z, free = torch.where(known, ids, z), ~known
    needs = {
        "predictor 'markov' or 'maximal'": advance in PREDICTORS.values(),
        "no rule that remembers": not any(callable(step.kappa) for step in steps),
        "no corrector": corrector is None,
        "no guidance": guidance is None,
        "head='lazy'": head == "lazy",
        "no micro_batch": micro_batch is None,
        "no cache": find_cache(denoiser) is None,
        "a GPU": device.type == "cuda",
    }
    fixed_shapes = chosen(graph, denoiser, needs)
    network = Network(
        denoiser,
        prior,
        None if labels is None else labels.to(device),
        known,
        guidance,
        chain(temperature, top_k, top_p, min_p, nucleus, fixed_shapes),
        micro_batch,
    )
    if (cache := find_cache(denoiser)) is not None:
        cache.size = max(cache.size, 2 * shape[0])
    run = Run(prior, network, stream, free, head == "lazy", steps[0].alpha_t)
    static = None
    if fixed_shapes:
        assert not isinstance(advance, Confident)
        static = Static(run, advance, steps)
    try:
        z = _walk(run, advance, corrector, steps, z, on_step, static)
    except Overflowed:
        network.passes = network.head_rows = 0
        z = _walk(run, advance, corrector, steps, z, on_step, None)
    return Samples(z, network.passes / shape[0], network.head_rows)


def _walk(
    run: Run,
    advance: Predictor | Confident,
    corrector: Corrector | None,
    steps: tuple[Step, ...],
    z: Tokens,
    on_step: OnStep | None,
    static: Static | None,
) -> Tokens:
    """The loop itself: z is its one variable, beside what a rule remembers."""
    guidance = run.network.guidance
    memory = Memory(torch.full(z.shape, torch.inf, dtype=run.dtype, device=z.device))
    for i, step in enumerate(steps):
        weight = 1.0 if guidance is None else guidance.at(step.t)
        if static is not None and (made := static(i, z)) is not None:
            z, route = made
        elif isinstance(advance, Confident):
            z, route, memory = advance(run, i, step, z, memory)
        elif step.greedy:
            z, route, memory = greedy_step(run, i, step, z, memory)
        elif guidance is not None and guidance.on == "posterior" and weight not in (0, 1):
            z, route, memory = guided_step(run, i, step, z, memory, weight)
        else:
            z, route, memory = psi_step(run, advance, i, step, z, memory)
        if corrector is not None and step.alpha_s < 1:
            z, route, memory = corrector(run, i, step, z, memory, route)
        if on_step is not None:
            on_step(i, step, z, route)
    if static is not None:
        static.finish()
    return z


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


def _shape_of(shape: Any) -> tuple[int, int]:
    if not isinstance(shape, Sequence) or len(shape) != 2:
        raise ValueError(f"shape must be (num_samples, length), got {shape}")
    return as_count("num_samples", shape[0]), as_count("length", shape[1])


def _predictor_of(predictor: Any) -> Predictor | Confident:
    if isinstance(predictor, str) and predictor in _KNOWN:
        return _KNOWN[predictor]
    if not callable(predictor):
        raise ValueError(f"predictor must be one of {', '.join(_KNOWN)}, got {predictor!r}")
    return predictor


def _check(
    prior: Prior,
    steps: tuple[Step, ...],
    shape: tuple[int, int],
    labels: Tensor | None,
    guidance: Guidance | None,
    advance: Predictor | Confident,
    corrector: Corrector | None,
    head: str,
) -> None:
    """What a caller can get wrong, said before anything runs."""
    if not isinstance(prior, Prior):
        raise ValueError(f"prior must be a Prior such as Uniform(K), got {prior!r}")
    if guidance is not None and not isinstance(guidance, Guidance):
        raise ValueError(f"guidance must be a Guidance(weight), got {guidance!r}")
    if corrector is not None and not isinstance(corrector, Corrector):
        raise ValueError(f"corrector must be a Corrector(...), got {corrector!r}")
    if head not in ("lazy", "dense"):
        raise ValueError(f"head must be 'lazy' or 'dense', got {head!r}")
    if labels is not None:
        check_integers("labels", labels)
        check_shape("labels", labels, shape[:1])
    if guidance is not None and labels is None:
        raise ValueError("guidance needs labels to be guided by")
    if guidance is not None and guidance.on == "posterior" and advance is not markov:
        name = getattr(advance, "__name__", "confident")
        raise ValueError(f"guidance on posteriors needs predictor='markov', got {name!r}")
    if corrector is not None and not bool((prior.probs(like=torch.zeros(())) > 0).all()):
        raise ValueError(
            f"a leave-one-out corrector needs a prior with mass on every token; "
            f"{type(prior).__name__} has none on some"
        )
    if corrector is not None and getattr(advance, "commit", False):
        raise ValueError("a corrector would redraw what 'confident:commit' keeps: leave it out")
    for step in steps:
        if isinstance(advance, Confident) and step.kappa != 1:
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

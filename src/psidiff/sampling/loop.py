"""`sample`: checks what a caller says, and moves a state down the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from ..kernels.counter_rng import device_of, new_key
from ..process.posterior import PREDICTORS, Predictor
from ..process.prior import Masked, Prior
from ..types import (
    FREE,
    Denoiser,
    Tokens,
    as_count,
    as_device,
    as_ids,
    check_integers,
    check_shape,
    traits,
)
from .confident import Confident
from .corrector import Corrector
from .cuda_graph import CudaGraphStepper
from .filters import Cached, check_classes, find_cache
from .guidance import Guidance
from .kappa import Constant, from_remasking, max_remasking
from .logit_sources import LazyLogits
from .plan import Step
from .sampler import Sampler
from .state import SampleLayout, SampleState, SamplingContext, advance
from .step_batch import check_affine

OnStep = Callable[[int, Step, Tokens, Tensor], None]


@dataclass(frozen=True)
class Samples:
    """What a sampler made.

    Args:
        tokens: token ids, (B, L).
        nfe: forward passes of a sequence, the mean.
        head_rows: rows of the output layer that were evaluated in all.

    Example:
        >>> import psidiff
        >>> made = psidiff.load("digits", device="cpu").sample(2, num_steps=4)
        >>> made.nfe <= 5
        True
    """

    tokens: Tokens
    nfe: float
    head_rows: int


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
    """Draw z from the prior and move it down the plan. A network should be in eval mode.

    Args:
        denoiser: callable (z, alpha, labels=None) -> log x_theta (B, L, K), normalised over K.
        prior: the noise it was trained with.
        steps: of `plan`, or any `Step`s.
        shape: (B, L).
        generator: where one random key is drawn from; None: torch's global generator.
        labels: (B,); guidance combines passes with them and without (labels=None).
        given: (B, L) ids that never change, -1 where free; the denoiser is then called with
            levels (B, L, 1), 1 at these, in torch's default dtype.
        guidance: a `Guidance`; None: unguided.
        temperature: x_theta^(1/temperature); then top_k, top_p and min_p, in this order.
        top_p: mass of the most probable tokens that are kept; None: all.
        min_p: least probability that is kept, as a share of the largest.
        top_k: number of tokens that are kept.
        nucleus: "keep", or "drop" the token that crosses top_p.
        predictor: "markov", "maximal" or "confident"; or such an object.
        corrector: a `Corrector`, extra redraws at every level.
        head: "lazy": only rows of the output layer that can matter; "dense": all, for the same
            tokens.
        micro_batch: the batch that the denoiser always sees, so that float32 networks give the
            same tokens in every batch.
        first_index: number of the first sample: sample i has the same random numbers always.
        device: None: the generator's, else the CPU.
        on_step: called with (i, step, z, route), route (B, L): 0 kept, 1 predicted, 2 renoised.
        graph: steps of fixed shapes as CUDA graphs, with the same law; None: on a GPU, for
            denoisers that are `recordable`, without guidance, corrector and micro_batch, with
            nucleus="keep", and rules and predictors that look at nothing but the level.

    Returns:
        `Samples`: tokens (B, L), nfe and head_rows.

    Raises:
        ValueError: if an argument is out of range, or two of them do not go together.

    Example:
        >>> from psidiff.process import LogLinear, Uniform
        >>> from psidiff.sampling import Cap, plan, sample
        >>> def denoiser(z, alpha, labels=None):
        ...     return torch.zeros(*z.shape, 5).log_softmax(-1)
        >>> steps = plan(8, LogLinear(), Cap(0.1))
        >>> generator = torch.Generator().manual_seed(0)
        >>> sample(denoiser, Uniform(5), steps, (2, 6), generator, top_p=0.9).tokens.shape
        torch.Size([2, 6])
    """
    count, length = _shape_of(shape)
    if given is not None:
        check_shape("given", given := torch.as_tensor(given), (count, length))
    layout = SampleLayout(
        count,
        length,
        (new_key(generator),),
        length,
        device_of(generator) if device is None else as_device(device),
        given=given,
        labels=None if labels is None else torch.as_tensor(labels),
        first_index=as_count("first_index", first_index, least=0),
        conditioned=given is not None,
        watched=on_step is not None,
    )
    sampler = Sampler(
        Constant(1.0),  # the plan has the rule already
        predictor=predictor,
        corrector=corrector,
        guidance=guidance,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        nucleus=nucleus,
        head=head,
        micro_batch=micro_batch,
    )
    context = diffusion_context(denoiser, prior, steps, layout, sampler, graph)
    return run_steps(context.start(0, count, skip_given=False), on_step)


def run_steps(state: SampleState, *listeners: OnStep | None) -> Samples:
    """All steps of a state; listeners get whole samples after each."""
    while not state.done:
        ((state, event),) = advance((state,))
        for on_step in listeners:
            if on_step is not None:
                on_step(event.number, event.step, *event.whole_samples)
    nfe = sum(state.passes) / len(state.samples)
    return Samples(state.tokens.to(state.context.layout.device), nfe, state.head_rows)


def diffusion_context(
    denoiser: Denoiser,
    prior: Prior,
    steps: Iterable[Step],
    layout: SampleLayout,
    sampler: Sampler,
    graph: bool | None = None,
    cached: bool = False,
) -> SamplingContext:
    """What `sample` takes, checked; of the sampler all but its plan.

    cached: each window has a `Cached` of its own.
    """
    steps = _plan_of(steps)
    predictor: Any = sampler.predictor
    predictor = PREDICTORS.get(predictor, predictor)
    if not isinstance(prior, Prior):
        raise ValueError(f"prior must be a Prior such as Uniform(K), got {prior!r}")
    _check_layout(denoiser, prior, layout)
    sampler.check(prior, layout.labels is not None)
    for step in steps:
        _check_step(prior, predictor, step)
    needs = {
        "predictor 'markov' or 'maximal'": predictor in PREDICTORS.values(),
        "no rule that remembers": not any(callable(step.kappa) for step in steps),
        "no corrector": sampler.corrector is None,
        "no guidance": sampler.guidance is None,
        "head='lazy'": sampler.head == "lazy",
        "no micro_batch": sampler.micro_batch is None,
        "nucleus='keep' and no processor of one's own": sampler.chain().values is not None,
        "no cache": not cached and find_cache(denoiser) is None,
        "a GPU": layout.device.type == "cuda",
    }
    graphs = None
    if use_graphs(graph, denoiser, needs):
        source = LazyLogits(denoiser, prior)
        graphs = CudaGraphStepper(source, layout.device, layout.watched)

    def open_source() -> LazyLogits:
        wrapped = Cached(denoiser) if cached else denoiser
        return LazyLogits(wrapped, prior, sampler.micro_batch, sampler.head == "dense")

    return SamplingContext(
        layout,
        prior,
        steps,
        open_source,
        sampler.chain(),
        predictor,
        sampler.guidance,
        sampler.corrector,
        graphs=graphs,
    )


def use_graphs(graph: bool | None, denoiser: Any, needs: dict[str, bool]) -> bool:
    """Whether steps are replayed as CUDA graphs.

    None: if all needs are there, and the denoiser's traits say (`recordable`) that its pass is
    work on tensors of the GPU and nothing else.
    """
    lack = next((need for need, there in needs.items() if not there), None)
    if graph and lack is not None:
        raise ValueError(f"graph=True needs {lack}")
    return lack is None and (traits(denoiser).recordable if graph is None else graph)


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


def _check_layout(denoiser: Any, prior: Prior, layout: SampleLayout) -> None:
    """Labels are classes, and given tokens ids of the prior's tokens but the mask."""
    if layout.labels is not None:
        check_integers("labels", layout.labels)
        check_shape("labels", layout.labels, (layout.num_samples,))
        check_classes(denoiser, layout.labels)
    if layout.given is not None:
        given = as_ids("given", layout.given[layout.given != FREE], prior.vocab_size)
        if prior.mask_id is not None and bool((given == prior.mask_id).any()):
            raise ValueError(
                f"given holds the mask id {prior.mask_id}; mark free positions with -1"
            )


def _check_step(prior: Prior, predictor: Any, step: Step) -> None:
    """kappa is in [0, 1], for masks as low as ReMDM's largest sigma allows."""
    if not isinstance(predictor, Confident):
        check_affine(predictor, step)
    elif step.kappa != 1:
        raise ValueError("predictor 'confident' renoises by itself: plan it with kappa = 1")
    if callable(step.kappa):
        return
    least = 0.0
    if isinstance(prior, Masked):
        most = max_remasking(step.alpha_s, step.alpha_t)
        least = min(from_remasking(most, step.alpha_s, clipped=False), 0.0)
    if not least - 1e-12 <= step.kappa <= 1:
        raise ValueError(f"kappa must be in [0, 1], got {step.kappa:g} at t={step.t:g}")

"""The schedulers of diffusers as step functions: what `psidiff verify` says of them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..data.toy import Joint
from ..evaluation.exact_distribution import StepFunction
from ..evaluation.verify import CheckResult, StepPlan, check_sampler
from ..process import LogLinear, Masked, Prior, Uniform, to_plain
from ..sampling import Constant, Step, plan
from ..types import Level, Probs, Tokens
from .diffusers import PsiScheduler

_SAMPLES = 16_000


def scheduler_findings(rule: str = "cap:.05") -> Iterator[CheckResult]:
    """Of PsiScheduler by this rule, and of diffusers' own ancestral scheduler."""
    joint = Joint.random()
    uniform, masked = Uniform(joint.num_tokens), Masked(joint.num_tokens + 1, joint.num_tokens)
    yield check_sampler(joint, uniform, ddim_walk, "DiscreteDDIM", "ancestral", _SAMPLES)
    for prior, posterior in ((uniform, "plugin"), (uniform, "marginal"), (masked, "plugin")):
        walk = psi_walk(prior, kappa=rule, posterior=posterior)
        yield check_sampler(joint, prior, walk, f"Psi {posterior}", rule, _SAMPLES)


def psi_walk(prior: Prior, **config: Any) -> StepPlan:
    """PsiScheduler on the plan it makes, told that the toys' denoisers leave one out."""

    def walk(num_steps: int) -> tuple[StepFunction, tuple[Step, ...]]:
        scheduler = PsiScheduler(num_steps, predicts="loo", temperature=1.0, **config)
        steps, generator = scheduler.plan_for(prior), torch.Generator().manual_seed(0)

        def step(
            prior: Prior, z: Tokens, x: Probs, alpha_s: Level, alpha_t: Level, kappa: float
        ) -> Tensor:
            index = _nearest(steps, Step(0.0, float(alpha_t), float(alpha_s), kappa))
            return scheduler.step(
                x.log(), index, z, mask_token_id=prior.mask_id, generator=generator
            ).prev_sample

        return step, steps

    return walk


def ddim_walk(num_steps: int) -> tuple[StepFunction, tuple[Step, ...]]:
    """DiscreteDDIMScheduler on its own grid. It draws x_0 from p(x_l | z), so that it gets."""
    kind = import_module("diffusers").DiscreteDDIMScheduler
    scheduler = kind(num_inference_steps=num_steps)
    times = [1 - i / num_steps for i in range(num_steps)]
    steps = plan(None, LogLinear(eps=0.0), Constant(1.0), times)
    generator = torch.Generator().manual_seed(0)

    def step(
        prior: Prior, z: Tokens, x: Probs, alpha_s: Level, alpha_t: Level, kappa: float
    ) -> Tensor:
        index = _nearest(steps, Step(0.0, float(alpha_t), float(alpha_s), kappa))
        logits = to_plain(prior, z, x.log(), steps[index].alpha_t)
        made = scheduler.step(logits, index, z, temperature=1.0, generator=generator)
        return made.prev_sample

    return step, steps


def _nearest(steps: tuple[Step, ...], asked: Step) -> int:
    """The number of the step that goes between these levels."""

    def distance(i: int) -> float:
        names = ("alpha_t", "alpha_s", "kappa")
        return sum(abs(getattr(steps[i], name) - getattr(asked, name)) for name in names)

    return min(range(len(steps)), key=distance)

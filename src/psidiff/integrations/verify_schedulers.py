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
        scheduler = PsiScheduler(num_steps, predicts="loo", **config)
        return _step_function(scheduler, scheduler.plan_for(prior))

    return walk


def ddim_walk(num_steps: int) -> tuple[StepFunction, tuple[Step, ...]]:
    """DiscreteDDIMScheduler on its own grid. It draws x_0 from p(x_l | z), so that it gets."""
    scheduler = import_module("diffusers").DiscreteDDIMScheduler(num_inference_steps=num_steps)
    times = [1 - i / num_steps for i in range(num_steps)]
    steps = plan(None, LogLinear(eps=0.0), Constant(1.0), times)
    return _step_function(scheduler, steps, plain=True)


def _step_function(
    scheduler: Any, steps: tuple[Step, ...], plain: bool = False
) -> tuple[StepFunction, tuple[Step, ...]]:
    """The scheduler's step as a function of levels. plain: it takes logits of p(x_l | z)."""
    generator = torch.Generator().manual_seed(0)
    each: list[Any] = [(step.alpha_s, step.alpha_t, step.kappa) for step in steps]
    numbers = torch.tensor(each, dtype=torch.float64)

    def step(
        prior: Prior, z: Tokens, x: Probs, alpha_s: Level, alpha_t: Level, kappa: float
    ) -> Tensor:
        wanted = torch.tensor([float(alpha_s), float(alpha_t), kappa], dtype=torch.float64)
        index = int((numbers - wanted).abs().sum(-1).argmin())
        logits = to_plain(prior, z, x.log(), steps[index].alpha_t) if plain else x.log()
        masks = {} if prior.mask_id is None else {"mask_token_id": prior.mask_id}
        options = {"temperature": 1.0, "generator": generator, **masks}
        return scheduler.step(logits, index, z, **options).prev_sample

    return step, steps

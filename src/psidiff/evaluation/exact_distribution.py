"""The exact output distribution of a sampler: a vector over all K^L sequences, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.toy import Joint
from ..process.posterior import Mixture, Predictor, markov, psi
from ..process.prior import Prior
from ..sampling.plan import Step
from ..types import Level, Probs, Tokens, as_ids, check_shape

StepFunction = Callable[[Prior, Tokens, Probs, Level, Level, float], Mixture | Tensor]
"""(prior, z, x, alpha_s, alpha_t, kappa) -> a Mixture, probabilities (B, L, K) or draws (B, L).

x is x_theta at z. What it returns says how it is checked: exactly, or by drawing.
"""


def psi_function(predictor: Predictor = markov) -> StepFunction:
    """Our own step as a StepFunction."""
    return partial(psi, predictor=predictor)


def step_probs(
    step: StepFunction, prior: Prior, z: Tokens, x: Probs, at: Step, draws: int = 0
) -> Probs:
    """The distribution over z_s that a step function defines, or that `draws` repeats show."""
    if draws:
        drawn = run_step(step, prior, z.repeat(draws, 1), x.repeat(draws, 1, 1), at)
        counts = F.one_hot(drawn, prior.vocab_size).double()
        return counts.view(draws, *z.shape, prior.vocab_size).mean(0)
    return run_step(step, prior, z, x, at)


def run_step(step: StepFunction, prior: Prior, z: Tokens, x: Probs, at: Step) -> Tensor:
    """Call a step function: its probabilities in float64, or its tokens, checked."""
    result = step(prior, z, x, at.alpha_s, at.alpha_t, kappa_of(at))
    if isinstance(result, Mixture):
        return result.probs(prior, z, x)
    if not isinstance(result, Tensor):
        kind = type(result).__name__
        raise ValueError(f"a step returns a Mixture, probabilities or tokens, not {kind}")
    if not result.is_floating_point():
        check_shape("the tokens of a step", result, tuple(z.shape))
        return as_ids("the tokens of a step", result, prior.vocab_size)
    check_shape("the probabilities of a step", result, (*z.shape, prior.vocab_size))
    return result.double()


def kappa_of(at: Step) -> float:
    if callable(at.kappa):
        raise ValueError("a rule with memory has no distribution over z alone: sample it")
    return at.kappa


def answer_dtype(step: StepFunction, prior: Prior) -> torch.dtype:
    """A float type if a step returns probabilities (in that precision), else an integer one."""
    real = next(i for i in range(prior.vocab_size) if i != prior.mask_id)
    z = torch.tensor([[real]])
    x = F.one_hot(z, prior.vocab_size).double()
    run_step(step, prior, z, x, Step(0.5, 0.5, 0.6))
    result = step(prior, z, x, 0.6, 0.5, 1.0)
    return torch.float64 if isinstance(result, Mixture) else result.dtype


def simulated_distribution(
    joint: Joint, prior: Prior, steps: Iterable[Step], step: StepFunction, samples: int
) -> Tensor:
    """The output distribution of a step function that draws, estimated from `samples` runs."""
    z = prior.sample((samples, joint.length), torch.Generator().manual_seed(0))
    denoiser = Tabulated(joint, prior)
    for at in steps:
        z = run_step(step, prior, z, denoiser(z, at.alpha_t).exp(), at)
    return frequencies(z, prior.vocab_size)


def every_state(vocab_size: int, length: int) -> Tokens:
    """All K^L sequences, the last position running fastest."""
    return torch.cartesian_prod(*[torch.arange(vocab_size)] * length).view(-1, length)


@dataclass(frozen=True)
class Tabulated:
    """A toy's denoiser looked up in a table over all states: many sequences, few states."""

    joint: Joint
    prior: Prior

    def __call__(self, z: Tokens, alpha: Level, labels: Tensor | None = None) -> Probs:
        states = every_state(self.prior.vocab_size, self.joint.length)
        table = self.joint.denoiser(self.prior)(states, alpha)
        return table[state_number(z, self.prior.vocab_size)]


def state_number(z: Tokens, vocab_size: int) -> Tensor:
    """Where a sequence stands in `every_state`."""
    return z @ vocab_size ** torch.arange(z.shape[1] - 1, -1, -1)


def frequencies(z: Tokens, vocab_size: int) -> Tensor:
    """How often each state occurs among sequences, as a distribution."""
    numbers = state_number(z, vocab_size)
    return torch.bincount(numbers, minlength=vocab_size ** z.shape[1]) / len(z)


def data_distribution(joint: Joint, prior: Prior) -> Tensor:
    """The data as a vector over all states of the prior's vocabulary."""
    probs = torch.zeros(prior.vocab_size**joint.length, dtype=torch.float64)
    return probs.index_add(0, state_number(joint.sequences, prior.vocab_size), joint.weights)


def conditional_distribution(joint: Joint, prior: Prior, given: Tensor) -> Tensor:
    """The data given some of its tokens; `given` (L,) holds -1 where free."""
    states = every_state(prior.vocab_size, joint.length)
    agrees = ((states == given) | (given < 0)).all(-1)
    probs = data_distribution(joint, prior) * agrees
    return probs / probs.sum()


def sampler_distribution(
    joint: Joint,
    prior: Prior,
    steps: Iterable[Step],
    step: StepFunction | None = None,
    given: Tensor | None = None,
) -> Tensor:
    """The distribution of the sampler's output, exactly."""
    function, denoiser = step or psi_function(), joint.denoiser(prior)
    known = torch.zeros(joint.length, dtype=torch.bool) if given is None else given >= 0

    def probs_at(at: Step, states: Tokens) -> Probs:
        level = known[:, None].double().clamp(min=at.alpha_t)[None]  # 1 where known
        probs = step_probs(function, prior, states, denoiser(states, level).exp(), at)
        stay = F.one_hot(states, prior.vocab_size).to(probs)
        return torch.where(known[:, None], stay, probs)

    return propagate(prior, joint.length, steps, probs_at, given)


def propagate(
    prior: Prior,
    length: int,
    steps: Iterable[Step],
    probs_at: Callable[[Step, Tokens], Probs],
    given: Tensor | None = None,
) -> Tensor:
    """The distribution over states after the steps; probs_at(step, states) is that of z_s.

    It starts from the prior, and never leaves the states that agree with `given` (L,).
    """
    states = every_state(prior.vocab_size, length)
    given = torch.full((length,), -1) if given is None else given
    reached = ((states == given) | (given < 0)).all(-1)
    inside, pi = states[reached], prior.probs(like=torch.zeros((), dtype=torch.float64))
    probs = pi[inside].masked_fill(given >= 0, 1).prod(-1)
    for at in steps:
        probs = probs @ transition(probs_at(at, inside), inside)
    return torch.zeros(len(states), dtype=torch.float64).masked_scatter(reached, probs)


def transition(probs: Probs, states: Tokens) -> Tensor:
    """The chance (S, S) of each state to become each: positions move independently."""
    moves = torch.ones(len(states), len(states), dtype=probs.dtype)
    for here, tokens in zip(probs.unbind(1), states.unbind(1), strict=True):
        moves *= here[:, tokens]
    return moves


def total_variation(p: Tensor, q: Tensor) -> float:
    return (p - q).abs().sum().item() / 2

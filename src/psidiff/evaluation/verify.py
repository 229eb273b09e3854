"""Is a sampler exact? Checks on a toy whose every probability is known.

`verify()` takes our own steps or anyone's: see `exact_distribution.StepFunction`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..data.toy import Joint
from ..process.posterior import PREDICTORS, marginal
from ..process.prior import Prior, prior_over
from ..process.schedule import LogLinear
from ..sampling.kappa import Kappa, parse_kappa
from ..sampling.loop import sample
from ..sampling.plan import Step, plan
from .exact_distribution import (
    StepFunction,
    Tabulated,
    answer_dtype,
    conditional_distribution,
    data_distribution,
    every_state,
    frequencies,
    psi_function,
    sampler_distribution,
    simulated_distribution,
    step_probs,
    total_variation,
)

STEPS = (8, 16, 32, 64)
RULES = (
    "ancestral",
    "constant:.5@.1-.9",
    "cap:.05",
    "rescale:.1",
    "rescale-released:.3",
    "loop:.02",
    "fb",
    "dfm",
    "confidence:1",
)
PRIORS = ("masked", "uniform", "mixed:uniform=.3", "unigram")
_SCHEDULE = LogLinear(eps=1e-6)  # starts so close to the prior that only the steps err
_DRAWS = 20_000
_SAMPLES = 40_000


@dataclass(frozen=True)
class CheckResult:
    """The result of checking one sampler on one prior.

    marginal_error: the largest |sum_z q_t(z|x) Psi(.|z,x) - q_s(.|x)|, over clean tokens and
    steps. distances: total variation to the data at 8, 16, 32, 64 steps. Revision rates: the
    mean chance a step that a correct, or a planted wrong, token changes (32 steps).
    """

    prior: str
    predictor: str
    rule: str
    marginal_error: float | None
    tolerance: float
    distances: tuple[float, ...]
    revised_if_correct: float | None
    revised_if_wrong: float | None

    @property
    def keeps_marginals(self) -> bool | None:
        """Whether the marginals are the forward process's; None: they were not computed."""
        if self.marginal_error is None:
            return None
        finite = all(map(math.isfinite, self.distances))
        return finite and self.marginal_error <= self.tolerance

    @property
    def converges(self) -> bool:
        """Whether more steps come clearly closer to the data."""
        return converges(self.distances)


def converges(distances: Sequence[float]) -> bool:
    """From 8 to 64 steps the distance falls by a quarter at least, or to less than .01."""
    return distances[-1] < max(0.75 * distances[0], 0.01)


def toy_priors(num_tokens: int, words: Sequence[str] = PRIORS) -> tuple[Prior, ...]:
    """Priors over a toy's tokens; one of each kind, if nobody names others."""
    counts = [1.0 + (3 * i) % 5 for i in range(num_tokens)]
    return tuple(prior_over(each, num_tokens, counts=counts) for each in words)


def verify(
    step: StepFunction | None = None,
    rules: Sequence[str | Kappa] = RULES,
    joint: Joint | None = None,
    name: str = "yours",
    priors: Sequence[str] = PRIORS,
) -> Iterator[CheckResult]:
    """Check samplers on a toy: for every prior, predictor and kappa rule.

    Args:
        step: a step function of the user's (`exact_distribution.StepFunction`); None: our own,
            with each predictor.
        rules: kappa rules, as strings or values.
        joint: the toy, whose every probability is known; None: a random one.
        name: of `step` in the results.
    Yields:
        A `CheckResult` for each.
    Example:
        >>> next(verify(rules=["ancestral"])).keeps_marginals
        True
    """
    joint = joint or Joint.random()
    named = [(str(r), parse_kappa(r) if isinstance(r, str) else r) for r in rules]
    steps = {name: step} if step else {k: psi_function(p) for k, p in PREDICTORS.items()}
    for prior in toy_priors(joint.num_tokens, priors):
        for predictor, function in steps.items():
            for text, rule in named:
                by_memory = callable(rule(0.5, 0.6, 0.5))
                if not by_memory:
                    yield check_sampler(joint, prior, _walk(function, rule), predictor, text)
                elif step is None and predictor == "markov":
                    yield _by_sampling(joint, prior, rule, text)


def verify_given(
    joint: Joint | None = None, priors: Sequence[str] = PRIORS
) -> Iterator[tuple[str, tuple[float, ...]]]:
    """For each prior the distance, at 8 to 64 steps, to the data given its first token."""
    joint = joint or Joint.random()
    given = torch.full((joint.length,), -1)
    given[0] = 1
    for prior in toy_priors(joint.num_tokens, priors):
        target = conditional_distribution(joint, prior, given)
        plans = [plan(n, _SCHEDULE, parse_kappa("ancestral")) for n in STEPS]
        found = [sampler_distribution(joint, prior, steps, given=given) for steps in plans]
        yield type(prior).__name__, tuple(total_variation(each, target) for each in found)


StepPlan = Callable[[int], tuple[StepFunction, tuple[Step, ...]]]
"""A number of steps -> a step function, and the plan that it follows."""


def _walk(function: StepFunction, rule: Kappa) -> StepPlan:
    """Our plan, with any step."""
    return lambda num_steps: (function, plan(num_steps, _SCHEDULE, rule))


def check_sampler(
    joint: Joint, prior: Prior, walk: StepPlan, name: str, rule: str, samples: int = _SAMPLES
) -> CheckResult:
    """One step function on one prior, on its own plans. Distances of one that draws are from
    so many samples."""
    (function, coarse), target = walk(8), data_distribution(joint, prior)
    dtype = answer_dtype(function, prior)
    draws = 0 if dtype.is_floating_point else _DRAWS
    errors = [marginal_error(prior, at, function, draws) for at in coarse]
    fine_function, fine = walk(32)
    correct, wrong = revision_rates(joint, prior, fine, fine_function, draws // 100)

    def distance(num_steps: int) -> float:
        step, steps = walk(num_steps)
        found = (
            simulated_distribution(joint, prior, steps, step, samples)
            if draws
            else sampler_distribution(joint, prior, steps, step)
        )
        return total_variation(found, target)

    return CheckResult(
        type(prior).__name__,
        name,
        rule,
        torch.tensor(errors).max().item(),  # unlike Python's max, it lets no NaN pass
        5 * (0.25 / draws) ** 0.5 if draws else max(1e-12, 100 * torch.finfo(dtype).eps),
        tuple(distance(n) for n in STEPS),
        correct,
        wrong,
    )


def _by_sampling(joint: Joint, prior: Prior, rule: Kappa, text: str) -> CheckResult:
    """A rule with memory has no distribution over z alone; its distance is estimated."""
    target = data_distribution(joint, prior)
    distances = []
    for n in STEPS:
        generator = torch.Generator().manual_seed(n)
        steps, shape = plan(n, _SCHEDULE, rule), (_SAMPLES, joint.length)
        tokens = sample(Tabulated(joint, prior), prior, steps, shape, generator).tokens
        distances.append(total_variation(frequencies(tokens, prior.vocab_size), target))
    return CheckResult(
        type(prior).__name__, "markov", text, None, 0, tuple(distances), None, None
    )


def marginal_error(prior: Prior, at: Step, step: StepFunction, draws: int = 0) -> float:
    """max |sum_z q_t(z|x) Psi_{s|t}(.|z, x) - q_s(.|x)| over the clean tokens x."""
    K = prior.vocab_size
    real = [i for i in range(K) if i != prior.mask_id]
    z = torch.arange(K)[None].expand(len(real), K)
    x = F.one_hot(torch.tensor(real), K).double()
    q_t, q_s = (marginal(prior, x[:, None], a)[:, 0] for a in (at.alpha_t, at.alpha_s))
    probs = step_probs(step, prior, z, x[:, None].expand(-1, K, -1), at, draws)
    possible = (q_t > 0)[..., None]  # a step need not answer for what cannot happen
    arrived = torch.where(possible, q_t[..., None] * probs, 0).sum(1)
    return (arrived - q_s).abs().max().item()


def revision_rates(
    joint: Joint, prior: Prior, steps: Sequence[Step], step: StepFunction, draws: int = 0
) -> tuple[float, float]:
    """How often a step changes a token that is right, and one that was made wrong.

    x ~ data; all positions but one are noised to t; the one holds x, or another real token.
    """
    states = every_state(prior.vocab_size, joint.length)
    denoiser = joint.denoiser(prior)
    one_hot = F.one_hot(joint.sequences, prior.vocab_size).double()
    real = torch.tensor([i != prior.mask_id for i in range(prior.vocab_size)])
    right_sum = wrong_sum = 0.0
    for at in steps:
        x = denoiser(states, at.alpha_t).exp()
        probs = step_probs(step, prior, states, x, at, draws)
        changes = 1 - probs.gather(-1, states[..., None])[..., 0]  # (S, L)
        place = torch.arange(joint.length)
        q = marginal(prior, one_hot, at.alpha_t)[:, place, states]  # (N, S, L)
        for here in range(joint.length):
            weight = joint.weights[:, None] * q[..., place != here].prod(-1)
            same = states[:, here] == joint.sequences[:, here, None]
            planted = ~same & real[states[:, here]]
            right_sum += (weight * same * changes[:, here]).sum().item()
            wrong_sum += (weight * planted * changes[:, here]).sum().item() / (
                int(real.sum()) - 1
            )
    count = len(steps) * joint.length
    return right_sum / count, wrong_sum / count

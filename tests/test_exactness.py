"""The engine against the dense reference: in law by a million draws, and token by token."""

import functools
import math

import pytest
import torch
from scipy.stats import chi2, poisson
from toys import IDS, chi_square, generator

from psidiff.data.toy import Joint, perturbed
from psidiff.evaluation.law import every_state, propagate, state_number
from psidiff.evaluation.verify import toy_priors
from psidiff.process import LogLinear
from psidiff.sampling import (
    Guidance,
    Ramp,
    Step,
    parse_kappa,
    plan,
    sample,
)
from psidiff.sampling.reference import dense_probs

K, L = 4, 2
PRIORS = toy_priors(K)
UNIFORM = PRIORS[1]
RULES = (
    "ancestral",
    "constant:.5@.1-.8",
    "cap:.1",
    "rescale:.3",
    "rescale-released:.6",
    "loop:.05",
    "fb",
    "dfm",
)
MILLION = 1_000_000
each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)


def steps_of(rule="cap:.1", num_steps=8, last="sample"):
    return plan(num_steps, LogLinear(), parse_kappa(rule), last=last)


class Labelled:
    """The toy of each of two classes, and of both together where there is no label."""

    def __init__(self, prior, num_tokens=K, length=L):
        classes = [Joint.random(num_tokens, length, seed) for seed in (1, 2)]
        ids, both = classes[0].sequences, sum(each.weights for each in classes) / 2
        self.denoisers = [each.denoiser(prior) for each in classes]
        self.unconditional = Joint(ids, both, num_tokens).denoiser(prior)

    def __call__(self, z, alpha, labels=None):
        if labels is None:
            return self.unconditional(z, alpha)
        each = torch.stack([denoiser(z, alpha) for denoiser in self.denoisers])
        return each[labels, torch.arange(len(z))]


class Table:
    """A toy's denoiser read off a table of all states, where all levels of a batch are equal."""

    def __init__(self, denoiser, prior, length=L, dtype=torch.float64):
        self.denoiser, self.dtype, self.size = denoiser, dtype, prior.vocab_size
        self.states = every_state(prior.vocab_size, length)

    def __call__(self, z, alpha, labels=None):
        level = alpha[:1] if isinstance(alpha, torch.Tensor) else alpha
        number = state_number(z, self.size)
        if labels is None:
            return self.denoiser(self.states, level).to(self.dtype)[number]
        classes = torch.arange(2)[:, None].expand(2, len(self.states))
        tables = torch.stack([self.denoiser(self.states, level, y) for y in classes])
        return tables.to(self.dtype)[labels, number]


def imperfect(prior, length=L):
    """It errs as a network does, and so the law hangs on everything that a step does."""
    return perturbed(Labelled(prior, length=length), 1.0)


def law(prior, steps, length=L, label=None, given=None, **options):
    """The exact law of the dense sampler over all states."""
    denoiser = imperfect(prior, length)

    def probs_at(step, states):
        labels = None if label is None else torch.full((len(states),), label)
        fixed = None if given is None else given.expand(len(states), -1)
        options["labels"], options["given"] = labels, fixed
        return dense_probs(denoiser, prior, step, states, **options)

    return propagate(prior, length, steps, probs_at, given)


def counts(prior, steps, length=L, label=None, given=None, draws=MILLION, **options):
    """How often the engine ends in each state. The batches are parts of one large one."""
    dtype, size = options.pop("dtype", torch.float64), 50_000
    denoiser = Table(imperfect(prior, length), prior, length, dtype)
    options["labels"] = None if label is None else torch.full((size,), label)
    options["given"] = None if given is None else given.expand(size, -1)
    total = torch.zeros(prior.vocab_size**length, dtype=torch.int64)
    for first in range(0, draws, size):
        shape, g = (size, length), generator(5)
        made = sample(denoiser, prior, steps, shape, g, first_index=first, **options).tokens
        total += torch.bincount(state_number(made, prior.vocab_size), minlength=len(total))
    return total


def agree(counts, law):
    """Chi-square over the cells that hold 20 draws and Poisson for the rest, at 1e-6."""
    expected = law * counts.sum()
    large = expected >= 20
    freedom = max(int(large.sum()) - 1, 1)
    statistic = freedom + chi_square(counts[large], law[large]) * math.sqrt(2 * freedom)
    rare = poisson.sf(counts[~large].sum().item() - 1, expected[~large].sum().item())
    return chi2.sf(statistic, freedom) > 1e-6 and rare > 1e-6


def guided(weight, on, label=1):
    return {"guidance": Guidance(weight, on), "label": label}


SETTINGS = {
    **{f"prior {name}": (p, "cap:.1", {}) for name, p in zip(IDS, PRIORS, strict=True)},
    **{f"kappa {rule}": (UNIFORM, rule, {}) for rule in RULES if rule != "cap:.1"},
    **{
        name: (UNIFORM, "cap:.1", options)
        for name, options in {
            "maximal": {"predictor": "maximal"},
            "top-p .6": {"top_p": 0.6},
            "top-p .6 drop": {"top_p": 0.6, "nucleus": "drop"},
            "top-p .9": {"top_p": 0.9},
            "top-p .9 drop": {"top_p": 0.9, "nucleus": "drop"},
            "min-p .3": {"min_p": 0.3},
            "top-k 2": {"top_k": 2},
            "temperature .5": {"temperature": 0.5},
            "temperature 1.5": {"temperature": 1.5},
            "guided 0": guided(0.0, "x"),
            "guided 1": guided(1.0, "x"),
            "guided 2": guided(2.0, "x"),
            "guided ramp": guided(Ramp(3.0), "x", label=0),
            "guided posterior 0": guided(0.0, "posterior"),
            "guided posterior 1": guided(1.0, "posterior"),
            "guided posterior 2": guided(2.0, "posterior"),
            "guided posterior ramp": guided(Ramp(3.0), "posterior", label=0),
            "first given": {"given": torch.tensor([2, -1, -1]), "length": 3},
            "middle given": {"given": torch.tensor([-1, 1, -1]), "length": 3},
        }.items()
    },
}


@functools.cache
def drawn(setting):
    prior, rule, options = SETTINGS[setting]
    return counts(prior, steps_of(rule), **options)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_million_draws_have_the_law_of_the_reference(setting):
    prior, rule, options = SETTINGS[setting]
    assert agree(drawn(setting), law(prior, steps_of(rule), **options))


@pytest.mark.slow
def test_a_million_draws_of_a_float32_denoiser_have_it_too():
    made = counts(UNIFORM, steps_of(), dtype=torch.float32)
    assert agree(made, law(UNIFORM, steps_of()))


def with_kappa(more):
    """The base plan, its kappa a little larger wherever it is not 1."""
    return [
        Step(s.t, s.alpha_t, s.alpha_s, min(s.kappa + more, 1.0) if s.alpha_s < 1 else 1.0)
        for s in steps_of()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("prior Uniform", lambda: law(UNIFORM, with_kappa(0.05))),
        ("prior Uniform", lambda: law(UNIFORM, with_kappa(-0.05))),
        ("prior Uniform", lambda: law(UNIFORM, steps_of(), predictor="maximal")),
        ("prior Uniform", lambda: law(UNIFORM, steps_of(), temperature=0.98)),
        ("prior Uniform", lambda: law(UNIFORM, steps_of(), top_p=0.99)),
        ("top-p .9", lambda: law(UNIFORM, steps_of(), top_p=0.85)),
        ("top-p .9", lambda: law(UNIFORM, steps_of(), top_p=0.9, nucleus="drop")),
        ("min-p .3", lambda: law(UNIFORM, steps_of(), min_p=0.33)),
        ("guided 2", lambda: law(UNIFORM, steps_of(), **guided(1.95, "x"))),
        ("guided posterior 2", lambda: law(UNIFORM, steps_of(), **guided(2.0, "x"))),
        ("guided posterior 2", lambda: law(UNIFORM, steps_of(), **guided(1.95, "posterior"))),
    ],
    ids=[
        "kappa + .05",
        "kappa - .05",
        "another predictor",
        "temperature .98",
        "top-p .99",
        "top-p .85 for .9",
        "drop for keep",
        "min-p .33 for .3",
        "weight 1.95 for 2",
        "x for posterior",
        "weight 1.95 for 2 on posteriors",
    ],
)
def test_a_million_draws_tell_a_law_that_is_a_little_wrong(setting, wrong):
    assert not agree(drawn(setting), wrong())

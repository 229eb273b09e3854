"""The engine against the dense reference: in law by a million draws, and token by token."""

import functools
import itertools
import math

import pytest
import torch
from dense_reference import dense_probs, dense_sample
from scipy.stats import chi2, poisson
from torch import nn
from toys import IDS, chi_square, generator

import psidiff
from psidiff.data.toy import Chain, Joint, perturbed
from psidiff.evaluation.exact_distribution import (
    every_state,
    propagate,
    state_number,
    total_variation,
    transition,
)
from psidiff.evaluation.verify import toy_priors
from psidiff.models import Parameterized, Transformer
from psidiff.process import LogLinear, Uniform
from psidiff.sampling import (
    Constant,
    Corrector,
    Guidance,
    Ramp,
    Step,
    logit_sources,
    parse_kappa,
    plan,
    sample,
)

K, L = 4, 2
PRIORS = toy_priors(K)
UNIFORM = PRIORS[1]
BASE = "cap:.1"
RULES = (
    "ancestral",
    "constant:.5@.1-.8",
    BASE,
    "rescale:.3",
    "rescale-released:.6",
    "loop:.05",
    "fb",
    "dfm",
)
MILLION = 1_000_000
each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)


def steps_of(rule=BASE, num_steps=8, last="sample"):
    return plan(num_steps, LogLinear(), parse_kappa(rule), last=last)


class Labelled:
    """The toy of each of two classes, and of both together where there is no label."""

    def __init__(self, prior, length=L):
        classes = [Joint.random(K, length, seed) for seed in (1, 2)]
        both = sum(each.weights for each in classes) / 2
        self.denoisers = [each.denoiser(prior) for each in classes]
        self.unconditional = Joint(classes[0].sequences, both, K).denoiser(prior)

    def __call__(self, z, alpha, labels=None):
        if labels is None:
            return self.unconditional(z, alpha)
        each = torch.stack([denoiser(z, alpha) for denoiser in self.denoisers])
        return each[labels, torch.arange(len(z))]


def imperfect(prior, length=L):
    """It errs as a network does, so that the law hangs on everything a step does."""
    return perturbed(Labelled(prior, length), 1.0)


class Table:
    """A toy read off a table of all states, where all sequences have the same levels."""

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


def laws(prior, steps, length=L, label=None, given=None, **options):
    """Exactly: the law of the output, and of the states before and after each later step."""
    denoiser, states = imperfect(prior, length), every_state(prior.vocab_size, length)

    def probs_at(step, states):
        options["labels"] = None if label is None else torch.full((len(states),), label)
        options["given"] = None if given is None else given.expand(len(states), -1)
        return dense_probs(denoiser, prior, step, states, **options)

    before = [
        propagate(prior, length, steps[:i], probs_at, given) for i in range(1, len(steps))
    ]
    moves = [transition(probs_at(step, states), states) for step in steps[1:]]
    pairs = [law[:, None] * move for law, move in zip(before, moves, strict=True)]
    return [pairs[-1].sum(0), *(pair.flatten() for pair in pairs)]


def counts(prior, steps, length=L, label=None, given=None, draws=MILLION, **options):
    """How often the engine does what `laws` are of. The batches are parts of one large one."""
    dtype, size, states = options.pop("dtype", torch.float64), 25_000, prior.vocab_size**length
    denoiser = Table(imperfect(prior, length), prior, length, dtype)
    options["labels"] = None if label is None else torch.full((size,), label)
    options["given"] = None if given is None else given.expand(size, -1)
    pairs = torch.zeros(len(steps), states * states, dtype=torch.int64)
    seen = [torch.zeros(size, dtype=torch.int64)]

    def count(i, step, z, route):
        number = state_number(z, prior.vocab_size)
        both = seen.pop() * states + number
        pairs[i] += torch.bincount(both, minlength=states * states)
        seen.append(number)

    for first in range(0, draws, size):
        place = {"first_index": first, "on_step": count}
        sample(denoiser, prior, steps, (size, length), generator(5), **place, **options)
    return [pairs[-1].view(states, states).sum(0), *pairs[1:]]


def agrees(counts, law, chance):
    """Chi-square over the cells that expect 20 draws, and Poisson for the rest together."""
    expected = law * counts.sum()
    large = expected >= 20
    freedom = max(int(large.sum()) - 1, 1)
    statistic = freedom + chi_square(counts[large], law[large]) * math.sqrt(2 * freedom)
    rare = poisson.sf(counts[~large].sum().item() - 1, expected[~large].sum().item())
    return chi2.sf(statistic, freedom) > chance and rare > chance


def agree(counts, laws):
    """All of them do; if it is true, this fails once in a million."""
    chance = 1e-6 / len(laws) / 2
    return all(agrees(c, law, chance) for c, law in zip(counts, laws, strict=True))


def guided(weight, on="x", label=1):
    return {"guidance": Guidance(weight, on), "label": label}


BY_NAME = dict(zip(IDS, PRIORS, strict=True))
SETTINGS = {
    **{f"prior {name}": (prior, BASE, {}) for name, prior in BY_NAME.items()},
    **{f"kappa {rule}": (UNIFORM, rule, {}) for rule in RULES if rule != BASE},
    **{
        name: (UNIFORM, BASE, options)
        for name, options in {
            "maximal": {"predictor": "maximal"},
            "float32": {"dtype": torch.float32},
            "top-p .6": {"top_p": 0.6},
            "top-p .6 drop": {"top_p": 0.6, "nucleus": "drop"},
            "top-p .9": {"top_p": 0.9},
            "top-p .9 drop": {"top_p": 0.9, "nucleus": "drop"},
            "min-p .3": {"min_p": 0.3},
            "top-k 2": {"top_k": 2},
            "temperature .5": {"temperature": 0.5},
            "temperature 1.5": {"temperature": 1.5},
            "guided 2": guided(2.0),
            "guided ramp": guided(Ramp(3.0), label=0),
            "posterior 2": guided(2.0, "posterior"),
            "posterior ramp": guided(Ramp(3.0), "posterior", label=0),
            "given": {"given": torch.tensor([-1, 1, -1]), "length": 3},
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
    options = {name: value for name, value in options.items() if name != "dtype"}
    assert agree(drawn(setting), laws(prior, steps_of(rule), **options))


@pytest.mark.slow
@each_prior
def test_a_greedy_end_has_the_law_of_the_reference(prior):
    steps = steps_of(last="greedy")
    assert agree(counts(prior, steps, draws=200_000), laws(prior, steps))


def with_kappa(more):
    """The base plan, its kappa a little off."""

    def off(step):
        kappa = min(max(step.kappa + more, 0.0), 1.0)
        return Step(step.t, step.alpha_t, step.alpha_s, kappa)

    return [off(step) for step in steps_of()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "steps", "options"),
    [
        ("prior Uniform", with_kappa(0.05), {}),
        ("prior Uniform", with_kappa(-0.05), {}),
        ("prior Uniform", steps_of(num_steps=9)[1:], {}),
        ("prior Uniform", steps_of(), {"predictor": "maximal"}),
        ("prior Uniform", steps_of(), {"temperature": 0.98}),
        ("top-p .9", steps_of(), {"top_p": 0.85}),
        ("top-p .9", steps_of(), {"top_p": 0.9, "nucleus": "drop"}),
        ("min-p .3", steps_of(), {"min_p": 0.33}),
        ("guided 2", steps_of(), guided(1.95)),
        ("posterior 2", steps_of(), guided(2.0)),
        ("posterior 2", steps_of(), guided(1.95, "posterior")),
    ],
    ids=[
        "kappa + .05",
        "kappa - .05",
        "other levels",
        "other predictor",
        "temperature .98 for 1",
        "top-p .85 for .9",
        "drop for keep",
        "min-p .33 for .3",
        "weight 1.95 for 2",
        "on x for on posteriors",
        "weight 1.95 for 2 on posteriors",
    ],
)
def test_a_million_draws_tell_a_law_that_is_a_little_wrong(setting, steps, options):
    assert not agree(drawn(setting), laws(UNIFORM, steps, **options))


@each_prior
@pytest.mark.parametrize("on", ["x", "posterior"])
def test_guidance_of_weight_one_or_none_is_no_guidance(prior, on):
    """Token by token in the engine, state by state in the reference."""
    steps, labels = steps_of()[4::4], torch.arange(200) % 2
    denoiser = Table(imperfect(prior), prior)
    run = functools.partial(sample, denoiser, prior, steps, (200, L))
    for weight, without in ((0.0, None), (1.0, labels)):
        made = run(generator(), labels=labels, guidance=Guidance(weight, on)).tokens
        assert (made == run(generator(), labels=without).tokens).all()
        ours = laws(prior, steps, **guided(weight, on))
        plain = laws(prior, steps, label=1 if weight else None)
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other, atol=1e-14, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [*(f"prior {name}" for name in IDS), "top-p .9 drop", "guided 2", "posterior 2", "maximal"],
)
def test_the_reference_draws_from_its_own_law(setting):
    prior, rule, options = SETTINGS[setting]
    steps, size = steps_of(rule), 50_000
    law = laws(prior, steps, **options)[0]
    options = dict(options)
    if (label := options.pop("label", None)) is not None:
        options["labels"] = torch.full((size,), label)
    denoiser = Table(imperfect(prior), prior)
    made = dense_sample(denoiser, prior, steps, (size, L), generator(), **options)
    number = state_number(made, prior.vocab_size)
    assert agree([torch.bincount(number, minlength=len(law))], [law])


def test_the_reference_says_what_it_cannot_do():
    z, step = torch.zeros(1, L, dtype=torch.int64), steps_of()[1]
    remembers = plan(4, LogLinear(), parse_kappa("confidence:1"))[1]
    with pytest.raises(ValueError, match="rule with memory"):
        dense_probs(imperfect(UNIFORM), UNIFORM, remembers, z)
    options = {"guidance": Guidance(2.0, "posterior"), "predictor": "maximal"}
    with pytest.raises(ValueError, match="needs predictor='markov'"):
        dense_probs(imperfect(UNIFORM), UNIFORM, step, z, **options)


# Token by token: what the tokens must not depend on.

TRUNCATIONS = ({}, {"temperature": 0.7, "top_p": 0.8, "nucleus": "drop", "min_p": 0.1})


def combinations(rows):
    """Every rule, predictor, truncation and guidance that go together, in two steps each."""
    labels = {"labels": torch.arange(rows) % 2}
    guidances = ({}, *({**labels, "guidance": Guidance(1.5, on)} for on in ("x", "posterior")))
    every = itertools.product(RULES, ("markov", "maximal", "confident"), TRUNCATIONS, guidances)
    for rule, predictor, truncation, guidance in every:
        on_posteriors = guidance and guidance["guidance"].on == "posterior"
        if (on_posteriors and predictor != "markov") or (
            predictor == "confident" and rule != "ancestral"
        ):
            continue
        steps = steps_of(rule)
        yield (steps[4], steps[-1]), {"predictor": predictor, **truncation, **guidance}


def random_table(prior, length):
    """A denoiser that depends on all it is told, in float64."""
    size = prior.vocab_size
    shape = (3, size**length, length, size)
    table = torch.randn(shape, generator=generator(), dtype=torch.float64)
    powers = size ** torch.arange(length)

    def denoiser(z, alpha, labels=None):
        return (1 + alpha) * table[2 if labels is None else labels, z @ powers]

    return denoiser


def random_network(prior):
    """A small transformer that was never trained, in float32."""
    net = Transformer(prior.vocab_size, 16, 1, 2, cond_dim=8, num_classes=2)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.4)
    return Parameterized(net, prior).eval()


@each_prior
@pytest.mark.parametrize("kind", [pytest.param("toy", marks=pytest.mark.slow), "transformer"])
def test_the_lazy_and_the_dense_head_give_the_same_tokens(prior, kind):
    shape, g = (32, 3), generator()
    denoiser = random_table(prior, 3) if kind == "toy" else random_network(prior)
    lazy_rows = dense_rows = 0
    first, every = (0, 1) if kind == "toy" else (PRIORS.index(prior), len(PRIORS))
    for steps, options in itertools.islice(combinations(32), first, None, every):
        options["micro_batch"] = 32  # a float32 network answers in one way at one shape
        state = g.get_state()
        lazy = sample(denoiser, prior, steps, shape, g, **options)
        dense = sample(
            denoiser, prior, steps, shape, g.set_state(state), head="dense", **options
        )
        assert (lazy.tokens == dense.tokens).all(), options
        lazy_rows, dense_rows = lazy_rows + lazy.head_rows, dense_rows + dense.head_rows
    assert lazy_rows < dense_rows


VARIANTS = {
    "plain": {},
    "given": {"given": True},
    "guided": {"guidance": Guidance(1.5)},
    "guided posterior": {"guidance": Guidance(Ramp(2.0), "posterior"), "top_p": 0.9},
    "corrected": {"corrector": Corrector(sweeps=2, size=2)},
    "corrected where unsure": {"corrector": Corrector(2, 2, "uncertain"), "given": True},
    "all": {"corrector": Corrector(), "guidance": Guidance(2.0), "given": True, "min_p": 0.1},
}


def variant(name, prior, tokens):
    """Options for all samples; some have nothing given, one has everything."""
    options = dict(VARIANTS[name])
    if options.get("corrector") and not (prior.probs(like=torch.zeros(())) > 0).all():
        del options["corrector"]  # it would have nothing to say of a mask
    if options.pop("given", False):
        share = torch.linspace(0, 1.1, len(tokens))[:, None]
        keep = torch.rand(tokens.shape, generator=generator(8)) < share
        options["given"] = torch.where(keep, tokens, -1)
    if "guidance" in options:
        options["labels"] = torch.arange(len(tokens)) % 2
    return options


def in_parts(size, count, run, options):
    """`count` samples in batches of `size`."""
    parts = []
    for first in range(0, count, size):
        part = slice(first, min(first + size, count))
        mine = {k: v[part] if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        parts.append(run(part.stop - first, generator(4), first_index=first, **mine).tokens)
    return torch.cat(parts)


@each_prior
@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_depend_neither_on_the_batch_nor_on_the_chunk(prior, name, monkeypatch):
    tokens = torch.randint(K, (16, 3), generator=generator(7))
    options, denoiser = variant(name, prior, tokens), random_table(prior, 3)
    steps = steps_of()[4::4]

    def run(count, g, **options):
        return sample(denoiser, prior, steps, (count, 3), g, **options)

    whole = in_parts(16, 16, run, options)
    assert (in_parts(3, 16, run, options) == whole).all()
    assert (in_parts(1, 16, run, options) == whole).all()
    for chunk in (1, 7 * prior.vocab_size):
        monkeypatch.setattr(logit_sources, "_CHUNK", {"cpu": chunk})
        assert (in_parts(16, 16, run, options) == whole).all()


@pytest.mark.parametrize(
    ("shipped", "name"),
    [
        *itertools.product(["digits", "shakespeare"], ["plain", "given", "corrected"]),
        ("digits", "guided"),
        ("digits", "all"),
    ],
)
def test_a_micro_batch_makes_a_shipped_network_repeat_itself(shipped, name):
    model = psidiff.load(shipped, device="cpu")
    prior, steps = model.prior, plan(4, model.schedule, Constant(0.5))
    tokens = prior.sample((5, model.config.length), generator(7))

    def run(count, g, **options):
        shape = (count, tokens.shape[1])
        return sample(model.denoiser, prior, steps, shape, g, micro_batch=2, **options)

    parts = [in_parts(size, 5, run, variant(name, prior, tokens)) for size in (5, 2, 1)]
    assert all((part == parts[0]).all() for part in parts)


# Given tokens.

SHORT = Chain.random(num_tokens=3, length=6, seed=2)
LEVELS = LogLinear(1e-6)  # starts so close to the prior that only the steps err


@pytest.mark.parametrize("prior", toy_priors(3), ids=IDS)
@pytest.mark.parametrize("predictor", ["markov", "maximal", "confident"])
def test_given_tokens_never_change(prior, predictor):
    tokens = torch.randint(3, (40, 6), generator=generator(1))
    share = torch.linspace(0, 1.1, 40)[:, None]
    given = torch.where(torch.rand(40, 6, generator=generator(2)) < share, tokens, -1)
    known, seen = given >= 0, []

    def watch(i, step, z, route):
        seen.append(i)
        assert (z[known] == given[known]).all() and (route[known] == 0).all()

    legal = (prior.probs(like=torch.zeros(())) > 0).all()
    correctors = [None, *([Corrector(2, 2), Corrector(2, 2, "uncertain")] if legal else [])]
    guidances = [None, Guidance(2.0), *([Guidance(2.0, "posterior")] * (predictor == "markov"))]
    steps = steps_of("ancestral" if predictor == "confident" else "constant:.5", 4)
    for corrector, guidance in itertools.product(correctors, guidances):
        options = {"predictor": predictor, "corrector": corrector, "guidance": guidance}
        labels = None if guidance is None else torch.zeros(40, dtype=torch.int64)
        fixed = {"given": given, "labels": labels, "on_step": watch}
        denoiser = SHORT.denoiser(prior)
        made = sample(denoiser, prior, steps, (40, 6), generator(), **fixed, **options)
        assert (made.tokens < 3).all() and seen[-1] == 4


@pytest.mark.parametrize("prior", toy_priors(3), ids=IDS)
def test_four_times_the_steps_quarter_the_error_of_an_infilled_chain(prior):
    """The whole law by enumeration, with levels by position."""
    given, states = torch.tensor([1, -1, -1, 0, -1, 2]), every_state(prior.vocab_size, 6)
    possible = ((states == given) | (given < 0)).all(-1) & (states < 3).all(-1)
    target = torch.zeros(len(states), dtype=torch.float64)
    target[possible] = SHORT.log_prob(states[possible]).softmax(0)
    denoiser = SHORT.denoiser(prior)

    def probs_at(step, states):
        return dense_probs(denoiser, prior, step, states, given=given.expand(len(states), -1))

    plans = [plan(n, LEVELS, Constant(1.0)) for n in (4, 16, 64, 256)]
    found = [propagate(prior, 6, steps, probs_at, given) for steps in plans]
    distances = [total_variation(law, target) for law in found]
    assert distances[-1] < 0.005
    for coarse, fine in itertools.pairwise(distances):
        assert 3.3 < coarse / fine < 5


def pair_laws(chain, given):
    """p(x_l, x_{l+1} | given) of free neighbours: first l, then l + 1 with l given too."""
    exact, size = chain.denoiser(Uniform(chain.num_tokens)), chain.num_tokens
    z, level = given.clamp(min=0), (given >= 0).double()[None, :, None]
    first = exact(z[None], level).exp()[0]
    for here in range(len(given) - 1):
        if given[here] < 0 and given[here + 1] < 0:
            either, known = z.repeat(size, 1), level.repeat(size, 1, 1)
            either[:, here], known[:, here] = torch.arange(size), 1
            yield here, first[here, :, None] * exact(either, known).exp()[:, here + 1]


@pytest.mark.slow
@pytest.mark.parametrize("prior", toy_priors(4), ids=IDS)
def test_neighbours_in_an_infilled_chain_are_as_the_given_tokens_say(prior):
    """Drawn by the engine; with one level for all tokens, only masks come out right."""
    chain, count = Chain.random(num_tokens=4, length=24), 4000
    tokens = chain.sample(1, generator(3))[0]
    given = torch.where(torch.rand(24, generator=generator(4)) < 0.4, tokens, -1)
    pairs = dict(pair_laws(chain, given))
    exact = chain.denoiser(prior)

    def one_level(z, alpha, labels=None):
        return exact(z, alpha.amin(1, keepdim=True))

    def found(num_steps, denoiser):
        steps, fixed = plan(num_steps, LEVELS, Constant(1.0)), given.expand(count, -1)
        made = sample(denoiser, prior, steps, (count, 24), generator(1), given=fixed).tokens
        numbers = {here: made[:, here] * 4 + made[:, here + 1] for here in pairs}
        return [torch.bincount(number, minlength=16) for number in numbers.values()]

    def distance(counts):
        laws = [law.flatten() for law in pairs.values()]
        each = [total_variation(c / count, law) for c, law in zip(counts, laws, strict=True)]
        return sum(each) / len(each)

    coarse, fine, blind = found(4, exact), found(64, exact), found(64, one_level)
    laws = [law.flatten() for law in pairs.values()]
    assert agree(fine, laws) and not agree(coarse, laws)
    assert distance(fine) < distance(coarse) / 2
    assert agree(blind, laws) == (prior.probs(like=torch.zeros(()))[0] == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "rows"), [("ancestral", 15.0), ("cap:.0025", 30.7)])
def test_a_thousand_steps_need_the_head_a_few_times_a_token(text, rows):
    """As `test_the_head_is_evaluated_where_the_coin_asks` has it for fewer steps."""
    row = torch.zeros(1, 1, 1000).log_softmax(-1)
    steps = plan(1024, LogLinear(), parse_kappa(text))

    def flat(z, alpha, labels=None):
        return row.expand(*z.shape, 1000)

    made = sample(flat, Uniform(1000), steps, (8, 64), generator())
    assert made.head_rows / 512 == pytest.approx(rows, rel=0.05)

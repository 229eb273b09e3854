"""One step over unequal sequences: each token by its own numbers, each sequence as if alone."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from toys import IDS, JOINT, PRIORS, chi_square

from psidiff.data.toy import Chain, perturbed
from psidiff.kernels.counter_rng import fold_in
from psidiff.process import LogLinear, Unigram
from psidiff.process.posterior import markov
from psidiff.sampling import (
    Confident,
    Constant,
    Corrector,
    Guidance,
    Sampler,
    parse_kappa,
    plan,
    sample,
)
from psidiff.sampling.logit_sources import LazyLogits, PrecomputedLogits
from psidiff.sampling.loop import diffusion_context
from psidiff.sampling.state import SampleLayout, advance, batch_of, stepper_of
from psidiff.sampling.step import psi_step
from psidiff.sampling.step_batch import BatchSegment, StepBatch, StepNumbers
from psidiff.sampling.steppers import GuidedPosterior, sample_x0_first

each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)


def toy(prior):
    """Sequences of any length, and another distribution where there are labels."""
    chain = Chain.random(JOINT.num_tokens, 10)
    free, labelled = (perturbed(chain.denoiser(prior), scale) for scale in (0.7, 0.3))
    return lambda z, alpha, labels=None: (free if labels is None else labelled)(z, alpha)


def state_of(source, prior, rule, length, seed, *, steps=9, done=4, **options):
    """A sample after some steps, which reads its logits from `source`."""
    layout = SampleLayout(
        1,
        length,
        (seed,),
        length,
        torch.device("cpu"),
        labels=torch.tensor([0]) if "guidance" in options else None,
    )
    made = plan(steps, LogLinear(), parse_kappa(rule))
    sampler = Sampler(Constant(1.0), **options)
    context = diffusion_context(source.denoiser, prior, made, layout, sampler)
    state = replace(context, shared=True, open_source=lambda: source).start(0, 1)
    for _ in range(done):
        ((state, _),) = advance([state])
    return state


COMPANY = (
    ("ancestral", 6, {"temperature": 0.7}, "psi"),
    ("cap:.2", 10, {"top_p": 0.8}, "psi"),
    ("confidence:.5", 8, {"predictor": "maximal"}, "psi"),
    ("constant:.3", 10, {"guidance": Guidance(2.0)}, "psi"),
    ("constant:.3", 5, {"guidance": Guidance(3.0), "min_p": 0.1}, "psi"),
    ("fb", 7, {"guidance": Guidance(1.0), "top_k": 2}, "psi"),
    ("cap:.2", 9, {"guidance": Guidance(2.0, on="posterior")}, "posterior"),
    ("ancestral", 6, {"guidance": Guidance(2.0, on="posterior")}, "posterior"),
    ("ancestral", 9, {"predictor": Confident(gumbel=1.0)}, "confident"),
    ("ancestral", 6, {"predictor": Confident(gumbel=1.0), "top_p": 0.9}, "confident"),
)


@each_prior
@pytest.mark.parametrize("kind", ("psi", "posterior", "confident"))
def test_states_that_share_a_stepper_move_together_as_each_alone(prior, kind):
    source = LazyLogits(toy(prior), prior)
    mine = [(rule, length, options) for rule, length, options, of in COMPANY if of == kind]
    states = [
        state_of(source, prior, rule, length, seed, done=2 + seed, **options)
        for seed, (rule, length, options) in enumerate(mine)
    ]
    assert len({stepper_of(state) for state in states}) == 1
    together = advance(states)
    for state, (after, event) in zip(states, together, strict=True):
        ((alone, wanted),) = advance([state])
        assert torch.equal(after.z, alone.z) and torch.equal(event.route, wanted.route)
        assert after.passes == alone.passes
        if alone.confidence is not None:
            assert torch.equal(after.confidence, alone.confidence)
    assert sum(s.head_rows for s, _ in together) == sum(
        advance([state])[0][0].head_rows - state.head_rows for state in states
    ) + sum(state.head_rows for state in states)


@pytest.mark.parametrize(
    "stepper", (Corrector(1, 3), Corrector(1, 4, "uncertain"), sample_x0_first)
)
def test_correctors_and_x0_first_move_unequal_sequences_together_too(stepper):
    prior = PRIORS[IDS.index("Uniform")]
    source = LazyLogits(toy(prior), prior)
    batches = [
        batch_of(state_of(source, prior, rule, length, seed, done=1 + seed))
        for seed, (rule, length) in enumerate((("cap:.2", 10), ("fb", 6), ("ancestral", 9)))
    ]
    joined = StepBatch.join(batches)
    shares = stepper(joined, source).split(joined)
    for batch, share in zip(batches, shares, strict=True):
        alone = stepper(batch, source)
        assert torch.equal(share.z, alone.z) and torch.equal(share.route, alone.route)
        assert share.passes == alone.passes


def test_equal_steppers_are_equal_values():
    assert GuidedPosterior(2.0) == GuidedPosterior(2.0) != GuidedPosterior(3.0)
    assert Confident(gumbel=1.0) == Confident(gumbel=1.0) and Corrector(2, 1) == Corrector(2, 1)


@each_prior
def test_a_state_goes_back_and_divides_without_a_token_changed(prior):
    source, options = LazyLogits(toy(prior), prior), {"top_p": 0.9}
    layout = SampleLayout(3, 10, (5,), 10, torch.device("cpu"), first_index=2)
    steps = plan(8, LogLinear(), parse_kappa("confidence:.4"))
    sampler = Sampler(Constant(1.0), **options)
    context = diffusion_context(source.denoiser, prior, steps, layout, sampler)
    states = [context.start(0, 3)]
    while not states[-1].done:
        states.append(advance([states[-1]])[0][0])
    halves = [states[4].select([0, 2]), states[4].select([1])]
    while not halves[0].done:
        halves = [state for state, _ in advance(halves)]
    assert torch.equal(halves[0].tokens, states[-1].tokens[[0, 2]])
    assert torch.equal(halves[1].tokens, states[-1].tokens[[1]])
    assert halves[0].passes + halves[1].passes == tuple(states[-1].passes[i] for i in (0, 2, 1))
    again = states[2]
    while not again.done:
        again = advance([again])[0][0]
    assert torch.equal(again.tokens, states[-1].tokens)


@each_prior
def test_logits_that_are_held_give_the_step_of_the_network_that_gave_them(prior):
    source = LazyLogits(toy(prior), prior)
    for done in (0, 3, 7, 9):
        state = state_of(source, prior, "cap:.1", 10, 8, done=done, top_p=0.8)
        batch = batch_of(state)
        logits = source.denoiser(state.z, max(state.step.alpha_t, 1e-9))
        made, want = psi_step(batch, PrecomputedLogits(prior, logits)), psi_step(batch, source)
        assert torch.equal(made.z, want.z) and torch.equal(made.route, want.route)
        assert made.head_rows == want.head_rows


P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)  # of clean tokens, which are independent


def pi_at(t):
    """A prior that moves: at t = 1 the first token is the usual noise, at t = 0 the last."""
    first, last = (torch.tensor(v, dtype=torch.float64) for v in ([6.0, 3, 1], [1.0, 2, 5]))
    mixed = t * first + (1 - t) * last
    return mixed / mixed.sum()


@pytest.mark.parametrize("kappa", (1.0, 0.6, 0.0))
def test_a_prior_that_moves_and_levels_of_each_token_keep_the_marginals(kappa):
    """q_t = alpha_t x + (1 - alpha_t) pi_t, a level for each position (design, section 1).

    predict b_ts[r] alpha_s / D, renoise b_ts[r] (1 - alpha_s) / D, with b = (1 - alpha) pi and
    b_ts = b_t - alpha_{t|s} b_s; renoised tokens are drawn from pi_s.
    """
    num_samples, power = 40_000, torch.tensor([0.7, 1.0, 1.6], dtype=torch.float64)
    z = torch.multinomial(pi_at(1.0), 3 * num_samples, True).view(num_samples, 3)
    times, rows = (1.0, 0.75, 0.45, 0.2, 0.0), torch.arange(num_samples)
    for i, (t, s) in enumerate(pairwise(times)):
        alpha_t, alpha_s = ((1 - torch.tensor(u).double() ** power)[None] for u in (t, s))
        pi_t, pi_s = pi_at(t), pi_at(s)
        b_t, b_s = (1 - alpha_t) * pi_t[z], (1 - alpha_s) * pi_s[z]
        arrived = (b_t - alpha_t / alpha_s * b_s) / b_t  # of noise: how much came after s
        assert bool((arrived >= 0).all())
        slope, back = kappa * arrived + 1 - kappa, kappa * arrived
        numbers = StepNumbers(
            t=t,
            alpha_t=alpha_t.expand(z.shape),
            noise=(1 - alpha_t).expand(z.shape),
            alpha_s=alpha_s.expand(z.shape),
            kappa=kappa,
            predict_slope=slope * alpha_s,
            renoise_slope=back * (1 - alpha_s),
            renoise_offset=((1 - kappa) * (1 - alpha_s)).expand(z.shape),
            greedy=0.0,
        )
        prior = Unigram(tuple(pi_s.tolist()))
        source = LazyLogits(lambda z, *_: P.log().expand(len(z), 3, 3), prior)
        segment = BatchSegment(num_samples, 3, 0.5, i, lambda logits: logits)
        hashes = fold_in(torch.full((), 7 + i), rows)
        free = torch.ones_like(z, dtype=torch.bool)
        z = psi_step(StepBatch(prior, pi_t, (segment,), numbers, hashes, i, z, free), source).z
        for position in range(3):
            alpha = alpha_s[0, position]
            law = alpha * P + (1 - alpha) * pi_s
            assert chi_square(z[:, position].bincount(minlength=3), law) < 6


def test_a_predictor_that_is_not_linear_is_refused_in_a_sentence():
    prior = PRIORS[IDS.index("Uniform")]
    steps = plan(4, LogLinear(), parse_kappa("ancestral"))
    bent = lambda p, alpha_s, alpha_t: markov(p**2, alpha_s, alpha_t)  # noqa: E731
    with pytest.raises(ValueError, match="must be linear in p_noise"):
        sample(toy(prior), prior, steps, (2, 10), predictor=bent)
    weak = lambda p, alpha_s, alpha_t: markov(0.9 * p, alpha_s, alpha_t)  # noqa: E731
    assert sample(toy(prior), prior, steps, (2, 10), predictor=weak).tokens.shape == (2, 10)

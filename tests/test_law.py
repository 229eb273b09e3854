"""The exact law of the samplers over all states of a small distribution."""

import itertools

import pytest
import torch
from toys import IDS, JOINT, PRIORS, generator

from psidiff.data.toy import Chain, Joint
from psidiff.evaluation.exact_distribution import (
    conditional_distribution,
    data_distribution,
    every_state,
    psi_function,
    sampler_distribution,
    total_variation,
)
from psidiff.evaluation.verify import STEPS, marginal_error, verify
from psidiff.process import LogLinear, Masked, Uniform, Unigram, corrupt, marginal, maximal
from psidiff.process.posterior import markov
from psidiff.sampling import Constant, parse_kappa, plan

each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)
SCHEDULE = LogLinear(1e-6)


def errors(prior, rule, predictor=markov, given=None):
    target = (
        data_distribution(JOINT, prior)
        if given is None
        else conditional_distribution(JOINT, prior, given)
    )
    step = psi_function(predictor)
    laws = [
        sampler_distribution(JOINT, prior, plan(n, SCHEDULE, rule), step, given) for n in STEPS
    ]
    assert all(abs(law.sum() - 1) < 1e-12 for law in laws)
    return [total_variation(law, target) for law in laws]


@each_prior
@pytest.mark.parametrize("predictor", [markov, maximal], ids=["markov", "maximal"])
def test_the_error_halves_when_the_steps_double(prior, predictor):
    distances = errors(prior, Constant(1.0), predictor)
    for coarse, fine in itertools.pairwise(distances):
        assert 1.6 < coarse / fine < 2.4


@each_prior
def test_maximal_coupling_is_no_worse_at_few_steps(prior):
    ours, usual = (errors(prior, Constant(1.0), p) for p in (maximal, markov))
    assert all(a <= b + 1e-12 for a, b in zip(ours, usual, strict=True))


@each_prior
@pytest.mark.parametrize("given", [[1, -1, -1], [-1, 2, -1], [0, -1, 1]])
def test_with_given_tokens_the_law_tends_to_the_exact_conditional(prior, given):
    distances = errors(prior, Constant(1.0), given=torch.tensor(given))
    if given.count(-1) == 1:  # one free token needs no second look
        assert distances[-1] < 1e-3
        return
    assert distances[-1] < 0.01
    for coarse, fine in itertools.pairwise(distances):
        assert 1.5 < coarse / fine < 2.5


@pytest.mark.parametrize("prior", [p for p in PRIORS if p.mask_id is None], ids=str)
def test_clamping_at_a_common_level_is_wrong(prior):
    """Why given tokens carry their own level: without it the error stays."""
    given, steps = torch.tensor([1, -1, -1]), plan(64, SCHEDULE, Constant(1.0))

    class OneLevel(Joint):
        def denoiser(self, prior):
            exact = Joint.denoiser(self, prior)
            return lambda z, alpha, labels=None: exact(z, alpha.min())

    clamped = OneLevel(JOINT.sequences, JOINT.weights, JOINT.num_tokens)
    law = sampler_distribution(clamped, prior, steps, given=given)
    right = sampler_distribution(JOINT, prior, steps, given=given)
    target = conditional_distribution(JOINT, prior, given)
    assert total_variation(law, target) > 5 * total_variation(right, target)


@each_prior
@pytest.mark.parametrize("text", ["cap:.05", "constant:0@.1-.5", "fb", "loop:.02"])
def test_psi_samplers_approach_the_data(prior, text):
    distances = errors(prior, parse_kappa(text))
    assert distances[-1] < 0.6 * distances[0]


def test_exact_remdm_may_remask_more_than_psi():
    """sigma up to sigma_max, kappa < 0: the law follows ReMDM's posterior."""
    from psidiff.process.posterior import superpose
    from psidiff.sampling import Cap

    alpha_t, alpha_s = 0.9, 0.95
    kappa = Cap(0.3, clipped=False)(0.1, alpha_s, alpha_t)
    sigma = min(0.3, (1 - alpha_s) / alpha_t)
    assert kappa == pytest.approx(1 - sigma / (1 - alpha_s)) and kappa < 0
    masked = superpose(markov, 1.0, alpha_s, alpha_t, kappa)
    clean = superpose(markov, 0.0, alpha_s, alpha_t, kappa)
    assert masked.predict == pytest.approx((alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t))
    assert clean.renoise == pytest.approx(sigma) and clean.keep == pytest.approx(1 - sigma)


def test_verify_reports_what_it_is_named_for():
    findings = list(verify(rules=["ancestral", "cap:.05"]))
    assert len(findings) == 16 and all(f.keeps_marginals for f in findings)
    by_name = {(f.prior, f.predictor, f.rule): f for f in findings}
    stuck = by_name["Masked", "markov", "ancestral"]
    assert stuck.revised_if_correct == stuck.revised_if_wrong == 0  # masks never look back
    uniform = by_name["Uniform", "markov", "ancestral"]
    assert 0 < uniform.revised_if_correct < uniform.revised_if_wrong
    psi = by_name["Masked", "markov", "cap:.05"]
    assert (
        psi.revised_if_wrong == pytest.approx(psi.revised_if_correct)
        and psi.revised_if_wrong > 0
    )


def test_verify_accepts_a_step_function_and_catches_a_wrong_one():
    def right(prior, z, x, alpha_s, alpha_t, kappa):
        return psi_function()(prior, z, x, alpha_s, alpha_t, kappa).probs(prior, z, x)

    def forgets_the_corrector_s_noise(prior, z, x, alpha_s, alpha_t, kappa):
        good = right(prior, z, x, alpha_s, alpha_t, kappa)
        return kappa * good + (1 - kappa) * x

    assert all(f.keeps_marginals for f in verify(right, ["cap:.05"]))
    assert not any(f.keeps_marginals for f in verify(forgets_the_corrector_s_noise, ["cap:.2"]))


def test_verify_lets_no_nan_pass():
    def nan_at_the_end(prior, z, x, alpha_s, alpha_t, kappa):
        probs = psi_function()(prior, z, x, alpha_s, alpha_t, kappa).probs(prior, z, x)
        return probs * torch.nan if alpha_s == 1 else probs

    assert not any(f.keeps_marginals for f in verify(nan_at_the_end, ["ancestral"]))


def test_verify_forgives_float32_and_sees_what_does_not_converge():
    def in_float32(prior, z, x, alpha_s, alpha_t, kappa):
        probs = psi_function()(prior, z, x, alpha_s, alpha_t, kappa).probs(prior, z, x)
        return probs.float()

    def redraws_everything(prior, z, x, alpha_s, alpha_t, kappa):
        return alpha_s * x + (1 - alpha_s) * prior.probs(like=x)

    assert all(f.keeps_marginals and f.converges for f in verify(in_float32, [Constant(1.0)]))
    by_prior = {f.prior: f for f in verify(redraws_everything, ["ancestral"])}
    assert by_prior["Uniform"].keeps_marginals and not by_prior["Uniform"].converges


def test_verify_accepts_a_step_that_draws():
    prior, at = Uniform(3), plan(4, SCHEDULE, Constant(0.5))[1]
    g = generator(5)

    def drawing(prior, z, x, alpha_s, alpha_t, kappa):
        mixture = psi_function()(prior, z, x, alpha_s, alpha_t, kappa)
        return mixture.sample(prior, z, x.contiguous(), g)

    def lazy(prior, z, x, alpha_s, alpha_t, kappa):
        return z

    assert marginal_error(prior, at, drawing, draws=2000) < 0.06
    assert marginal_error(prior, at, lazy, draws=10) > 0.1


@pytest.mark.slow
def test_verify_runs_a_drawing_step_through_all_priors():
    g = generator(6)

    def drawing(prior, z, x, alpha_s, alpha_t, kappa):
        mixture = psi_function()(prior, z, x, alpha_s, alpha_t, kappa)
        return mixture.sample(prior, z, x.contiguous(), g)

    assert all(f.keeps_marginals for f in verify(drawing, ["ancestral"]))


@each_prior
def test_the_chain_s_denoiser_is_the_enumerated_one(prior):
    """Forward-backward against summing over all sequences, with a level at each position."""
    chain = Chain.random(num_tokens=3, length=4, seed=1)
    sequences = every_state(3, 4)
    joint = Joint(sequences, chain.log_prob(sequences).exp(), 3)
    z = torch.randint(prior.vocab_size, (20, 4), generator=generator())
    for alpha in (0.3, torch.rand(20, 4, 1, generator=generator(), dtype=torch.float64)):
        one, other = (toy.denoiser(prior)(z, alpha).exp() for toy in (chain, joint))
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
        torch.testing.assert_close(one.sum(-1), torch.ones(20, 4).double())


@each_prior
def test_the_toy_s_denoiser_leaves_its_own_token_out(prior):
    z = torch.zeros(1, 3, dtype=torch.int64)
    other = z.clone()
    other[0, 1] = 2
    one, two = (JOINT.denoiser(prior)(s, 0.4) for s in (z, other))
    if (prior.probs(like=one)[torch.tensor([0, 2])] > 0).all():
        torch.testing.assert_close(one[:, 1], two[:, 1])
        assert not torch.equal(one[:, 0], two[:, 0])
    else:
        assert one[0, 1, 0] == 0 and two[0, 1, 2] == 0  # carried over


def test_the_denoiser_minimises_the_loss_s_posterior():
    """p(x | z) from the leave-one-out denoiser is q_{0|t}, averaged over nothing."""
    prior = Unigram([1.0, 2.0, 4.0])
    states, alpha = every_state(3, 3), 0.35
    x = JOINT.denoiser(prior)(states, alpha).exp()
    clean = psi_function()(prior, states, x, 1.0, alpha, 1.0).probs(prior, states, x)
    one_hot = torch.nn.functional.one_hot(JOINT.sequences, 3).double()
    q = marginal(prior, one_hot, alpha)
    likelihood = torch.stack([q[:, i][:, states[:, i]] for i in range(3)]).prod(0)
    share = JOINT.weights[:, None] * likelihood
    want = torch.einsum("ns,nlk->slk", share / share.sum(0), one_hot)
    torch.testing.assert_close(clean, want, atol=1e-12, rtol=0)


def test_chain_samples_and_entropy_agree():
    chain = Chain.syllables(length=20)
    tokens = chain.sample(4000, generator())
    nll = -chain.log_prob(tokens)
    assert abs(nll.mean() - chain.entropy()) < 5 * nll.std() / 4000**0.5
    assert len(chain.text(tokens[0])) == 20
    with pytest.raises(ValueError, match="above 0"):
        Chain(torch.tensor([1.0, 0.0]), torch.full((2, 2), 0.5), 4)
    with pytest.raises(ValueError, match="the mask last"):
        chain.denoiser(Masked(24, 0))
    assert corrupt(Uniform(24), tokens, 0.5, generator()).shape == tokens.shape

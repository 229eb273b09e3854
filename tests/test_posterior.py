"""Forward process and posteriors, for every prior."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from toys import IDS, PRIORS, carry_over, chi_square, generator, random_x

from psidiff.process import Masked, Uniform, corrupt, marginal, maximal, posterior, psi

each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)
each_level = pytest.mark.parametrize("shape", [None, (), (3, 1, 1), (3, 4, 1)])


def setting(prior, shape, seed=0):
    """z, x, two levels of the given shape, kappa a token."""
    g = generator(seed)
    x = random_x(prior, (3, 4), g)
    z = torch.randint(prior.vocab_size, (3, 4), generator=g)
    draw = torch.rand(2, *(shape or ()), generator=g, dtype=torch.float64)
    alpha_t = 0.02 + 0.9 * draw[0]
    alpha_s = alpha_t + (1 - alpha_t) * draw[1]
    if shape is None:
        alpha_s, alpha_t = alpha_s.item(), alpha_t.item()
    kappa = torch.rand(3, 4, generator=g, dtype=torch.float64)
    return z, carry_over(prior, z, x), alpha_s, alpha_t, kappa


def bayes(prior, z, x, alpha_s, alpha_t):
    """q_s(.|x) q_{t|s}(z|.) / its sum."""
    pi, survival = prior.probs(like=x), alpha_t / alpha_s
    likelihood = (
        survival * F.one_hot(z, prior.vocab_size).double() + (1 - survival) * pi[z][..., None]
    )
    joint = (alpha_s * x + (1 - alpha_s) * pi) * likelihood
    return joint / joint.sum(-1, keepdim=True)


def brute_force_psi(prior, z, x, alpha_s, alpha_t, kappa):
    kappa = torch.as_tensor(kappa, dtype=torch.float64)[..., None]
    clean = bayes(prior, z, x, torch.ones(()).double(), alpha_t)
    corrector = alpha_s * clean + (1 - alpha_s) * prior.probs(like=x)
    return kappa * bayes(prior, z, x, alpha_s, alpha_t) + (1 - kappa) * corrector


@each_prior
@each_level
@pytest.mark.parametrize("seed", range(3))
def test_psi_is_the_superposition_of_bayes_rule_and_the_forward_process(prior, shape, seed):
    z, x, alpha_s, alpha_t, kappa = setting(prior, shape, seed)
    for k in (kappa, 0.0, 0.3, 1.0):
        mixture = psi(prior, z, x, alpha_s, alpha_t, k)
        total = mixture.keep + mixture.predict + mixture.renoise
        torch.testing.assert_close(total, torch.ones_like(total), atol=1e-12, rtol=0)
        assert min(w.min() for w in (mixture.keep, mixture.predict, mixture.renoise)) > -1e-15
        want = brute_force_psi(prior, z, x, alpha_s, alpha_t, k)
        torch.testing.assert_close(mixture.probs(prior, z, x), want, atol=1e-12, rtol=0)


@each_prior
@each_level
@pytest.mark.parametrize("predictor", [None, maximal])
def test_psi_posterior_has_the_marginals_of_the_forward_process(prior, shape, predictor):
    _, _, alpha_s, alpha_t, kappa = setting(prior, shape)
    K, options = prior.vocab_size, {} if predictor is None else {"predictor": predictor}
    for clean in [i for i in range(K) if i != prior.mask_id]:
        x = F.one_hot(torch.full((3, 4), clean), K).double()
        arrived = torch.zeros(3, 4, K, dtype=torch.float64)
        for value in range(K):
            z = torch.full((3, 4), value)
            q_t = marginal(prior, x, alpha_t).expand(3, 4, K)[..., value]
            step = psi(prior, z, x, alpha_s, alpha_t, kappa, **options).probs(prior, z, x)
            arrived += torch.where((q_t > 0)[..., None], q_t[..., None] * step, 0)
        want = marginal(prior, x, alpha_s).expand(3, 4, K)
        torch.testing.assert_close(arrived, want, atol=1e-12, rtol=0)


def test_kappa_one_on_the_uniform_prior_is_equation_3():
    prior = Uniform(4)
    z, x, alpha_s, alpha_t, _ = setting(prior, None)
    Z, survival = F.one_hot(z, 4), alpha_t / alpha_s
    top = 4 * alpha_t * Z * x + (survival - alpha_t) * Z + (alpha_s - alpha_t) * x
    top = top + (1 - survival) * (1 - alpha_s) / 4
    want = top / (4 * alpha_t * x.gather(-1, z[..., None]) + 1 - alpha_t)
    torch.testing.assert_close(psi(prior, z, x, alpha_s, alpha_t, 1.0).probs(prior, z, x), want)


def test_kappa_one_on_the_masked_prior_is_equation_2():
    prior = Masked(4, 3)
    z, x, alpha_s, alpha_t, _ = setting(prior, None)
    stay = (1 - alpha_s) / (1 - alpha_t) * F.one_hot(z, 4)
    want = torch.where((z == 3)[..., None], (alpha_s - alpha_t) / (1 - alpha_t) * x + stay, x)
    torch.testing.assert_close(
        posterior(prior, z, x, alpha_s, alpha_t).probs(prior, z, x), want
    )


@given(st.floats(0.01, 0.98), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_psi_on_the_masked_prior_is_remdm(alpha_t, rise, share):
    alpha_s = alpha_t + rise * (0.99 - alpha_t)
    sigma = share * (1 - alpha_s)  # what kappa in [0, 1] reaches
    prior, kappa = Masked(4, 3), 1 - sigma / (1 - alpha_s)
    clean = F.one_hot(torch.tensor([[1, 1]]), 4).double()
    z = torch.tensor([[1, 3]])
    got = psi(prior, z, clean, alpha_s, alpha_t, kappa).probs(prior, z, clean)[0]
    unmask = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
    want = torch.tensor([[0, 1 - sigma, 0, sigma], [0, unmask, 0, 1 - unmask]])
    torch.testing.assert_close(got, want.double(), atol=1e-6, rtol=0)


@each_prior
def test_given_tokens_stay(prior):
    """At alpha_t = alpha_s = 1 the weights are 0/0; the token is kept."""
    z, x, *_ = setting(prior, None)
    x = x.roll(1, -1)  # even where x_theta calls the token impossible
    mixture = psi(prior, z, x, 1.0, 1.0, 0.3)
    assert (mixture.keep == 1).all() and (mixture.predict == 0).all()
    level = torch.where(torch.arange(4) < 2, 1.0, 0.4).double().expand(3, 4)[..., None]
    mixture = psi(prior, z, x, torch.clamp(level + 0.1, max=1), level, 0.3)
    assert (mixture.keep[:, :2] == 1).all() and not mixture.keep.isnan().any()


def test_a_masked_process_without_signal_has_weights():
    """alpha_t = 0, where the common denominator vanishes off the mask."""
    z, x = torch.tensor([[0, 3]]), torch.full((1, 2, 4), 0.25, dtype=torch.float64)
    mixture = psi(Masked(4, 3), z, x, 0.2, 0.0, 0.5)
    torch.testing.assert_close(mixture.keep[0, 0], torch.tensor(0.5 + 0.5 * 0.2).double())
    torch.testing.assert_close(mixture.predict[0, 1], torch.tensor(0.2).double())


@each_prior
def test_dtypes_follow_the_inputs(prior):
    z, x, *_ = setting(prior, None)
    for dtype in (torch.float32, torch.float64):
        mixture = psi(prior, z, x.to(dtype), 0.7, 0.4, 0.5)
        assert mixture.keep.dtype == mixture.probs(prior, z, x.to(dtype)).dtype == dtype
        assert prior.probs(like=x.to(dtype)).dtype == dtype


@each_prior
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sampling_a_mixture_draws_from_its_probs(prior, dtype):
    K, n = prior.vocab_size, 40_000
    x = random_x(prior, (1, 1), generator(3)).to(dtype)
    for value in range(K):
        z = torch.full((1, 1), value)
        want = psi(prior, z, carry_over(prior, z, x), 0.7, 0.4, 0.6)
        many = psi(prior, z.expand(1, n), x.expand(1, n, K), 0.7, 0.4, 0.6)
        got = many.sample(
            prior, z.expand(1, n), x.expand(1, n, K).contiguous(), generator(value)
        )
        probs = want.probs(prior, z, carry_over(prior, z, x))[0, 0].double()
        assert chi_square(torch.bincount(got[0], minlength=K), probs) < 6


@each_prior
def test_corruption_draws_from_the_marginal(prior):
    x = torch.full((2, 50_000), 1)
    alpha = torch.tensor([0.8, 0.3], dtype=torch.float64)[:, None, None]
    z = corrupt(prior, x, alpha, generator())
    for row, level in zip(z, (0.8, 0.3), strict=True):
        one_hot = F.one_hot(torch.tensor([[1]]), prior.vocab_size).double()
        probs = marginal(prior, one_hot, level)[0, 0]
        assert chi_square(torch.bincount(row, minlength=prior.vocab_size), probs) < 6


@each_prior
def test_prior_draws_from_its_probs(prior):
    draws = prior.sample((200, 500), generator())
    probs = prior.probs(like=torch.zeros((), dtype=torch.float64))
    assert draws.shape == (200, 500)
    assert chi_square(torch.bincount(draws.flatten(), minlength=len(probs)), probs) < 6


@each_prior
def test_equal_seeds_draw_equal_tokens_whatever_the_batch_around_them(prior):
    x = torch.ones(5, 7, dtype=torch.int64)
    whole = corrupt(prior, x, 0.5, generator(1))
    assert (corrupt(prior, x[:2], 0.5, generator(1)) == whole[:2]).all()
    assert not (corrupt(prior, x, 0.5, generator(2)) == whole).all()

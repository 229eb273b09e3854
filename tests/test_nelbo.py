"""The loss: general formula, closed forms, and the identity that ties it to -log x_theta."""

import math
from decimal import Decimal, localcontext
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from toys import IDS, PRIORS, generator, random_x

from psidiff.process import (
    Cosine,
    LogLinear,
    Masked,
    Uniform,
    Unigram,
    corrupt,
    marginal,
    nelbo,
)
from psidiff.process.nelbo import general

each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)


@each_prior
@pytest.mark.parametrize("schedule", [LogLinear(), Cosine()], ids=["loglinear", "cosine"])
def test_the_integral_of_the_loss_and_the_prior_term_are_minus_log_x_theta(prior, schedule):
    """For a denoiser without context the bound is tight, for every clean token."""
    K = prior.vocab_size
    x_theta = random_x(prior, (1, 1), generator(1))[0, 0]
    nodes, weights = np.polynomial.legendre.leggauss(400)
    u, weights = torch.tensor((nodes + 1) / 2), torch.tensor(weights / 2)
    t = u**4  # the integrand is steep at t = 0
    alpha, dalpha = schedule.alpha(t)[:, None, None], schedule.dalpha(t)[:, None, None]
    jacobian = 4 * u**3
    for clean in [i for i in range(K) if i != prior.mask_id]:
        z = torch.arange(K).expand(400, K)
        x = torch.full_like(z, clean)
        loss = nelbo(prior, z, x, x_theta.log().expand(400, K, K), alpha, dalpha)
        one_hot = F.one_hot(torch.tensor([[clean]]), K).double()
        q = marginal(prior, one_hot.expand(400, 1, K), alpha)[:, 0]
        mean = torch.where(q > 0, q * loss, 0).sum(-1)
        integral = (weights * jacobian * mean).sum()
        last = schedule.alpha(1.0)
        q_1, p_1 = marginal(prior, one_hot, last), marginal(prior, x_theta[None, None], last)
        divergence = torch.where(q_1 > 0, q_1 * (q_1.log() - p_1.log()), 0).sum()
        assert abs(integral + divergence + x_theta[clean].log()) < 1e-9


@pytest.mark.parametrize("prior", [Masked(4, 3), Uniform(4), Uniform(257)], ids=str)
def test_closed_forms_and_their_gradients_are_the_general_formula(prior):
    g = generator(2)
    K = prior.vocab_size
    x = torch.randint(K - 1, (5, 7), generator=g)
    alpha = 0.02 + 0.96 * torch.rand(5, 7, 1, generator=g, dtype=torch.float64)
    dalpha = -torch.rand(5, 7, 1, generator=g, dtype=torch.float64)
    z = corrupt(prior, x, alpha, g)
    logits = torch.randn(5, 7, K, generator=g, dtype=torch.float64)
    if prior.mask_id is not None:
        logits[..., prior.mask_id] = -torch.inf
    logits.requires_grad_()
    values, gradients = [], []
    for formula in (nelbo, general):
        value = formula(prior, z, x, logits.log_softmax(-1), alpha, dalpha)
        gradients += torch.autograd.grad(value.sum(), logits)
        values.append(value)
    assert (z == x).any() and (z != x).any() and (values[0] >= 0).all()
    torch.testing.assert_close(values[0], values[1], atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-11, rtol=1e-11)


@each_prior
def test_the_loss_is_positive_and_zero_for_the_truth(prior):
    g = generator(3)
    x = torch.randint(prior.vocab_size - 1, (4, 6), generator=g)
    z = corrupt(prior, x, 0.5, g)
    guess = random_x(prior, (4, 6), g).log()
    assert (nelbo(prior, z, x, guess, 0.5, -1.0) >= 0).all()
    truth = F.one_hot(x, prior.vocab_size).double().log()
    loss = nelbo(prior, z, x, truth, 0.5, -1.0)
    torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-12, rtol=0)


@pytest.mark.parametrize("prior", [Masked(10, 9), Uniform(10), PRIORS[3]], ids=str)
@pytest.mark.parametrize("log_p", [-20.0, -45.0, -90.0])
def test_gradients_stay_finite_where_the_network_is_sure_and_wrong(prior, log_p):
    logits = torch.zeros(1, 2, prior.vocab_size)
    logits[..., 1] = log_p
    if prior.mask_id is not None:
        logits[..., prior.mask_id] = -torch.inf
    logits.requires_grad_()
    x, z = torch.tensor([[1, 1]]), torch.tensor([[prior.mask_id or 2, 1]])
    loss = nelbo(prior, z, x, logits.log_softmax(-1), 0.5, -1.0)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isfinite().all() and gradient.isfinite().all()


def test_float32_keeps_its_digits_close_to_the_data():
    """alpha = 1 - 1e-4 as a float: 1 - alpha is made in float64."""
    g = generator(4)
    prior, alpha = Uniform(50_258), 1 - 1e-4
    x = torch.randint(50_258, (1, 4), generator=g)
    z = torch.cat((x[:, :2], (x[:, 2:] + 1) % 50_258), 1)
    log_x = torch.randn(1, 4, 50_258, generator=g, dtype=torch.float64).log_softmax(-1)
    exact = nelbo(prior, z, x, log_x, alpha, -1.0)
    rough = nelbo(prior, z, x, log_x.float(), alpha, -1.0)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough.double(), exact, rtol=1e-5, atol=1e-5)


@each_prior
def test_a_given_token_costs_its_limit(prior):
    """At alpha = 1, z = x: -alpha' pi_x (1/x_theta - 1); 0 where the level is constant."""
    x = torch.tensor([[0, 1]])
    log_x = random_x(prior, (1, 2), generator(5)).log()
    pi = prior.probs(like=log_x)
    want = pi[x] * (1 / log_x.exp().gather(-1, x[..., None])[..., 0] - 1)
    torch.testing.assert_close(nelbo(prior, x, x, log_x, 1.0, -1.0), want)
    assert (nelbo(prior, x, x, log_x, 1.0, 0.0) == 0).all()


@pytest.mark.parametrize("schedule", [LogLinear(), Cosine(), Cosine(0.1)], ids=str)
def test_schedules_have_exact_derivatives_and_inverses(schedule):
    t = torch.linspace(0.001, 1, 200, dtype=torch.float64, requires_grad=True)
    alpha = schedule.alpha(t)
    (slope,) = torch.autograd.grad(alpha.sum(), t)
    torch.testing.assert_close(schedule.dalpha(t), slope)
    torch.testing.assert_close(schedule.time(alpha), t, atol=1e-9, rtol=0)
    assert isinstance(schedule.alpha(0.3), float) and isinstance(schedule.time(0.3), float)
    assert isinstance(schedule.dalpha(0.3), float)
    assert math.isclose(schedule.time(schedule.alpha(0.3)), 0.3, abs_tol=1e-12)
    assert schedule.alpha(0.0) == pytest.approx(1, abs=1e-15)


def exact_loss(prior, z, x, log_x_theta, alpha, dalpha):
    """The general formula with 750 digits, for one token."""
    with localcontext() as context:
        context.prec = 750
        a, da = Decimal(alpha), Decimal(dalpha)
        pi = [Decimal(v) for v in prior.probs(like=log_x_theta.double()).tolist()]
        theta = [Decimal(v).exp() for v in log_x_theta.tolist()]
        clean = [Decimal(int(j == x)) for j in range(prior.vocab_size)]
        q, p = (
            [a * v + (1 - a) * n for v, n in zip(c, pi, strict=True)] for c in (clean, theta)
        )
        divergence = sum((u * (u / v).ln() for u, v in zip(q, p, strict=True) if u), Decimal(0))
        divergence -= sum(q) - sum(p)  # log_x_theta is normalised up to float64's digits
        rho = q[z] / p[z]
        return float(-da / a * pi[z] / q[z] * (divergence + rho - 1 - rho.ln()))


@pytest.mark.parametrize(
    "prior", [Masked(5, 4), Uniform(4), Uniform(20), Unigram([1.0, 2.0, 3.0, 90.0])], ids=str
)
@pytest.mark.parametrize("alpha", [5e-324, 1e-200, 1e-40, 1e-12, 0.1])
def test_the_loss_is_right_at_every_level_however_small(prior, alpha):
    K, mask = prior.vocab_size, prior.mask_id
    logits = torch.randn(K, generator=generator(6), dtype=torch.float64)
    if mask is not None:
        logits[mask] = -torch.inf
    log_x = logits.log_softmax(-1)
    z = torch.tensor([[0, 1, 2] if mask is None else [mask] * 3])
    x = torch.tensor([[0, 0, 3]])
    pairs = zip(z[0].tolist(), x[0].tolist(), strict=True)
    found = [exact_loss(prior, i, j, log_x, alpha, -0.5) for i, j in pairs]
    want = torch.tensor(found, dtype=torch.float64)
    level = torch.full((1, 3, 1), alpha, dtype=torch.float64)
    for dtype, rough in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        rows = log_x.to(dtype).expand(1, 3, K).clone().requires_grad_()
        for given, formula in product((alpha, level), (nelbo, general)):
            found = formula(prior, z, x, rows, given, -0.5 * torch.ones_like(level))
            error = (found[0].double() - want).abs()
            assert found.isfinite().all() and (error <= rough * (1 + want.abs())).all()
            if alpha < 1e-30 and mask is None:  # it goes to 0 with alpha
                assert (error <= alpha / 1e-30 * rough * K**2 + 5e-324).all()
            (slope,) = torch.autograd.grad(found.sum(), rows)
            assert slope.isfinite().all()

"""The Gaussian beneath uniform noise: the transform, order statistics, the relaxations."""

import resource
from itertools import permutations

import mpmath as mp
import pytest
import torch
from scipy import stats
from toys import chi_square, generator

from psidiff.duality import diffusion_transform, gamma_at, relax_dense, relax_sparse
from psidiff.duality.relaxation import (
    kept_weights,
    log_mean_tail,
    sample_distinct_tokens,
    signal_and_noise,
    top_gaussians,
    top_latents,
)

VOCABULARIES = [2, 27, 256, 30_522, 50_258, 128_256, 262_144]


def precise_transform(gamma, vocab_size):
    """The integral and its derivative by Gauss-Legendre in 30 digits."""
    mp.mp.dps = 30
    nu = mp.exp(-mp.mpf(gamma) / 2)
    nodes = [nu - 14, nu - 8, nu - 4, nu - 2, nu, nu + 2, nu + 4, nu + 8, nu + 14]

    def win(z):
        return mp.exp((vocab_size - 1) * mp.log(1 - mp.erfc(z / mp.sqrt(2)) / 2))

    p = mp.quad(lambda z: mp.npdf(z - nu) * win(z), nodes)
    slope = mp.quad(lambda z: (z - nu) * mp.npdf(z - nu) * win(z), nodes)
    scale = mp.mpf(vocab_size) / (vocab_size - 1)
    return float(scale * (p - mp.mpf(1) / vocab_size)), float(-nu / 2 * scale * slope)


def agrees_with_the_integral(vocab_size, gammas):
    alpha, dalpha = diffusion_transform(torch.tensor(gammas, dtype=torch.float64), vocab_size)
    for a, d, gamma in zip(alpha.tolist(), dalpha.tolist(), gammas, strict=True):
        want = precise_transform(gamma, vocab_size)
        assert abs(a - want[0]) < 1e-10 and abs(d - want[1]) < 1e-10


@pytest.mark.parametrize("vocab_size", [2, 50_258])
def test_quadrature_is_the_integral(vocab_size):
    agrees_with_the_integral(vocab_size, [-8.0, -3.5, 4.0])


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_quadrature_is_the_integral_for_every_vocabulary(vocab_size):
    agrees_with_the_integral(vocab_size, [-8 + 0.75 * i for i in range(17)])


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_series_is_quadrature_where_it_converges(vocab_size):
    gamma = torch.linspace(-4, 4, 50, dtype=torch.float64)
    exact, series = (
        diffusion_transform(gamma, vocab_size, m) for m in ("quadrature", "series")
    )
    torch.testing.assert_close(series[0], exact[0], atol=1e-9, rtol=0)
    torch.testing.assert_close(series[1], exact[1], atol=1e-9, rtol=0)


def test_series_breaks_at_high_signal():
    gamma = torch.tensor([-5.0], dtype=torch.float64)
    exact, series = (diffusion_transform(gamma, 50_258, m)[0] for m in ("quadrature", "series"))
    assert exact > 0.999 and series < 0.6


def test_polynomial_is_close_where_it_is_fitted():
    gamma = torch.linspace(-3.5, -1.75, 200, dtype=torch.float64)
    exact, fitted = (
        diffusion_transform(gamma, 50_258, m) for m in ("quadrature", "polynomial")
    )
    assert (fitted[0] - exact[0]).abs().max() < 4e-5
    worst = ((fitted[1] - exact[1]) / exact[1]).abs().max()
    assert 0.01 < worst < 0.03  # the derivative scales the loss: 2.3% at the ends


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_gamma_at_inverts_the_transform(vocab_size):
    gamma = torch.linspace(-3.5, 2, 12, dtype=torch.float64)
    alpha, _ = diffusion_transform(gamma, vocab_size)
    torch.testing.assert_close(gamma_at(alpha, vocab_size), gamma, atol=1e-6, rtol=0)
    assert isinstance(gamma_at(0.5, vocab_size), float)


def test_the_curriculum_range_in_alpha_carries_over():
    for vocab_size, low, high in ((27, -2.67, 1.60), (256, -3.03, -0.19), (4000, -3.34, -1.28)):
        assert gamma_at(0.945, vocab_size) == pytest.approx(low, abs=0.01)
        assert gamma_at(0.049, vocab_size) == pytest.approx(high, abs=0.01)


def test_transform_keeps_shape_and_dtype():
    alpha, dalpha = diffusion_transform(torch.zeros(2, 3, 1, dtype=torch.float32), 27)
    assert alpha.shape == dalpha.shape == (2, 3, 1) and alpha.dtype == torch.float32


def test_top_gaussians_have_the_law_of_a_sort():
    n, count, k = 20_000, 30, 4
    exponentials = torch.empty(n, k, dtype=torch.float64).exponential_(generator=generator())
    fast = top_gaussians(exponentials, count)
    everyone = torch.randn(n, count, generator=generator(1), dtype=torch.float64)
    slow = everyone.topk(k).values
    assert (fast.diff(dim=-1) <= 0).all()
    for i in range(k):
        assert stats.ks_2samp(fast[:, i], slow[:, i]).pvalue > 1e-4


def test_distinct_others_are_uniform_ordered_tuples():
    n, vocab_size, k = 120_000, 6, 3
    words = torch.randint(2**62, (n, k), generator=generator())
    ids = sample_distinct_tokens(words, torch.full((n,), 2), vocab_size)
    tuples = list(permutations([0, 1, 3, 4, 5], k))
    number = {t: i for i, t in enumerate(tuples)}
    counts = torch.bincount(
        torch.tensor([number[tuple(row)] for row in ids.tolist()]), minlength=len(tuples)
    )
    assert chi_square(counts, torch.ones(len(tuples), dtype=torch.float64)) < 5


def test_mean_of_the_tail_is_the_integral():
    for c, sigma in ((3.9, 1.0), (-0.5, 0.7), (30.0, 12.0), (2.0, 0.1)):
        mp.mp.dps = 30
        top, bottom = (
            mp.quad(lambda x, e=e, s=sigma: mp.exp(e * x) * mp.npdf(x, 0, s), [-mp.inf, 0, c])
            for e in (1, 0)
        )
        got = log_mean_tail(*(torch.tensor([v], dtype=torch.float64) for v in (c, sigma)))
        assert got.item() == pytest.approx(float(mp.log(top / bottom)), abs=1e-9)


def argmax_has_the_marginal_of_the_forward_process(draws, top_k, vocab_size=1000):
    for gamma in (-3.3, -2.5, -1.5):
        tokens = torch.randint(vocab_size, (20, draws // 20), generator=generator())
        soft = relax_sparse(
            tokens, torch.full((20,), gamma), vocab_size, top_k, 1e-3, generator(top_k)
        )
        transform = diffusion_transform(torch.tensor([gamma]).double(), vocab_size)[0].item()
        want = transform + (1 - transform) / vocab_size
        share = (soft.hard == tokens).double().mean().item()
        assert abs(share - want) < 4 * (want * (1 - want) / draws) ** 0.5


@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
def test_argmax_of_the_relaxed_latent_has_the_marginal_q_t(top_k):
    argmax_has_the_marginal_of_the_forward_process(200_000, top_k)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
@pytest.mark.parametrize("vocab_size", [1000, 50_258])
def test_argmax_of_the_relaxed_latent_has_the_marginal_q_t_at_2e6_draws(top_k, vocab_size):
    argmax_has_the_marginal_of_the_forward_process(2_000_000, top_k, vocab_size)


def sparse_matches_dense(vocab_size, draws, temperature):
    """Kept values and the largest weight in distribution, the kept mass in the mean."""
    k, chunk = 3, max(2_000_000 // vocab_size, 1)
    gamma = torch.tensor([gamma_at(0.4, vocab_size)])
    tokens = torch.zeros(1, draws, dtype=torch.int64)
    signal, noise = signal_and_noise(gamma, tokens.device)
    words = torch.randint(-(2**63), 2**63 - 1, (1, draws, 2 * k + 1), generator=generator())
    values, clean, kept, ids = top_latents(words, tokens, signal, noise, vocab_size)
    weights = kept_weights(values, clean, kept, noise, vocab_size, temperature)[0]

    g, dense_values, dense_weights = generator(1), [], []
    for _ in range(0, draws, chunk):
        w = noise[0] * torch.randn(chunk, vocab_size, generator=g, dtype=torch.float64)
        w[:, 0] += signal[0, 0]
        dense_values.append(w.topk(k).values)
        dense_weights.append((w / temperature).softmax(-1).topk(k).values)
    dense_values, dense_weights = torch.cat(dense_values), torch.cat(dense_weights)
    for i in range(k):
        assert stats.ks_2samp(values[0, :, i], dense_values[:, i]).pvalue > 1e-4
    assert stats.ks_2samp(weights[:, 0], dense_weights[:, 0]).pvalue > 1e-4
    assert abs(weights.sum(-1).mean() - dense_weights.sum(-1).mean()) < 0.005
    assert (weights.diff(dim=-1) <= 0).all() and (kept[..., 0] == (ids == 0).any(-1)).all()


def test_sparse_weights_have_the_law_of_the_dense_ones():
    sparse_matches_dense(1000, 8_000, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [1000, 50_258])
@pytest.mark.parametrize("temperature", [1e-3, 1e-2])
def test_sparse_weights_have_the_law_of_the_dense_ones_at_full_size(vocab_size, temperature):
    sparse_matches_dense(vocab_size, 20_000 if vocab_size < 10_000 else 6_000, temperature)


def test_sparse_relaxation_of_a_million_tokens_stays_below_200_megabytes():
    tokens = torch.randint(1_000_000, (32, 1024), generator=generator())
    gamma = torch.full((32,), -2.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    soft = relax_sparse(tokens, gamma, 1_000_000, 5, 1e-3, generator())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    assert soft.ids.shape == soft.weights.shape == (32, 1024, 5)
    assert soft.hard.shape == (32, 1024) and (soft.hard == soft.ids[..., 0]).all()
    distinct = soft.ids.sort(-1).values.diff(dim=-1)
    assert (distinct > 0).all() and soft.ids.min() >= 0 and soft.ids.max() < 1_000_000


def test_dense_relaxation_has_the_marginal_too():
    tokens = torch.zeros(1, 40_000, dtype=torch.int64)
    _, hard = relax_dense(tokens, torch.tensor([gamma_at(0.4, 30)]), 30, 0.1, generator())
    want = 0.4 + 0.6 / 30
    assert abs((hard == 0).double().mean() - want) < 4 * (want * (1 - want) / 40_000) ** 0.5


def test_small_vocabularies_relax_too():
    tokens = torch.tensor([[0, 1, 2]])
    soft = relax_sparse(tokens, torch.tensor([0.5]), 3, 2, 0.5, generator())
    assert (soft.weights.sum(-1) <= 1 + 1e-12).all() and (soft.weights > 0).all()
    probs, hard = relax_dense(tokens, torch.tensor([0.5]), 3, 0.5, generator())
    assert probs.shape == (1, 3, 3) and (probs.argmax(-1) == hard).all()

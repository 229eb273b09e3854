"""Numbers computed from the formulas by other code: they hold to 1e-9."""

import json
import math
from pathlib import Path

import pytest
import torch

from psidiff.duality import diffusion_transform
from psidiff.duality.relaxation import insert_clean, kept_weights, log_mean_tail, top_gaussians
from psidiff.process import Cosine, LogLinear, Masked, Uniform, Unigram, nelbo, posterior, psi
from psidiff.process.posterior import markov, noise_probability
from psidiff.sampling import Cap, Nucleus, Rescale, RescaleReleased, plan
from psidiff.sampling.guidance import combine, guided_posterior
from psidiff.sampling.kappa import from_remasking

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
X5 = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)
X_MASK = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0], dtype=torch.float64)


def f64(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def meets(got, want, tolerance=1e-9):
    got = torch.as_tensor(got, dtype=torch.float64)
    torch.testing.assert_close(got, f64(want), atol=tolerance, rtol=0)


def every_z(prior, x):
    """z = 0 .. K-1 in one sequence, each with the same x (or itself, where pi_z = 0)."""
    K = prior.vocab_size
    z = torch.arange(K)[None]
    rows = x.expand(1, K, K)
    carried = (prior.probs(like=x)[z] == 0)[..., None]
    return z, torch.where(carried, torch.eye(K, dtype=torch.float64), rows)


@pytest.mark.parametrize(
    ("schedule", "alpha", "dalpha"),
    [
        (LogLinear(), "loglinear_alpha_dalpha", "loglinear_alpha_dalpha"),
        (Cosine(), "cosine_alpha", "cosine_dalpha"),
    ],
)
def test_schedules(schedule, alpha, dalpha):
    times = torch.tensor(GOLDEN[alpha]["inputs"]["t"], dtype=torch.float64)
    values = [GOLDEN[name]["value"] for name in (alpha, dalpha)]
    want = [
        v[k] if isinstance(v, dict) else v
        for v, k in zip(values, ("alpha", "dalpha"), strict=True)
    ]
    meets(schedule.alpha(times), want[0])
    meets(schedule.dalpha(times), want[1])
    meets([schedule.alpha(t) for t in times.tolist()], want[0])


def test_time_of_a_level():
    want = GOLDEN["t_for_alpha"]["value"]
    meets(LogLinear().time(0.9), want["loglinear"])
    meets(Cosine().time(0.9), want["cosine"])


@pytest.mark.parametrize("vocab_size", [5, 256, 50257, 50258])
@pytest.mark.parametrize("method", ["quadrature", "series"])
def test_transform(vocab_size, method):
    gamma = f64(GOLDEN[f"dT_dgamma_K{vocab_size}"]["inputs"]["gamma"])
    alpha, dalpha = diffusion_transform(gamma, vocab_size, method)
    meets(alpha, GOLDEN[f"T_operator_K{vocab_size}"]["value"])
    meets(dalpha, GOLDEN[f"dT_dgamma_K{vocab_size}"]["value"])


def test_transform_of_two_tokens_has_a_closed_form():
    gamma = f64(GOLDEN["T_operator_K2_closed_form"]["inputs"]["gamma"])
    meets(diffusion_transform(gamma, 2)[0], GOLDEN["T_operator_K2_closed_form"]["value"])


@pytest.mark.parametrize("method", ["series150", "poly9"])
@pytest.mark.parametrize("bounds", [(-3.5, -1.75), (-3.55, -1.85)])
def test_transform_in_curriculum_time(method, bounds):
    entry = GOLDEN[f"T_{method}_K50258_g{bounds[0]}_{bounds[1]}"]
    width = bounds[1] - bounds[0]
    gamma = bounds[0] + f64(entry["inputs"]["t"]) * width
    name = {"series150": "series", "poly9": "polynomial"}[method]
    alpha, dalpha = diffusion_transform(gamma, 50258, name, gamma_range=bounds)
    tolerance = 1e-9 if name == "series" else 1e-6
    meets(alpha, entry["value"]["alpha"], tolerance)
    meets(dalpha * width, entry["value"]["dalpha_dt"], tolerance)


@pytest.mark.parametrize("name", ["usdm_posterior_K5", "usdm_posterior_equals_bayes"])
def test_uniform_posterior(name):
    z, x = every_z(Uniform(5), X5)
    meets(
        posterior(Uniform(5), z, x, 0.45, 0.3).probs(Uniform(5), z, x)[0], GOLDEN[name]["value"]
    )


def test_uniform_posterior_of_the_clean_token():
    z, x = every_z(Uniform(5), X5)
    got = posterior(Uniform(5), z, x, 1.0, 0.3).probs(Uniform(5), z, x)[0]
    meets(got, GOLDEN["usdm_q0t_K5"]["value"])


@pytest.mark.parametrize("name", ["psi_usdm_K5", "psi_usdm_as_3_component_mixture"])
def test_uniform_psi(name):
    z, x = every_z(Uniform(5), X5)
    got = psi(Uniform(5), z, x, 0.45, 0.3, 0.7).probs(Uniform(5), z, x)[0]
    meets(got, GOLDEN[name]["value"])


def test_masked_posterior():
    prior = Masked(5, 4)
    z, x = every_z(prior, X_MASK)
    got = posterior(prior, z, x, 0.45, 0.3).probs(prior, z, x)[0]
    meets(got, GOLDEN["mdm_posterior_K4plusmask"]["value"])


@pytest.mark.parametrize("name", ["psi_mdm_equals_remdm", "psi_mdm_as_mixture"])
def test_masked_psi(name):
    prior = Masked(5, 4)
    z, x = every_z(prior, X_MASK)
    meets(psi(prior, z, x, 0.45, 0.3, 0.7).probs(prior, z, x)[0], GOLDEN[name]["value"])


def test_remdm_rescale():
    entry = GOLDEN["remdm_repo_remdm-rescale_t0.5"]
    prior, alpha_t, alpha_s = Masked(5, 4), 0.5, 0.51
    z, x = every_z(prior, X_MASK)
    kappa = Rescale(entry["inputs"]["eta"])(0.5, alpha_s, alpha_t)
    meets(psi(prior, z, x, alpha_s, alpha_t, kappa).probs(prior, z, x)[0], entry["value"])


def test_remdm_loop_below_the_plateau():
    alpha_t, alpha_s = 1 - 0.03 * 0.1 / 0.05, 1 - 0.02 * 0.1 / 0.05
    prior = Masked(5, 4)
    z, x = every_z(prior, X_MASK)
    last_row = torch.tensor([0.01, 0.005, 0.003, 0.002, 0.04], dtype=torch.float64)
    got = posterior(prior, z, x, alpha_s, alpha_t).probs(prior, z, x)[0, 4]
    meets(got, (last_row / last_row.sum()).tolist())


def test_posterior_of_any_prior():
    entry = GOLDEN["posterior_general_prior_K5"]
    prior = Unigram(entry["inputs"]["prior"])
    z, x = every_z(prior, X5)
    meets(posterior(prior, z, x, 0.45, 0.3).probs(prior, z, x)[0], entry["value"])


def test_uniform_nelbo():
    x = torch.arange(5)[:, None].expand(5, 5)
    z = torch.arange(5)[None].expand(5, 5)
    log_x_theta = X5.log().expand(5, 5, 5)
    got = nelbo(Uniform(5), z, x, log_x_theta, 0.3, -0.999)
    meets(got, GOLDEN["usdm_nelbo_integrand_K5"]["value"])


@pytest.mark.parametrize("top_p", ["0.5", "0.9"])
def test_nucleus(top_p):
    log_x = f64(GOLDEN["nucleus_duo"]["inputs"]["p"]).log()[None, None]
    cut = Nucleus(lambda z, alpha, labels=None: log_x, float(top_p))
    meets(cut(torch.zeros(1, 1).long(), 0.5).exp()[0, 0], GOLDEN["nucleus_duo"]["value"][top_p])


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (Cap(0.05), "kappa_cap_T8_loglinear"),
        (Rescale(0.05), "kappa_rescale_T8_loglinear"),
        (RescaleReleased(0.05), "kappa_rescale_T8_as_coded"),
    ],
)
def test_kappa_of_a_plan(rule, name):
    steps = plan(8, LogLinear(), rule)
    want = GOLDEN[name]["value"]
    meets([s.kappa for s in steps[:-1]], want["kappa"][:-1])
    if "alpha" in want:
        meets([s.t for s in steps], want["t"])
        meets([s.alpha_t for s in steps], want["alpha"])


def test_guidance_on_a_masked_token():
    entry = GOLDEN["cfg_mdlm_gamma2"]
    prior, z = Masked(5, 4), torch.tensor([[4]])
    xs = [f64(entry["inputs"][k]) for k in ("x_cond", "x_uncond")]
    guided = combine(xs[0].log()[None], xs[1].log()[None], 2.0).softmax(-1)[None]
    on_x = posterior(prior, z, guided, 0.45, 0.3).probs(prior, z, guided)[0, 0]
    meets(on_x, entry["on_x"])
    pi = prior.probs(like=xs[0])
    mixtures = [markov(noise_probability(pi[z[0]], x[z[0]], 0.3), 0.45, 0.3) for x in xs]
    on_posterior = guided_posterior(mixtures, [x[None] for x in xs], pi, z[0], 2.0)[0]
    meets(on_posterior, entry["on_posterior"])


def test_mean_of_the_tail():
    entry = GOLDEN["log_mean_exp_trunc_normal"]
    c, sigma = (f64(entry["inputs"][k]) for k in ("c", "sigma"))
    meets(log_mean_tail(c, sigma), entry["value"])
    entry = GOLDEN["log_mean_exp_trunc_normal_tau1e-3"]
    c, sigma = (f64([entry["inputs"][k]]) for k in ("c", "sigma"))
    meets(log_mean_tail(c, sigma), entry["value"])


def test_top_gaussians():
    entry = GOLDEN["topk_gaussian_order_stats"]
    uniforms = f64(entry["inputs"]["uniforms"])
    got = top_gaussians(-uniforms.log(), entry["inputs"]["N"]) * entry["inputs"]["sigma"]
    meets(got, entry["value"])


@pytest.mark.parametrize("case", ["case1", "case2_top1", "case2_rank2"])
def test_tempered_softmax(case):
    base, entry = GOLDEN["tempered_softmax_case1"]["inputs"], GOLDEN[f"tempered_softmax_{case}"]
    sigma = f64([[[base["sigma_tilde"]]]])
    noise = sigma * top_gaussians(-f64([[base["u"]]]).log(), 999)
    clean = base["alpha_tilde"] + sigma * entry["inputs"]["g"]
    tokens, ids = torch.tensor([[base["x0"]]]), torch.tensor([[[11, 21]]])
    values, ids, kept = insert_clean(noise, clean, ids, tokens)
    weights = kept_weights(values, clean, kept, sigma, 1000, 0.01)
    got = dict(zip(ids[0, 0].tolist(), weights[0, 0].tolist(), strict=True))
    for token, weight in entry["value"]["pairs"]:
        meets(got[token], weight)
    assert ids[0, 0, 0] == entry["value"]["argmax"]


def test_prior_divergence():
    gamma = f64([float(GOLDEN["prior_kl_gamma_-1"]["inputs"]["gamma_max"])])
    K = GOLDEN["prior_kl_gamma_-1"]["inputs"]["K"]
    alpha = diffusion_transform(gamma, K)[0].item()
    hit, miss = alpha + (1 - alpha) / K, (1 - alpha) / K
    divergence = hit * math.log(hit * K) + (K - 1) * miss * math.log(miss * K)
    meets(divergence, GOLDEN["prior_kl_gamma_-1"]["value"])


def test_remasking_becomes_kappa():
    inputs = GOLDEN["psi_mdm_equals_remdm"]["inputs"]
    meets(from_remasking(inputs["sigma"], inputs["alpha_s"]), inputs["kappa"])
